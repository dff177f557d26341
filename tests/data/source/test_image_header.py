"""Image sizes from headers equal those of the decoded images."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.data.source.decode import UnusableImage, decoded_size, read_image
from tessera.data.source.image_header import read_file_header
from tests.data.make import write_image

EXIF = b"Exif\0\0"


def size_of(path: Path) -> tuple[int, int]:
    return decoded_size(str(path), path.stat().st_size)


def is_certain(path: Path) -> bool:
    """Whether the header alone gives the size."""
    header = read_file_header(str(path))
    return header is not None and header.is_decoded_size


def exif(orientation: int, order: str = "<") -> bytes:
    """A TIFF block with nothing but the orientation."""
    mark = b"II" if order == "<" else b"MM"
    return mark + struct.pack(f"{order}HIHHHIHHI", 42, 8, 1, 0x0112, 3, 1, orientation, 0, 0)


def with_segments(jpeg: bytes, *segments: tuple[int, bytes]) -> bytes:
    """A JPEG with marker segments put after its start."""
    extra = b"".join(bytes((0xFF, marker)) + struct.pack(">H", len(data) + 2) + data for marker, data in segments)
    return jpeg[:2] + extra + jpeg[2:]


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".bmp", ".webp", ".tif"])
@pytest.mark.parametrize("size_hw", [(48, 65), (65, 48), (10, 300)])
def test_every_format_and_the_common_ones_undecoded(tmp_path: Path, suffix: str, size_hw: tuple[int, int]) -> None:
    path = write_image(tmp_path / f"a{suffix}", size_hw)
    assert size_of(path) == size_hw == read_image(path).shape[:2]
    assert is_certain(path) == (suffix != ".tif")


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("orientation", range(10))
def test_exif_orientation(tmp_path: Path, orientation: int, order: str) -> None:
    path = write_image(tmp_path / "a.jpg")
    path.write_bytes(with_segments(path.read_bytes(), (0xE1, EXIF + exif(orientation, order))))
    assert size_of(path) == read_image(path).shape[:2]
    assert size_of(path) == ((64, 48) if 5 <= orientation <= 8 else (48, 64))


@pytest.mark.parametrize(
    "segments",
    [
        [(0xE1, b"http://ns.adobe.com/xap/1.0/\0<x/>"), (0xE1, EXIF + exif(6))],
        [(0xE1, EXIF + exif(6)), (0xE1, b"http://ns.adobe.com/xap/1.0/\0<x/>")],
        [(0xE1, EXIF + exif(6)), (0xE1, EXIF + exif(1))],
        [(0xE2, bytes(60000)), (0xE1, EXIF + exif(6))],
        [(0xE2, bytes(60000))] * 4 + [(0xE1, EXIF + exif(8))],
        [(0xE1, EXIF + exif(6)[:20])],
        [(0xE1, EXIF + b"II garbage")],
        [(0xE1, EXIF)],
        [(0xE1, b"")],
        [(0xFE, b"\xff\xc0 comment")],
    ],
)
def test_odd_metadata_agrees_with_decoding(tmp_path: Path, segments: list[tuple[int, bytes]]) -> None:
    path = write_image(tmp_path / "a.jpg")
    path.write_bytes(with_segments(path.read_bytes(), *segments))
    assert size_of(path) == read_image(path).shape[:2]


@settings(deadline=None)
@given(orientation=st.integers(0, 300), at=st.integers(0, 25), value=st.integers(0, 255))
def test_damaged_exif_agrees_with_decoding(
    tmp_path_factory: pytest.TempPathFactory, orientation: int, at: int, value: int
) -> None:
    block = bytearray(exif(orientation))
    block[at % len(block)] = value
    path = write_image(tmp_path_factory.mktemp("exif") / "a.jpg", (12, 16))
    path.write_bytes(with_segments(path.read_bytes(), (0xE1, EXIF + bytes(block))))
    assert size_of(path) == read_image(path).shape[:2]


def test_png_with_exif_agrees_with_decoding(tmp_path: Path) -> None:
    path = write_image(tmp_path / "a.png")
    raw, block = path.read_bytes(), exif(6)
    chunk = struct.pack(">I", len(block)) + b"eXIf" + block + struct.pack(">I", zlib.crc32(b"eXIf" + block))
    path.write_bytes(raw[:33] + chunk + raw[33:])
    assert size_of(path) == read_image(path).shape[:2]


def test_progressive_and_grey_jpeg(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    grey = np.zeros((31, 77), np.uint8)
    assert cv2.imwrite(str(path), grey, [cv2.IMWRITE_JPEG_PROGRESSIVE, 1])
    assert size_of(path) == (31, 77)


def test_jpeg_with_a_trailer_and_one_that_breaks_off(tmp_path: Path) -> None:
    path = write_image(tmp_path / "a.jpg", (200, 300))
    whole = path.read_bytes()
    for content in (whole + bytes(1000), whole[:-2000]):
        path.write_bytes(content)
        assert size_of(path) == (200, 300) and is_certain(path) == (len(content) > len(whole))


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "the file is empty"),
        (b"hello", "not an image"),
        (b"\xff\xd8\xff\xe1", "not an image"),
        (b"RIFF\0\0\0\0WEBPVP8 ", "not an image"),
        (cv2.imencode(".png", np.zeros((9, 64, 3)))[1].tobytes(), "64 x 9 pixels, expected at least 10 on each side"),
        (None, "no such file"),
    ],
)
def test_not_an_image(tmp_path: Path, content: bytes | None, what: str) -> None:
    path = tmp_path / "a.jpg"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UnusableImage, match=what):
        decoded_size(str(path), -1 if content is None else len(content))


@settings(deadline=None)
@given(st.sampled_from([b"\xff\xd8", b"\x89PNG\r\n\x1a\n", b"BM", b"RIFF0000WEBP", b""]), st.binary(max_size=60))
def test_any_bytes_end_in_a_size_or_a_reason(
    tmp_path_factory: pytest.TempPathFactory, start: bytes, rest: bytes
) -> None:
    path = tmp_path_factory.mktemp("bytes") / "a.jpg"
    path.write_bytes(start + rest)
    try:
        height, width = size_of(path)
    except UnusableImage:
        return
    assert height >= 10 and width >= 10


def test_real_images(shared: Path) -> None:
    for path in sorted((shared / "coco128" / "images").rglob("*.jpg")):
        assert size_of(path) == read_image(path).shape[:2]
