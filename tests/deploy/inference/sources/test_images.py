"""Tests of image sources: file, folder, glob, list and standard input."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tessera.data.source.decode import read_image
from tessera.deploy.inference.input_images import to_pixels
from tessera.deploy.inference.sources.frames import Frame, SourceEvent
from tessera.deploy.inference.sources.sources import open_sources
from tessera.utils.errors import UserError
from tests.data.make import write_image
from tests.deploy.inference.sources.made_sources import events, frames, items, read


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three images, one of them deeper, and what is none; the working folder is another one."""
    for seed, name in enumerate(["b.jpg", "a.png", "deep/c.jpg", ".hidden.jpg"]):
        write_image(tmp_path / "in" / name, seed=seed)
    (tmp_path / "in" / "notes.md").write_text("none")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "in"


@pytest.fixture
def type_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    return lambda content: monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))


def names(found: list[Frame | SourceEvent]) -> list[str]:
    assert not events(found)
    return [frame.name.as_posix() for frame in frames(found)]


def test_a_folder_in_the_order_of_its_paths(folder: Path) -> None:
    found = items(str(folder))
    assert names(found) == ["a.png", "b.jpg", "deep/c.jpg"]
    for frame, name in zip(frames(found), names(found), strict=True):
        assert (frame.source, frame.media, frame.frame, frame.time_s) == (str(folder / name), "image", None, None)
        assert np.array_equal(frame.pixels, read_image(folder / name))


def test_a_glob(folder: Path) -> None:
    assert names(items(f"{folder}/*.jpg")) == ["b.jpg"]
    assert names(items(f"{folder}/**/*.jpg")) == ["b.jpg", "deep/c.jpg"]
    assert names(items(f"{folder}/*")) == ["a.png", "b.jpg", "deep/c.jpg"], "folders too, but no other file"
    write_image(folder / "[ab].jpg")
    assert names(items(f"{folder}/[ab].jpg")) == ["[ab].jpg"], "a file of that name comes first"


def test_several_in_the_order_of_naming(folder: Path) -> None:
    with open_sources([folder / "b.jpg", str(folder / "deep"), folder / "a.png"], read=read) as sources:
        assert sources.images == 3
        assert names(list(sources)) == ["b.jpg", "c.jpg", "a.png"]


def test_a_list_starts_from_its_own_folder_or_the_working_one(folder: Path, tmp_path: Path) -> None:
    (folder / "a.png").rename(folder / "upload")  # no suffix: its content tells
    (folder / "list.txt").write_bytes(f"\ufeff# these\r\nb.jpg\r\n\r\n./deep/c.jpg\r\n{folder}/upload\r\n".encode())
    assert names(items(folder / "list.txt")) == ["b.jpg", "c.jpg", "upload"]
    write_image(tmp_path / "elsewhere" / "w.jpg")
    (folder / "list.txt").write_text("w.jpg\n./b.jpg\n")
    assert names(items(folder / "list.txt")) == ["w.jpg", "b.jpg"]


def test_lines_that_name_nothing_are_reported_and_the_rest_goes_on(folder: Path) -> None:
    lines = ["b.jpg", "gone.jpg", "notes.md", "deep", "ftp://a/b.jpg", "x" * 300 + ".jpg", "n\0.jpg", "-", "\x1b[2J"]
    (folder / "list.txt").write_text("\n".join([*lines, "a.png"]))
    found = items(folder / "list.txt")
    assert [isinstance(item, Frame) for item in found] == [True, *[False] * 8, True]
    said = [event.message for event in events(found)]
    assert all(event.kind == "unreadable" and event.is_failure for event in events(found))
    assert "gone.jpg: cannot read the image (No such file" in said[0]
    assert "neither an image nor a video" in said[1] and "found a folder" in said[2] and "ftp://" in said[3]
    assert all(len(line.splitlines()) == 1 and line.isprintable() for line in said)


@pytest.mark.parametrize("suffix", [".jpg", ".png"])
def test_a_truncated_image_is_used_and_reported(folder: Path, suffix: str, type_in: Callable[[bytes], None]) -> None:
    whole = write_image(folder / f"whole{suffix}", (200, 300)).read_bytes()
    preview = b"\xff\xe1\0\x06\xff\xd9\xff\xd9" if suffix == ".jpg" else b""  # an end mark in a header is none
    cut = whole[:2] + preview + whole[2 : len(whole) // 2]
    (folder / f"cut{suffix}").write_bytes(cut)
    (folder / f"trailer{suffix}").write_bytes(whole + bytes(10_000))
    assert events(items([folder / f"whole{suffix}", folder / f"trailer{suffix}"])) == []
    for source in (folder / f"cut{suffix}", "-"):
        type_in(cut)
        with open_sources(source, read=to_pixels) as sources:
            found = list(sources)
        (event,) = events(found)
        if suffix == ".png" and event.kind == "unreadable":
            continue  # this OpenCV decodes none of it
        (frame,) = frames(found)
        assert event.kind == "damaged" and event.is_failure and "the end of the file is missing" in event.message
        assert (event.source, event.name, (200, 300, 3)) == (frame.source, frame.name, frame.pixels.shape)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("gone.jpg", "no such file or folder"),
        ("in/a.pgn", "Did you mean 'a.png'"),
        ("gone/a.jpg", "its folder gone does not exist either"),
        ("empty", "found neither images nor videos.*jpg.*mp4"),
        ("in/*.mp4", "no image or video matches"),
        ("in/notes.md", "neither an image nor a video nor a list"),
        ("empty.txt", "the list is empty"),
        ("fifo", "found a FIFO"),
        ("gopher://me:secret@host/a", r"me:\*\*\*@host"),
        ("", "found an empty text"),
        ("a\0b", "NUL"),
        ("x" * 300, "at most 255"),
        ([], "found none"),
        (["-", "-"], "more than once"),
    ],
)  # fmt: skip
def test_a_source_that_is_none(
    source: str, message: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.txt").write_text("\n# nothing\n")
    os.mkfifo("fifo")
    with pytest.raises(UserError, match=message) as error:
        open_sources(source, read=read)
    assert "--source" in str(error.value) and "secret" not in str(error.value)


def test_standard_input_is_an_image_or_a_list(folder: Path, type_in: Callable[[bytes], None]) -> None:
    type_in((folder / "a.png").read_bytes())
    (frame,) = items("-")
    assert isinstance(frame, Frame) and frame.source == "-"
    assert np.array_equal(frame.pixels, read_image(folder / "a.png"))
    type_in(f"{folder}/a.png\n\n{folder}/gone.jpg\r\n# no\n{folder}/b.jpg".encode())
    found = items("-")
    assert [Path(item.source).name for item in found] == ["a.png", "gone.jpg", "b.jpg"]
    assert [isinstance(item, Frame) for item in found] == [True, False, True]


def test_a_list_that_is_being_written_is_read_as_it_comes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading, "r") as stdin, open_sources("-", read=read) as sources:
        monkeypatch.setattr("sys.stdin", stdin)
        found = iter(sources)
        for name in ("a.png", "b.jpg"):
            os.write(writing, f"{folder}/{name}\n".encode())
            assert Path(next(found).source).name == name
        os.close(writing)
        assert next(found, None) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "standard input is empty"),
        (b"\0\0\0\x20ftypisom" + bytes(100), "found a video"),
        (b"\x7fELF" + bytes(100), "neither an image nor a list"),
        (b"x" * 100_000, "neither an image nor a list"),
        (b"\xff\xd8\xff no image" + bytes(100), "do not decode"),
    ],
)  # fmt: skip
def test_standard_input_that_is_neither(content: bytes, message: str, type_in: Callable[[bytes], None]) -> None:
    type_in(content)
    (event,) = items("-")
    assert isinstance(event, SourceEvent) and event.kind == "unreadable" and message in event.message
