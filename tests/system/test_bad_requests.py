"""Requests that cannot be met, of every command: one message, the documented exit code, and no file touched."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from tessera.commands import compare, convert, detect, train, val
from tests.data.make import write_dataset
from tests.system.launch import Command
from tests.utils.exporting.made import ANCHORED, checkpoint, dataset

Words = Callable[[Path], list[str]]
GOOD = {  # what each request begins with; `%` is the folder
    train: ["--data", "%/tiny.yaml", "--device", "cpu"],
    val: ["--weights", "%/best.pt", "--data", "%/tiny.yaml", "--device", "cpu"],
    compare: ["%/best.pt", "--device", "cpu"],
    detect: ["--weights", "%/best.pt", "--device", "cpu"],
    convert: ["--data", "%/tiny.yaml"],
}


def with_classes(value: object) -> Words:
    """`--check-data` of a dataset whose YAML has these `classes`."""

    def given(folder: Path) -> list[str]:
        content = {**yaml.safe_load((folder / "tiny.yaml").read_text()), "classes": value}
        (folder / "chosen.yaml").write_text(yaml.safe_dump(content))
        return ["--check-data", "--data", str(folder / "chosen.yaml")]

    return given


def of_labels(text: bytes) -> Words:
    """A conversion of a set with one label file."""

    def given(folder: Path) -> list[str]:
        data = write_dataset(folder / "pets", {"train/a": text})
        return ["--data", str(data), "--to", "voc", "--out", str(folder / "new")]

    return given


def of_coco(**content: object) -> Words:
    """A conversion of a COCO file with a picture, a category and what is given."""

    def given(folder: Path) -> list[str]:
        write_dataset(folder / "zoo", {"train/a": None})
        good = {"images": [{"id": 1, "file_name": "a.jpg"}], "categories": [{"id": 1, "name": "cat"}]}
        (folder / "zoo/images/train.json").write_text(json.dumps({**good, "annotations": [], **content}))
        (folder / "zoo.yaml").write_text("train: zoo/images/train.json\n")
        return ["--data", str(folder / "zoo.yaml"), "--to", "yolo", "--out", str(folder / "new")]

    return given


ROW = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 1, 8, 8]}
REQUESTS: dict[str, tuple[ModuleType, list[str] | Words, int, tuple[str, ...]]] = {
    "one fold": (val, ["--find-errors", "--task", "train", "--folds", "1"], 2, ("--folds: found 1", "2 to 100")),
    "folds of val": (val, ["--find-errors", "--folds", "3"], 2, ("--folds 3 --task val", "Give --task train")),
    "folds of nothing": (val, ["--folds", "3"], 2, ("--folds without --find-errors",)),
    "epochs of no fold": (val, ["--find-errors", "--epochs", "3"], 2, ("--epochs without --folds",)),
    "copy into the pictures": (
        val,
        ["--find-errors", "--corrected", "%/shapes/images/val/new"],
        1,
        ("--corrected", "it lies in", "Name a folder elsewhere"),
    ),
    "copy onto the dataset": (
        val,
        ["--find-errors", "--corrected", "%/shapes"],
        1,
        ("it is not empty, and nothing in it",),
    ),
    "copy below a file": (
        val,
        ["--find-errors", "--corrected", "%/tiny.yaml/new"],
        1,
        ("found a file, expected a folder",),
    ),
    "copy of nobody": (val, ["--find-errors", "--corrected", "~no-such-user/new"], 2, ("--corrected:", "home folder")),
    "score of 2": (
        val,
        ["--find-errors", "--corrected", "%/new", "--corrected-score", "2"],
        2,
        ("--corrected-score: found 2", "0 to 1"),
    ),
    "errors at a threshold": (val, ["--find-errors", "--conf-thres", "0.3"], 2, ("--conf-thres 0.3", "at most 0.01")),
    "errors of one class": (
        val,
        ["--find-errors", "--single-cls"],
        2,
        ("--find-errors --single-cls", "Leave --single-cls out"),
    ),
    "errors of no split": (val, ["--find-errors", "--task", "test"], 1, ("expected `test`",)),
    "requirement of a word": (compare, ["%/best.pt", "--require", "map"], 2, ("found 'map', expected a",)),
    "requirement of a typo": (
        compare,
        ["%/best.pt", "--require", "maps > 0"],
        2,
        ("'maps' is no metric", "Did you mean 'map'"),
    ),
    "interval of ms": (compare, ["%/best.pt", "--require", "ms.low < 1"], 2, ("'ms.low' is not known",)),
    "one model": (compare, [], 2, ("found 1 MODEL, expected two",)),
    "run without weights": (
        compare,
        ["%/shapes"],
        1,
        ("--b", "shapes: found a folder", "shapes/weights/best.pt either"),
    ),
    "text for a model": (compare, ["%/tiny.yaml"], 1, ("--b", "tiny.yaml: damaged, or not a checkpoint")),
    "text for an export": (val, ["--weights", "%/b.onnx", "--find-errors"], 1, ("b.onnx: ONNX Runtime",)),
    "next 0.5": (detect, ["--source", "%/shapes", "--label-next", "0.5"], 2, ("expected a whole number",)),
    "next beside labels": (
        detect,
        ["--source", "%/shapes", "--label-next", "3", "--auto-label"],
        2,
        ("--label-next with --auto-label", "Leave --auto-label out"),
    ),
    "next of a camera": (detect, ["--source", "0", "--label-next", "3"], 2, ("'0' is no picture", "camera")),
    "next of what is not there": (
        detect,
        ["--source", "%/nix", "--label-next", "3"],
        1,
        ("nix: no such file",),
    ),
    "unknown tool": (
        detect,
        ["--source", "%/shapes", "--save-as", "cocoo"],
        2,
        ("--save-as: found 'cocoo'", "Did you mean 'coco'"),
    ),
    "runs of nobody": (detect, ["--source", "%", "--project", "~no-such-user/p"], 2, ("--project: found",)),
    "no format": (convert, ["--out", "%/new"], 2, ("--to: none given",)),
    "conversion into the pictures": (
        convert,
        ["--to", "coco", "--out", "%/shapes/images/train/new"],
        1,
        ("--out", "it lies in", "Name a folder elsewhere"),
    ),
    "conversion onto the dataset": (convert, ["--to", "voc", "--out", "%/shapes"], 1, ("it is not empty",)),
    "labels in UTF-16": (convert, of_labels("0 .5 .5 .1 .1\n".encode("utf-16")), 1, ("a.txt: the text is UTF-16",)),
    "polygon of two points": (convert, of_labels(b"0 .1 .1 .5 .5 .5\n"), 1, ("a.txt:1: 6 fields", "at least 3 points")),
    "unknown class": (convert, of_labels(b"7 .5 .5 .1 .1\n"), 1, ("a.txt:1: class 7", "names 2 classes")),
    "COCO without images": (convert, of_coco(images=None), 1, ("train.json: expected a COCO detection file",)),
    "COCO of no image": (convert, of_coco(annotations=[{**ROW, "image_id": 9}]), 1, ("image_id 9, but no image",)),
    "COCO without a box": (convert, of_coco(annotations=[{**ROW, "bbox": None}]), 1, ("bbox is null, expected x, y",)),
    "COCO ids of two": (
        convert,
        of_coco(categories=[{"id": i, "name": "a"} for i in (1, 2)], annotations=[ROW, {**ROW, "category_id": 2}]),
        1,
        ("both named 'a'",),
    ),
    "class that is not there": (train, with_classes(["circel"]), 2, ("'circel'", "Did you mean 'circle'")),
    "no classes": (train, with_classes([]), 2, ("classes: found []", "Leave it out to keep all")),
    "class of nothing": (train, with_classes({"round": []}), 2, ("'round' is made of no class",)),
    "class without a name": (train, with_classes({"": ["circle"]}), 2, ("classes: found the name ''",)),
    "class in two": (
        train,
        with_classes({"round": ["circle"], "all": ["circle", "star"]}),
        2,
        ("'circle' twice, in 'all' and in 'round'",),
    ),
    "class beyond the last": (train, with_classes([9]), 2, ("found 9", "0 to 2")),
    "page of nothing": (train, ["--report"], 2, ("--report without --check-data",)),
    "page below a file": (train, ["--check-data", "--report", "%/tiny.yaml/x"], 1, ("--report", "folder")),
    "unknown objective": (train, ["--evolve", "2", "--objective", "mapp"], 2, ("Did you mean 'map'",)),
    "objective by 0": (train, ["--evolve", "2", "--objective", "map / 0"], 2, ("it divides by 0",)),
    "objective of no search": (train, ["--objective", "map"], 2, ("without --evolve", "Add --evolve N")),
    "search that is not there": (
        train,
        ["--evolve", "2", "--resume", "%/nix", "--hyp", "hyp.short.yaml"],
        1,
        ("nix: not the folder of a search",),
    ),
}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("requests")
    data = dataset(folder, train=4, val=3)
    checkpoint(folder / "best.pt", ANCHORED, str(data))
    (folder / "b.onnx").write_text("no export")
    return folder


def files(folder: Path) -> dict[Path, bytes | None]:
    """Everything in a folder, with its content."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize("name", REQUESTS)
def test_one_message_and_nothing_is_touched(
    name: str, pristine: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, given, code, said = REQUESTS[name]
    folder = tmp_path / "it's ü"
    shutil.copytree(pristine, folder)
    data = yaml.safe_load((folder / "tiny.yaml").read_text())
    (folder / "tiny.yaml").write_text(yaml.safe_dump({**data, "path": str(folder / "shapes")}))
    words = given(folder) if callable(given) else given
    monkeypatch.chdir(folder)  # where runs would go
    before = files(folder)
    outcome = command(module.main, *(word.replace("%", str(folder)) for word in [*GOOD[module], *words]))
    assert outcome.code == code, outcome.said
    assert "Traceback" not in outcome.err + outcome.out and outcome.err.count("error: ") == 1, outcome.said
    message = outcome.err[outcome.err.index("error: ") :]
    for part in said:
        assert part in message, outcome.said
    assert files(folder) == before
