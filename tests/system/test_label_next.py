"""detect.py --label-next: a list to train with, reasons, a page, and labels that are told from a person's."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import pytest

from tessera.commands import detect
from tessera.data.source.checks.dataset import check_dataset
from tessera.data.source.spec import load_spec
from tessera.utils.errors import ConfigError, UserError
from tessera.utils.inference.label_next import LabelNext
from tests.utils.exporting.made import ANCHORED, NAMES, checkpoint, picture
from tests.utils.report.test_page import Tags


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("weights") / "best.pt", ANCHORED)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Eight pictures without labels, the last one a copy of the first."""
    images = tmp_path / "set" / "images"
    images.mkdir(parents=True)
    for number in range(8):
        seed = number % 7
        cv2.imwrite(str(images / f"{number}.png"), picture(80 + 20 * seed, 120, seed=seed)[..., ::-1])
    return images


def run(weights: Path, source: Path | str, folder: Path, **flags: Any) -> detect.Summary:
    project = str(folder.parents[1] / "runs")
    return detect.run(weights=str(weights), source=str(source), device="cpu", project=project, **flags)


def test_what_is_written(weights: Path, folder: Path) -> None:
    summary = run(weights, folder, folder, label_next=4)
    out = summary.folder
    assert out is not None and summary.pictures == 8
    assert sorted(path.name for path in out.iterdir()) == [
        "label_next.html",
        "label_next.jsonl",
        "label_next.txt",
        "labels",
    ]
    listed = (out / "label_next.txt").read_text().splitlines()
    assert len(set(listed)) == 4 and not {str(folder / "0.png"), str(folder / "7.png")} <= set(listed)
    head, *lines = (json.loads(line) for line in (out / "label_next.jsonl").read_text().splitlines())
    assert head["schema"] == "tessera-label-next 1" and head["pictures"] == 8 and [*head["class_weights"]] == [*NAMES]
    assert [line["image"] for line in lines] == listed
    assert [line["score"] for line in lines] == sorted((line["score"] for line in lines), reverse=True)
    sure = {Path(r.source).stem: len(r) for r in detect.Detector(weights, device="cpu", conf_thres="auto")(folder)}
    for line in lines:
        rows = (out / "labels" / Path(line["image"]).with_suffix(".txt").name).read_text().splitlines()
        assert len(rows) == line["labels"] == sure[Path(line["image"]).stem]
    tags = Tags(text := (out / "label_next.html").read_text())
    assert tags.open == [] and sum(tag == "image" for tag, _ in tags.found) == 4
    again = run(weights, folder, folder, label_next=4).folder
    assert again is not None and (again / "label_next.html").read_text() == text
    assert (again / "label_next.jsonl").read_bytes() == (out / "label_next.jsonl").read_bytes()


def test_its_labels_are_told_from_a_persons_and_are_not_chosen_again(weights: Path, folder: Path) -> None:
    out = run(weights, folder, folder, label_next=3).folder
    assert out is not None
    (out / "labels").rename(folder.parent / "labels")
    names = ", ".join(NAMES)
    yaml = folder.parent / "set.yaml"
    yaml.write_text(f"path: {folder.parent}\ntrain: {out / 'label_next.txt'}\nval: images\nnames: [{names}]\n")
    found = check_dataset(load_spec(yaml))
    assert any(line.startswith("train: 3 of 3 label files (100 %) as a model wrote them") for line in found.facts)
    chosen = set((out / "label_next.txt").read_text().splitlines())
    later = run(weights, folder, folder, label_next=99)
    assert later.folder is not None and later.pictures == 5
    assert not chosen & set((later.folder / "label_next.txt").read_text().splitlines())
    with pytest.raises(UserError, match="has a label file already"):
        run(weights, out / "label_next.txt", folder, label_next=1)


def test_mistakes_are_one_message_and_leave_nothing(weights: Path, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(b"\0\0\0\x18ftypmp42")
    for source in (str(tmp_path / "a.mp4"), "rtsp://camera/stream", "0", "-"):
        with pytest.raises(ConfigError, match=r"--label-next: .* is no picture on this machine"):
            run(weights, source, folder, label_next=3)
    for flag in ("auto_label", "save_txt", "track", "agnostic_nms"):
        with pytest.raises(ConfigError, match=f"--label-next with --{flag.replace('_', '-')}"):
            run(weights, folder, folder, label_next=3, **{flag: True})
    with pytest.raises(ConfigError, match="--label-next: found -1"):
        run(weights, folder, folder, label_next=-1)
    (folder / "8 .png").write_bytes((folder / "1.png").read_bytes())
    (folder / "9.png\n.png").write_bytes((folder / "1.png").read_bytes())
    with pytest.raises(UserError, match="no line of a list can name this file"):
        run(weights, folder, folder, label_next=3)
    assert not [path for path in (tmp_path / "runs").glob("*") if any(path.iterdir())]


def test_a_picture_that_does_not_decode_is_one_line(weights: Path, folder: Path) -> None:
    (folder / "2.png").write_bytes(b"\xff\xd8\xff broken")
    summary = run(weights, folder, folder, label_next=99)
    assert summary.folder is not None and len(summary.failures) == 1
    assert len((summary.folder / "label_next.txt").read_text().splitlines()) == 7


def test_an_exported_file_is_refused(tmp_path: Path) -> None:
    detector: Any = SimpleNamespace(pipeline=SimpleNamespace(backend=SimpleNamespace(source="best.onnx")))
    with pytest.raises(ConfigError, match=r"--label-next: best\.onnx is an exported file"):
        LabelNext(detector, 3, tmp_path, "best.onnx")
