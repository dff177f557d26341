"""Tests of output files: whole or refused, strict JSON, no formulas in CSV; the order of the background writer."""

from __future__ import annotations

import csv
import json
import os
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import pytest

from tessera.data.labels import auto_labels
from tessera.deploy.inference import outputs as outputs_module
from tessera.deploy.inference.outputs import (
    AnnotatedFiles,
    AutoLabelFiles,
    BackgroundWriter,
    CropFiles,
    CsvFile,
    JsonLines,
    LabelFiles,
    Output,
    label_classes,
)
from tessera.deploy.inference.results import Result
from tessera.deploy.inference.sources.frames import Frame, SourceEvent
from tessera.utils.errors import UserError
from tessera.utils.files import sha256
from tessera.utils.report.image_grid import Style
from tests.deploy.exporting.made import picture
from tests.deploy.inference.sources.made_sources import frames, items

FRAME = Frame(picture(40, 40), "a.jpg", name=PurePath("a.jpg"))
PLACE = PurePath("a")
LINES: dict[str, Callable[[Path], Output]] = {"csv": CsvFile, "json": lambda path: JsonLines(path, {})}
FORMULAS = ("=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1")


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """As on a disk that is full: the system refuses what is longer."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def result_of(frame: Frame, names: tuple[str, ...] = ("car",), score: float = 0.5) -> Result:
    count = len(names)
    boxes = np.tile(np.array([[2, 3, 20, 30]], np.float32), (count, 1))
    scores, size = np.full(count, score, np.float32), (frame.pixels.shape[0], frame.pixels.shape[1])
    classes = np.arange(count, dtype=np.int64)
    return Result(boxes, scores, classes, names, frame.source, size, frame.media, frame.frame, frame.time_s)


def test_of_two_videos_the_other_one_is_finished(tmp_path: Path) -> None:
    outputs = AnnotatedFiles(tmp_path, Style(), 1, lambda message: None)
    for number in range(30):
        for name in ("noise.mp4", "grey.mp4"):
            level = np.random.default_rng(number).integers(0, 256, (64, 64, 3), np.uint8)
            pixels = level if name == "noise.mp4" else np.full((64, 64, 3), 127, np.uint8)
            frame = Frame(pixels, name, "stream", PurePath(name), number, number / 25)
            with files_of_at_most(10_000):
                outputs.add(result_of(frame, ()), frame, PurePath(name[:-4]))
    with (
        pytest.raises(UserError, match=r"noise\.mp4: cannot be written \(0 of its 30 frames"),
        files_of_at_most(10_000),
    ):
        outputs.close()
    assert [path.name for path in tmp_path.iterdir()] == ["grey.mp4"]
    assert len(frames(items(tmp_path / "grey.mp4"))) == 30


@pytest.mark.parametrize("kind", ["pictures", "labels", "crops"])
def test_a_file_that_does_not_fit_is_not_there(tmp_path: Path, kind: str) -> None:
    images = AnnotatedFiles(tmp_path, Style(), 1, print)
    output = {"pictures": images, "labels": LabelFiles(tmp_path, True), "crops": CropFiles(tmp_path, ["car"])}[kind]
    with pytest.raises(UserError, match=r"a.*: cannot be written .*Free space"), files_of_at_most(10):
        output.add(result_of(FRAME), FRAME, PLACE)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("kind", LINES)
def test_lines_end_with_the_last_whole_one_and_are_not_lost_in_silence(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.{kind}"
    output = LINES[kind](path)
    output.add(result_of(FRAME), FRAME, PLACE)
    whole = path.read_bytes()
    assert whole.endswith(b"\n") and b"a.jpg" in whole, "somebody may read along"
    with pytest.raises(UserError, match="cannot be written"), files_of_at_most(len(whole) + 10):
        output.add(result_of(FRAME), FRAME, PLACE)
    assert path.read_bytes() == whole
    path.unlink()
    with pytest.raises(UserError, match=r"removed while it was written"):
        output.close()


def test_a_link_in_the_folder_is_replaced_and_not_followed(tmp_path: Path) -> None:
    original = tmp_path / "original"
    original.write_text("mine")
    (out := tmp_path / "out").mkdir()
    for name in ("a.jpg", "a.txt", "p.csv", "p.jsonl"):
        (out / name).symlink_to(original)
    images = AnnotatedFiles(out, Style(), 1, print)
    for output in (images, LabelFiles(out, True), CsvFile(out / "p.csv"), JsonLines(out / "p.jsonl", {})):
        output.add(result_of(FRAME), FRAME, PLACE)
        output.close()
    assert original.read_text() == "mine" and not any(path.is_symlink() for path in out.iterdir())


@pytest.mark.parametrize("kind", LINES)
def test_a_pipe_in_the_folder_is_replaced(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a"
    os.mkfifo(path)
    with path.open("r+b", buffering=0):  # somebody has both its ends, so that opening it does not wait
        output = LINES[kind](path)
        frame = Frame(picture(40, 40), "-", name=PurePath("stdin"))
        output.add(result_of(frame), frame, PurePath("stdin"))
        output.close()
    assert path.is_file() and len(path.read_text().splitlines()) > 1
    assert kind == "json" or "\n-," in path.read_text(), "standard input is no formula"


def test_the_list_of_auto_labels_goes_on_where_there_is_one(tmp_path: Path) -> None:
    for run, place in (("first.pt", "a"), ("second.pt", "cam/b")):
        output = AutoLabelFiles(tmp_path, run, ["car"])
        output.add(result_of(FRAME), FRAME, PurePath(place))
        output.close()
    wrong = list[str]()
    found = auto_labels.auto_labels([tmp_path], wrong)
    assert {path: (label.weights, label.names, label.least_score) for path, label in found.items()} == {
        tmp_path / "a.txt": ("first.pt", ("car",), 0.5),
        tmp_path / "cam/b.txt": ("second.pt", ("car",), 0.5),
    }
    assert all(label.sha256 == sha256(path) for path, label in found.items()) and not wrong


def test_auto_labels_have_the_numbers_of_the_dataset(tmp_path: Path) -> None:
    """Whose folder need not be there."""
    data = tmp_path / "data.yaml"
    text = "path: .\ntrain: a\nval: a\nclasses: [Car]\nnames: "
    data.write_text(f"{text}[tree, Car]\n")
    for names, rows, listed in ((["car"], 1, ("tree", "Car")), (["cat", "car"], 0, ("tree", "Car"))):
        folder = tmp_path / str(rows)
        output = AutoLabelFiles(folder, "best.pt", *label_classes(names, str(data)))
        output.add(result_of(FRAME), FRAME, PurePath("a"))
        output.close()
        assert [row.split()[0] for row in (folder / "a.txt").read_text().splitlines()] == ["1"] * rows
        (label,) = auto_labels.auto_labels([folder], []).values()
        assert label.names == listed and label.least_score == (0.5 if rows else 1)
    assert label_classes(["car"], "") == (["car"], ())
    with pytest.raises(UserError, match=r"none of its 2 classes matches one of the model's 1 by name"):
        label_classes(["boat"], str(data))


def test_json_lines_are_strict(tmp_path: Path) -> None:
    def refuse(name: str) -> Any:
        raise AssertionError(name)

    lines = JsonLines(tmp_path / "a.jsonl", {"conf": float("nan"), "class_confs": [0.5, float("inf")]})
    frame = Frame(picture(40, 40), "\udcff.jpg", name=PurePath("a.jpg"), time_s=float("-inf"))
    lines.add(result_of(frame, score=float("nan")), frame, PLACE)
    lines.close()
    header, row = (json.loads(line, parse_constant=refuse) for line in (tmp_path / "a.jsonl").read_text().splitlines())
    assert header["conf"] is None and header["class_confs"] == [0.5, None]
    assert row["detections"][0]["score"] is None and row["source"] == "\udcff.jpg"


def test_cells_are_no_formulas_and_numbers_stay(tmp_path: Path) -> None:
    rows = CsvFile(tmp_path / "a.csv")
    for formula in FORMULAS:
        frame = Frame(picture(40, 40), f"{formula}.jpg", name=PurePath("a.jpg"))
        rows.add(result_of(frame, (formula, "car")), frame, PLACE)
    rows.close()
    with (tmp_path / "a.csv").open(newline="") as file:
        _, *table = csv.reader(file)
    assert [row[:2] for row in table[::2]] == [[f"'{formula}.jpg", f"'{formula}"] for formula in FORMULAS]
    assert {(row[1], *row[2:]) for row in table[1::2]} == {("car", "0.5", "", "2.0", "3.0", "20.0", "30.0")}


def test_an_image_that_its_format_cannot_hold_is_a_png_and_such_a_video_a_failure(tmp_path: Path) -> None:
    said: list[str] = []
    outputs = AnnotatedFiles(tmp_path, Style(1, False, False), 1, said.append)
    frame = Frame(np.zeros((1, 70_000, 3), np.uint8), "a.jpg", name=PurePath("a.jpg"))
    outputs.add(result_of(frame), frame, PLACE)
    for number in range(3):
        frame = Frame(np.zeros((2, 70_000, 3), np.uint8), "wide", "video", PurePath("wide.mp4"), number, number / 10)
        outputs.add(result_of(frame, ()), frame, PurePath("wide"))
    outputs.event(SourceEvent("wide", "ended", "wide: ended", "video"))
    outputs.close()
    assert len(said) == 1 and "no codec for 70000 x 2 pixels" in said[0]
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


ENDED = SourceEvent("a.jpg", "ended", "a.jpg: ended")


class Noted(Output):
    """Notes what it takes, waits where `go` is not set, and fails at the place that is called so."""

    def __init__(self) -> None:
        self.took, self.go = list[str](), threading.Event()
        self.go.set()

    def add(self, result: Result, frame: Frame, place: PurePath) -> None:
        assert self.go.wait(10)
        if place.name == "full":
            raise OSError("the disk is full")
        self.took.append(place.name)

    def event(self, event: SourceEvent) -> None:
        self.took.append(event.kind)

    def close(self) -> None:
        self.took.append("closed")


def give(behind: BackgroundWriter, *places: object) -> None:
    for place in places:
        behind.add(result_of(FRAME), FRAME, PurePath(str(place)))


def test_everything_in_order_and_only_a_few_wait() -> None:
    before, outputs, given = threading.active_count(), (Noted(), Noted()), list[int]()
    outputs[0].go.clear()
    behind = BackgroundWriter(outputs)

    def run() -> None:
        for number in range(20):
            give(behind, number)
            given.append(number)
        behind.event(ENDED)
        give(behind, 20)

    giver = threading.Thread(target=run)
    giver.start()
    giver.join(0.3)
    assert len(given) <= 3
    outputs[0].go.set()
    giver.join(10)
    behind.close()
    for output in outputs:
        assert output.took == [*map(str, range(20)), "ended", "20", "closed"]
    assert threading.active_count() == before


@pytest.mark.parametrize("late", [False, True])
def test_an_error_is_raised_once_and_nothing_after_it_is_written(late: bool) -> None:
    """By the next results, or where there are none by closing."""
    outputs = (Noted(), Noted(), Noted())
    behind = BackgroundWriter(outputs)
    outputs[1].go.clear()
    give(behind, 0, "full", 2)
    outputs[1].go.set()
    if late:
        with pytest.raises(OSError, match="full"):
            behind.close()
    else:
        with pytest.raises(OSError, match="full"):
            give(behind, *range(3, 6))
        behind.close()
    assert [output.took for output in outputs] == [["0", "closed"]] * 3


def test_ctrl_c_while_it_waits_loses_neither_a_result_nor_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    whole, failing = Noted(), Noted()
    whole.go.clear()
    failing.go.clear()
    writing, broken = BackgroundWriter([whole]), BackgroundWriter([failing])
    give(writing, 0, 1, 2)
    give(broken, "full", 1, 2)
    monkeypatch.setattr(outputs_module, "wait", interrupt)
    for behind in (writing, broken):
        with pytest.raises(KeyboardInterrupt):
            give(behind, 3)
    whole.go.set()
    failing.go.set()
    writing.close()
    with pytest.raises(OSError, match="full"):
        broken.close()
    assert (whole.took, failing.took) == (["0", "1", "2", "3", "closed"], ["closed"])
