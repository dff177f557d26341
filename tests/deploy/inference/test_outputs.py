"""Tests of output files: unique names, whole or refused, strict JSON; the order of the background writer; videos."""

from __future__ import annotations

import csv
import json
import os
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.data.labels.label_files import auto_labels
from tessera.deploy.inference import outputs as outputs_module
from tessera.deploy.inference.drawing import Style
from tessera.deploy.inference.outputs import (
    AnnotatedFiles,
    AutoLabelFiles,
    BackgroundWriter,
    CropFiles,
    CsvFile,
    JsonLines,
    LabelFiles,
    Output,
    OutputPaths,
    class_folders,
    label_classes,
)
from tessera.deploy.inference.result_files import name_key
from tessera.deploy.inference.results import Result
from tessera.deploy.inference.sources.frames import Frame, Media, SourceEvent
from tessera.deploy.inference.video_writer import VideoWriter
from tessera.utils.errors import UserError
from tessera.utils.files import sha256
from tests.deploy.exporting.made import made_image
from tests.deploy.inference.sources.made_sources import barcode, events, frames, items, number_of

FRAME = Frame(made_image(40, 40), "a.jpg", name=PurePath("a.jpg"))
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


@pytest.mark.parametrize("kind", ["images", "labels", "crops"])
def test_a_file_that_does_not_fit_is_not_there(tmp_path: Path, kind: str) -> None:
    images = AnnotatedFiles(tmp_path, Style(), 1, print)
    output = {"images": images, "labels": LabelFiles(tmp_path, True), "crops": CropFiles(tmp_path, ["car"])}[kind]
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
    output.close()


def test_links_and_pipes_in_the_folder_are_replaced(tmp_path: Path) -> None:
    original = tmp_path / "original"
    original.write_text("mine")
    (out := tmp_path / "out").mkdir()
    for name in ("a.jpg", "a.txt"):
        (out / name).symlink_to(original)
    for name in ("p.csv", "p.jsonl"):
        os.mkfifo(out / name)
    images = AnnotatedFiles(out, Style(), 1, print)
    frame = Frame(made_image(40, 40), "-", name=PurePath("a.jpg"))
    for output in (images, LabelFiles(out, True), CsvFile(out / "p.csv"), JsonLines(out / "p.jsonl", {})):
        output.add(result_of(frame), frame, PLACE)
        output.close()
    assert original.read_text() == "mine" and not any(path.is_symlink() for path in out.iterdir())
    assert all(path.is_file() for path in out.iterdir()) and "\n-," in (out / "p.csv").read_text(), "no formula"


def test_the_list_of_auto_labels_goes_on_where_there_is_one(tmp_path: Path) -> None:
    for run, place in (("first.pt", "a"), ("second.pt", "cam/b")):
        output = AutoLabelFiles(tmp_path, run, ["car"])
        output.add(result_of(FRAME), FRAME, PurePath(place))
        output.close()
    stale = {"labels": "b.txt", "sha256": "0", "scores": [0.1]}
    (tmp_path / "cam" / "auto_labels.jsonl").write_text(json.dumps(stale))
    wrong = list[str]()
    files = [str(tmp_path / name) for name in ("a.txt", "cam/b.txt")]
    found = auto_labels(files, str(tmp_path), wrong)
    assert {path: (label.weights, label.names, min(label.scores)) for path, label in found.items()} == {
        files[0]: ("first.pt", ("car",), 0.5),
        files[1]: ("second.pt", ("car",), 0.5),
    }
    assert all(label.sha256 == sha256(Path(path)) for path, label in found.items()) and not wrong


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
        (label,) = auto_labels([str(folder / "a.txt")], str(folder), []).values()
        assert label.names == listed and label.scores == (0.5,) * rows
    assert label_classes(["car"], "") == (["car"], ())
    with pytest.raises(UserError, match=r"none of its 2 classes matches one of the model's 1 by name"):
        label_classes(["boat"], str(data))


def test_json_lines_are_strict(tmp_path: Path) -> None:
    def refuse(name: str) -> Any:
        raise AssertionError(name)

    lines = JsonLines(tmp_path / "a.jsonl", {"conf": float("nan"), "class_confs": [0.5, float("inf")]})
    frame = Frame(made_image(40, 40), "\udcff.jpg", name=PurePath("a.jpg"), time_s=float("-inf"))
    lines.add(result_of(frame, score=float("nan")), frame, PLACE)
    lines.close()
    header, row = (json.loads(line, parse_constant=refuse) for line in (tmp_path / "a.jsonl").read_text().splitlines())
    assert header["conf"] is None and header["class_confs"] == [0.5, None]
    assert row["detections"][0]["score"] is None and row["source"] == "\udcff.jpg"


def test_cells_are_no_formulas_and_numbers_stay(tmp_path: Path) -> None:
    rows = CsvFile(tmp_path / "a.csv")
    for formula in FORMULAS:
        frame = Frame(made_image(40, 40), f"{formula}.jpg", name=PurePath("a.jpg"))
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
        behind.event(SourceEvent("a.jpg", "ended", "a.jpg: ended"))

    giver = threading.Thread(target=run)
    giver.start()
    giver.join(0.3)
    assert len(given) <= 3
    outputs[0].go.set()
    giver.join(10)
    behind.close()
    assert [output.took for output in outputs] == [[*map(str, range(20)), "ended", "closed"]] * 2
    assert threading.active_count() == before


@pytest.mark.parametrize("late", [False, True])
def test_an_error_is_raised_once_and_nothing_after_it_is_written(late: bool) -> None:
    """By the next results, or where there are none by closing."""
    outputs = (Noted(), Noted(), Noted())
    behind = BackgroundWriter(outputs)
    outputs[1].go.clear()
    give(behind, 0, "full", 2)
    outputs[1].go.set()
    with pytest.raises(OSError, match="full"):
        behind.close() if late else give(behind, *range(3, 6))
    if not late:
        behind.close()
    assert [output.took for output in outputs] == [["0", "closed"]] * 3


def test_ctrl_c_while_it_waits_loses_neither_a_result_nor_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    outputs = whole, failing = Noted(), Noted()
    writing, broken = (BackgroundWriter([output]) for output in outputs)
    for output, behind, first in ((whole, writing, 0), (failing, broken, "full")):
        output.go.clear()
        give(behind, first, 1, 2)
    monkeypatch.setattr(outputs_module, "wait", interrupt)
    for behind in (writing, broken):
        with pytest.raises(KeyboardInterrupt):
            give(behind, 3)
    for output in outputs:
        output.go.set()
    writing.close()
    with pytest.raises(OSError, match="full"):
        broken.close()
    assert (whole.took, failing.took) == (["0", "1", "2", "3", "closed"], ["closed"])


PIXELS = np.zeros((1, 1, 3), np.uint8)


def files_of(places: OutputPaths, source: str, name: str, media: Media) -> list[str]:
    """What may be written for a source: three frames of a video, three crops of each."""
    moments = [None] if media == "image" else [0, 1, 12]
    found = []
    for moment in moments:
        place = places.of(Frame(PIXELS, source, media, PurePath(name), moment))
        frame = place.name if moment is None else f"{place.name}_{moment}"
        suffix = PurePath(name).suffix.lower() or ".jpg"
        found += [f"labels/{place.with_name(frame)}.txt"]
        found += [f"crops/car/{place.with_name(frame)}_{crop}.jpg" for crop in (0, 1, 12)]
        found += [str(place.with_name(f"{place.name}{suffix if moment is None else '.mp4'}"))]
    return list(dict.fromkeys(found))


def require_outside(files: list[str]) -> None:
    """No two are one file on any file system, none lies in a file, and each name is short enough."""
    keys = [name_key(file) for file in files]
    assert len(set(keys)) == len(keys), sorted(files)
    folders = {str(above) for key in keys for above in PurePath(key).parents}
    assert not folders & {*keys}
    assert max(len(os.fsencode(part)) for file in files for part in PurePath(file).parts) <= 255


@pytest.mark.parametrize(
    "names",
    [
        ["a.mp4", "A.mp4", "a.avi", "a_1.png", "a_1.jpg", "a.mp4_1.jpg", "a-2_12.jpg"],
        ["labels/a.jpg", "crops/car/a_0.jpg", "a.jpg", "a.mp4"],
        ["a.jpg", "a.txt/b.jpg", "a.jpg/b.jpg", "a_0.jpg/b.jpg"],
        ["x" * 251 + ".jpg", "x" * 251 + ".png", "x" * 251 + ".mp4", "é" * 125 + ".mp4"],
        ["\udcff.mp4", "\udcff.jpg", "ä.jpg", "a\u0308.jpg", "..jpg", "...jpg", "a.", "a"],
        ["/".join(["d" * 250] * 15) + "/a.jpg", "/".join(["d" * 250] * 14 + ["e"]) + "/a.jpg", "../a.jpg"],
        ["same/a.mp4", "same/a.mp4", "same/a.jpg", "same/a.jpg"],
    ],
)
def test_each_result_has_a_name_of_its_own(names: list[str]) -> None:
    places, files = OutputPaths(), list[str]()
    for number, name in enumerate(names):
        files += files_of(places, f"{number}/{name}", name, "video" if name.endswith((".mp4", ".avi")) else "image")
    require_outside(files)


_PART = st.sampled_from(
    ["a", "A", "a_1", "a_12", "a_1_0", "a-2", "labels", "crops", "car", "a.txt", "a.mp4", "x" * 250]
)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.lists(_PART, min_size=1, max_size=3), st.sampled_from([".jpg", ".mp4", ""])), max_size=8))
def test_so_it_is_in_any_order(sources: list[tuple[list[str], str]]) -> None:
    places, files = OutputPaths(), list[str]()
    for number, (parts, suffix) in enumerate(sources):
        name = "/".join(parts)[: 250 - len(suffix)] + suffix
        files += files_of(places, f"{number}", name, "video" if suffix in (".mp4", "") else "image")
    if files:
        require_outside(files)


def test_a_video_that_is_given_again_has_another_path() -> None:
    places, name = OutputPaths(), PurePath("a.mp4")
    first = places.of(Frame(PIXELS, "a.mp4", "video", name, 0))
    assert first == places.of(Frame(PIXELS, "a.mp4", "video", name, 1)) == PurePath("a")
    places.event(SourceEvent("a.mp4", "ended", "a.mp4: ended", "video", name))
    assert places.of(Frame(PIXELS, "a.mp4", "video", name, 0)) == PurePath("a.mp4")


def test_folders_of_classes() -> None:
    names = ["car", "Car", "a/b", "a:b", "a_b", "car", "n" * 300, "n" * 299, "..", "", "\x1b[31m", "é", "e\u0301"]
    folders = class_folders(names)
    found = [folders[name] for name in dict.fromkeys(names)]
    assert len({name_key(folder) for folder in found}) == len(found) == len(names) - 1
    assert all(0 < len(os.fsencode(folder)) <= 200 and "/" not in folder and folder.isprintable() for folder in found)


def test_rate_number_and_colours_are_kept(tmp_path: Path) -> None:
    with closing(VideoWriter(tmp_path / "a.mp4", 29.97)) as writer:
        for number in range(90):
            pixels = barcode(number)
            pixels[:4] = (255, 0, 0)
            writer.write(pixels, round(number / 29.97, 3))
        assert not (tmp_path / "a.mp4").exists(), "only whole files bear the name"
    assert [path.name for path in tmp_path.iterdir()] == ["a.mp4"]
    got = frames(items(tmp_path / "a.mp4"))
    assert [number_of(frame.pixels) for frame in got] == list(range(90))
    facts = events(items(tmp_path / "a.mp4"))[0].facts
    assert facts is not None and facts.fps == pytest.approx(29.97, rel=1e-3)
    red, green, blue = got[0].pixels[:2].mean(axis=(0, 1))
    assert red > 150 > 100 > max(green, blue)


def test_a_variable_rate_keeps_its_times(tmp_path: Path) -> None:
    times = [0.0, 0.1, 0.2, 1.2, 1.3]
    with closing(VideoWriter(tmp_path / "a.mp4", 10)) as writer:
        for number, time_s in enumerate(times):
            writer.write(barcode(number), 5.0 + time_s)
        writer.write(barcode(99), 6.31)  # no place left for it
    shown = [number_of(frame.pixels) for frame in frames(items(tmp_path / "a.mp4"))]
    assert shown == [0, 1, *[2] * 10, 3, 4]


def test_a_gap_of_an_hour_is_shortened(tmp_path: Path) -> None:
    with closing(VideoWriter(tmp_path / "a.mp4", 5)) as writer:
        for number, time_s in enumerate([0.0, 3600.0, 3600.2]):
            writer.write(barcode(number), time_s)
    shown = [number_of(frame.pixels) for frame in frames(items(tmp_path / "a.mp4"))]
    assert shown == [*[0] * 51, 1, 2]


def test_frames_of_another_size_keep_their_proportions_and_odd_sides_lose_a_pixel(tmp_path: Path) -> None:
    with closing(VideoWriter(tmp_path / "a.mp4", None)) as writer:
        writer.write(np.zeros((31, 41, 3), np.uint8))
        writer.write(np.full((90, 30, 3), 255, np.uint8))
    bright = frames(items(tmp_path / "a.mp4"))[1].pixels.mean(axis=2) > 127
    assert bright.all(axis=0).sum() == pytest.approx(10, abs=2) == bright.any(axis=0).sum()
    assert [frame.pixels.shape[:2] for frame in frames(items(tmp_path / "a.mp4"))] == [(30, 40)] * 2


def test_a_folder_that_cannot_be_written_to_and_no_frame(tmp_path: Path) -> None:
    VideoWriter(tmp_path / "a.mp4", 10).close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match=r"gone.*cannot be written"):
        VideoWriter(tmp_path / "gone" / "a.mp4", 10).write(barcode(1))
