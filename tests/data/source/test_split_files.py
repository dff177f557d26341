"""Lists of images that somebody else has written: special files, odd lines, names with control characters."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

import pytest

from tessera.data.source.dataset_yaml import load_spec
from tessera.data.source.index import problem_report
from tessera.data.source.split_files import list_images, stats
from tessera.utils.report.console import setup_logging
from tests.data.make import write_dataset, write_image
from tests.data.source.made_yaml import build


def dataset(tmp_path: Path, entry: str) -> Path:
    """A dataset whose train is `entry`; returns its YAML."""
    yaml = write_dataset(tmp_path / "pets", {"train/a": "0 0.5 0.5 0.2 0.2", "val/b": None})
    yaml.write_text(yaml.read_text().replace("train: images/train", f"train: {entry}"))
    return yaml


def test_special_files_have_no_state(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jpg")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "b.jpg"))
        found = stats(
            [str(tmp_path / "a.jpg"), str(tmp_path / "b.jpg"), "/dev/zero", "a\0b", "x" * 5000, str(tmp_path)]
        )
    assert found[:, 0].tolist() == [-2, -2, -2, -1, -1, -2], "a special file is not a missing one"


def test_lines_that_are_no_paths(tmp_path: Path) -> None:
    yaml = dataset(tmp_path, "list.txt")
    lines = ["./images/train/a.jpg", "a\0b.jpg", "x" * 5000 + ".jpg", "\x1b[2J.txt", "\udcff.jpg", "//", "/", "."]
    (tmp_path / "pets" / "list.txt").write_bytes("\n".join(lines).encode("utf-8", "surrogateescape"))
    index = build(yaml)
    assert [index.path(i).name for i in range(len(index))] == ["a.jpg"]
    report = problem_report(index)
    assert "\x1b" not in report and "\\x1b[2J.txt" in report


def test_first_line_longer_than_any_name(tmp_path: Path) -> None:
    yaml = dataset(tmp_path, "list.txt")
    (tmp_path / "pets" / "list.txt").write_text("x" * 300 + ".jpg\nimages/train/a.jpg\n")
    assert list_images(load_spec(yaml), "train").images


def test_names_with_control_characters_do_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    yaml = dataset(tmp_path, "images/train")
    write_image(tmp_path / "pets" / "images" / "train" / "plain.jpg").rename(
        tmp_path / "pets" / "images" / "train" / "\x1b]0;title\x07.jpg"
    )
    (tmp_path / "pets" / "labels" / "train" / "\x1b]0;title\x07.txt").write_text("nonsense\n")
    report = problem_report(build(yaml))
    assert r"\x1b]0;title\x07.txt:1" in report and "\x1b" not in report
    setup_logging(0, 1)
    try:
        logging.getLogger("train").warning("%s", "\x1b[31mred")
    finally:
        logging.getLogger().removeHandler(logging.getLogger().handlers[-1])
    assert capsys.readouterr().err.splitlines()[-1] == "WARNING: \\x1b[31mred"
