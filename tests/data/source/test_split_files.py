"""Untrusted lists of images: odd lines, and names with control characters."""

from __future__ import annotations

from pathlib import Path

from tessera.data.source.index import problem_report
from tests.data.make import write_dataset, write_image
from tests.data.source.made_yaml import build


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
