"""`val: 0.2`: reproducible splits that keep copies of a file together; untrusted lists of images."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from tessera.data.source import split_files
from tessera.data.source.dataset_yaml import load_spec
from tessera.data.source.index import build_index, problem_report
from tessera.utils.errors import UserError
from tessera.utils.types import DatasetIndex
from tests.data.labels.test_voc import voc, voc_object
from tests.data.make import write_dataset, write_image
from tests.data.source.made_yaml import BOX, build, check, coco_set, refuse


def write_images(root: Path, count: int = 40, kind: str = "text") -> Path:
    """Noise; numbers 0 to 3 are copies of one file."""
    for number in range(count):
        write_image(root / f"images/{number}.jpg", seed=max(number, 3))
        label = {"text": root / f"labels/{number}.txt", "voc": root / f"annots/{number}.xml"}.get(kind)
        if label:
            label.parent.mkdir(exist_ok=True)
            label.write_bytes(BOX.encode() if kind == "text" else voc(voc_object()))
    entry = "images"
    if kind == "coco":
        entry = "set.json"
        coco_set(root, {f"{n}.jpg": [{"category_id": 3, "bbox": [1, 2, 30, 20]}] for n in range(count)}, {3: "cat"})
    yaml = root.with_name(f"{root.name}.yaml")
    yaml.write_text(f"path: {root}\ntrain: {entry}\nval: 0.2\nnames: [cat]\n")
    return yaml


def names(index: DatasetIndex) -> list[str]:
    return sorted(index.path(number).stem for number in range(len(index)))


def parts(yaml: Path) -> tuple[list[str], list[str]]:
    spec = load_spec(yaml)
    return names(build_index(spec, "train")), names(build_index(spec, "val"))


@pytest.mark.parametrize("kind", ["text", "coco", "voc"])
def test_each_image_is_on_one_side_with_its_labels(tmp_path: Path, kind: str) -> None:
    yaml = write_images(tmp_path / "set", kind=kind)
    train, val = parts(yaml)
    assert sorted(train + val) == sorted(map(str, range(40))) and len(val) == 8
    assert {"0", "1", "2", "3"} <= set(train) or {"0", "1", "2", "3"} <= set(val), "copies stay together"
    index = build(yaml, "val")
    assert len(index.classes) == 8 and not index.problems
    found = check(yaml)
    assert (found.errors, found.problems, found.images) == ([], [], 40)


def test_the_same_wherever_it_lies_and_whatever_it_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    yaml = write_images(tmp_path / "set")
    train, val = parts(yaml)
    moved = tmp_path / "elsewhere/deeper/set"
    shutil.copytree(tmp_path / "set", moved)
    for kind, suffix in (("images", "jpg"), ("labels", "txt")):
        for number in range(40):
            (moved / kind / f"{number}.{suffix}").rename(moved / kind / f"z{97 - number}.{suffix}")
    other = tmp_path / "elsewhere/set.yaml"
    other.write_text(yaml.read_text().replace(str(tmp_path / "set"), str(moved)))
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / "other cache"))
    assert {f"z{97 - int(name)}" for name in val} == set(parts(other)[1])
    other.write_text(other.read_text() + "split_seed: 1\n")
    assert {f"z{97 - int(name)}" for name in val} != set(parts(other)[1])
    other.write_text(other.read_text().replace("split_seed: 1", "split_seed: 0").replace("val: 0.2", "val: 0.5"))
    half = set(parts(other)[1])
    assert len(half) == 20 and len(half & {f"z{97 - int(name)}" for name in val}) >= 4
    assert parts(yaml) == (train, val), "neither is taken for the other"


def test_files_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    yaml = write_images(tmp_path / "set")
    with caplog.at_level(logging.INFO):
        first = parts(yaml)
    assert "val: 0.2 of train with split_seed 0: 8 of 40 images" in caplog.text
    with monkeypatch.context() as patch:
        patch.setattr(split_files, "open_plain", lambda *_: pytest.fail("read again"))
        (tmp_path / "set/labels/7.txt").write_text(BOX * 2)  # the images are unchanged
        assert parts(yaml) == first
    (hashes,) = (tmp_path / "cache/index").glob("*-contents-*")
    hashes.write_bytes(hashes.read_bytes()[:-1] + b"?")
    (tmp_path / "set/labels/8.txt").write_text(BOX * 2)
    assert parts(yaml) == first, "a damaged cache is not used"
    write_image(tmp_path / "set/images/new.jpg", seed=99)
    assert len(set(first[1]) ^ set(parts(yaml)[1])) <= 2, "a new image moves few others"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("train: a\nval: 1.5", r"a\.yaml:2: val: found 1.5, expected a folder, or a fraction of train between 0 and 1"),
        ("train: a\nval: 20%", "val: found '20%', expected a folder, or a fraction.* Write 0.2 for a fifth"),
        ("train: a\nval: '0.2'", "val: found '0.2', expected a folder, or a fraction"),
        ("val: 0.2", "val: 0.2 is a fraction of train, which is missing"),
        ("train: a\nval: 0.2\nsplit_seed: x", r"a\.yaml:3: split_seed: found 'x', expected an integer from 0 on"),
        ("train: a\nval: b\nsplit_seed: 1", "split_seed: found without a fraction"),
        ("train: a\nval: true", "val: found True, expected a folder"),
    ],
)
def test_what_is_no_share(tmp_path: Path, text: str, what: str) -> None:
    refuse(tmp_path, f"{text}\nnames: [cat]\n", what)


def test_too_few_images(tmp_path: Path) -> None:
    yaml = write_images(tmp_path / "set", 4)
    with pytest.raises(UserError, match=r"val: 0\.2: train has too few different images \(4 files\)"):
        build(yaml, "val")


def dataset(tmp_path: Path, entry: str) -> Path:
    """A dataset whose train is `entry`; returns its YAML."""
    yaml = write_dataset(tmp_path / "pets", {"train/a": "0 0.5 0.5 0.2 0.2", "val/b": None})
    yaml.write_text(yaml.read_text().replace("train: images/train", f"train: {entry}"))
    return yaml


def test_lines_that_are_no_paths(tmp_path: Path) -> None:
    yaml = dataset(tmp_path, "list.txt")
    lines = [
        "x" * 300 + ".jpg",
        "./images/train/a.jpg",
        "a\0b.jpg",
        "x" * 5000 + ".jpg",
        "\x1b[2J.txt",
        "\udcff.jpg",
        "//",
        "/",
        ".",
    ]
    (tmp_path / "pets" / "list.txt").write_bytes("\n".join(lines).encode("utf-8", "surrogateescape"))
    index = build(yaml)
    assert [index.path(i).name for i in range(len(index))] == ["a.jpg"]
    report = problem_report(index)
    assert "\x1b" not in report and "\\x1b[2J.txt" in report


def test_names_with_control_characters_are_escaped(tmp_path: Path) -> None:
    yaml = dataset(tmp_path, "images/train")
    name = "\x1b]0;title\x07"
    write_image(tmp_path / "pets/images/train/plain.jpg").rename(tmp_path / f"pets/images/train/{name}.jpg")
    (tmp_path / f"pets/labels/train/{name}.txt").write_text("nonsense\n")
    report = problem_report(build(yaml))
    assert r"\x1b]0;title\x07.txt:1" in report and "\x1b" not in report
