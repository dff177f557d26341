"""Limits of image sizes, special files in place of images and labels, and damaged images: one message each."""

from __future__ import annotations

import io
import os
import random
import re
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image, features

from tessera.data.source import decode
from tessera.data.source.decode import RefusedImage, UndecodableImage, UnusableImage, decoded_size, read_image
from tessera.data.source.image_header import extra_pages_message
from tessera.utils.errors import ConfigError, UserError
from tests.data.make import write_dataset, write_image
from tests.data.source.made_tiff import tiff
from tests.data.source.made_yaml import build, check
from tests.system.launch import ROOT

HUGE = 30_000  # pixels a side


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(side: int, data: bytes = b"") -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def bmp(side: int) -> bytes:
    return b"BM" + struct.pack("<IHHI", 66, 0, 0, 54) + struct.pack("<IiiHHIIiiII", 40, side, side, 1, 24, *[0] * 6)


def jpeg(side: int, between: bytes = b"") -> bytes:
    raw = cv2.imencode(".jpg", np.zeros((16, 16, 3), np.uint8))[1].tobytes()
    at = raw.index(b"\xff\xc0")
    return raw[:at] + between + raw[at : at + 5] + struct.pack(">HH", side, side) + raw[at + 9 :]


def gif(side: int) -> bytes:
    frame = b"," + struct.pack("<4HB", 0, 0, side, side, 0) + b"\2\0;"
    return b"GIF89a" + struct.pack("<HHBBB", side, side, 0, 0, 0) + frame


def bare_tiff(side: int) -> bytes:
    tags = [(256, 4, 1, side), (257, 4, 1, side)]
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + b"".join(struct.pack("<HHII", *tag) for tag in tags) + bytes(4)


def test_the_name_of_a_colour_profile_reaches_no_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    raw = cv2.imencode(".png", PIXELS)[1].tobytes()
    noise = np.random.default_rng(0).bytes(4196)
    profile = b"\x1b]0;x\x07\0\0" + zlib.compress(struct.pack(">I", 3999) + noise)  # libpng: "invalid signature"
    (tmp_path / "a.png").write_bytes(raw[:33] + 2 * chunk(b"iCCP", profile) + raw[33:])
    np.testing.assert_array_equal(read_image(tmp_path / "a.png"), PIXELS[..., ::-1])
    assert capfd.readouterr().err == ""


MANY = r"[\d,]+ pixels, expected at most 268,435,456"


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        *((raw, MANY) for raw in (png(HUGE), bmp(HUGE), jpeg(HUGE), jpeg(HUGE, b"\xff" * 5000), bare_tiff(HUGE))),
        *((raw, MANY) for raw in (jpeg(HUGE, b"garbage"), f"P6\n{HUGE} {HUGE}\n255\n".encode())),
        *((raw, MANY) for raw in (f"Pf\n{HUGE} {HUGE}\n-1\n".encode(), gif(HUGE))),
    ],
)
def test_what_is_too_large_is_not_decoded(
    tmp_path: Path, raw: bytes, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cv2, "imdecode", lambda *_: pytest.fail("decoded"))
    path = tmp_path / "a.png"
    path.write_bytes(raw)
    with pytest.raises(RefusedImage, match=rf"a\.png: {said}"):
        read_image(path)
    with pytest.raises(UnusableImage, match=f"^{said}"):
        decoded_size(str(path), len(raw))


def test_the_variable_raises_and_lowers_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    yaml = write_dataset(tmp_path / "set", {"train/a": "0 .5 .5 .5 .5", "train/b": "0 .5 .5 .5 .5"})
    write_image(tmp_path / "set/images/train/b.jpg", (100, 100))
    assert len(build(yaml)) == 2
    monkeypatch.setenv("TESSERA_MAX_PIXELS", "9999")
    index = build(yaml)
    assert len(index) == 1, "the stored index is of another budget"
    assert "b.jpg: 10,000 pixels, expected at most 9,999" in index.problems[0]
    assert any("expected at most 9,999" in line for line in check(yaml).problems)
    with pytest.raises(UndecodableImage):
        read_image(tmp_path / "set/images/train/b.jpg")
    for wrong in ("many", "-1", "0", "1e6", "9" * 30):
        monkeypatch.setenv("TESSERA_MAX_PIXELS", wrong)
        with pytest.raises(ConfigError, match="TESSERA_MAX_PIXELS: found"):
            build(yaml)


BEGINS = {
    "command": "from tessera.utils.startup import check_command_line; from tessera.utils.flags.val import ValConfig\n"
    "check_command_line(ValConfig)\n",
    "Python": "",
}


@pytest.mark.slow
@pytest.mark.parametrize("begin", BEGINS)
def test_formats_that_only_opencv_knows_are_bound(tmp_path: Path, begin: str) -> None:
    raster = struct.pack(">8I", 0x59A66A95, HUGE, HUGE, 24, 0, 1, 0, 0)  # Sun
    (tmp_path / "a.png").write_bytes(raster + bytes(100))
    program = (
        f"{BEGINS[begin]}"
        "from pathlib import Path; from tessera.data.source.decode import read_image\n"
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (5 * 2**29, 5 * 2**29))  # its pixels take more\n"
        f"read_image(Path({str(tmp_path / 'a.png')!r}))"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "do not decode" in ended.stderr, ended.stderr


def test_one_large_image_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "LARGE", 40 * 40)
    paths = [write_image(tmp_path / f"{i}.png", (40, 40) if i % 2 else (20, 20)) for i in range(8)]
    at_once, most = {400: 0, 1600: 0}, {400: 0, 1600: 0}
    guard, imdecode = threading.Lock(), cv2.imdecode

    def slowly(*given: object) -> object:
        image = imdecode(*given)  # type: ignore[call-overload]
        size = image.shape[0] * image.shape[1]
        with guard:
            at_once[size] += 1
            most[size] = max(most[size], at_once[size])
        time.sleep(0.05)
        with guard:
            at_once[size] -= 1
        return image

    monkeypatch.setattr(cv2, "imdecode", slowly)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(read_image, paths))
    assert most[1600] == 1 and most[400] > 1


def make_special(path: Path, kind: str) -> None:
    """A FIFO, a socket, a link to a device, or a folder."""
    path.unlink(missing_ok=True)
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(os.path.relpath(path))
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()


@pytest.mark.parametrize("kind", ["FIFO", "socket", "device", "folder"])
@pytest.mark.parametrize("place", ["images/train/a.jpg", "labels/train/a.txt"])
def test_special_files_are_skipped_by_kind(
    tmp_path: Path, kind: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    yaml = write_dataset(tmp_path / "set", {"train/a": "0 .5 .5 .5 .5", "train/b": "0 .5 .5 .5 .5"})
    make_special(tmp_path / "set" / place, kind)
    index = build(yaml)
    (problem,) = index.problems
    assert len(index) == 1 and problem.startswith(f"{place}: cannot be read (it is a {kind}"), problem
    if place.endswith(".jpg"):  # it may have become one since
        with pytest.raises(UserError, match=f"it is a {kind}"):
            read_image(tmp_path / "set" / place)


@pytest.mark.parametrize("place", ["images/train/a.jpg", "labels/train/a.txt"])
def test_a_huge_file_is_skipped_by_name_with_its_size_and_the_limit(tmp_path: Path, place: str) -> None:
    yaml = write_dataset(tmp_path / "set", {"train/a": "0 .5 .5 .5 .5", "train/b": "0 .5 .5 .5 .5"})
    os.truncate(tmp_path / "set" / place, 50 << 30)
    index = build(yaml)
    (problem,) = index.problems
    assert len(index) == 1 and re.match(f"{place}: .*53,687,091,200 bytes, more than the (limit|maximum) of", problem)
    if place.endswith(".jpg"):
        with pytest.raises(UserError, match=r"a\.jpg: .*53,687,091,200 bytes, more than the limit of 4,294,967,296"):
            read_image(tmp_path / "set" / place)


PIXELS = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
BIG = 2**63  # a place that no file has, and no offset of `struct` can be


def written(kind: str) -> bytes:
    if kind.startswith("TIFF"):
        return tiff(PIXELS.astype(np.uint16), big=kind == "TIFF of 64 bits")
    if kind == "AVIF" and not features.check("avif"):
        pytest.skip("this Pillow was built without AVIF")
    file = io.BytesIO()
    (Image.fromarray(PIXELS).convert("P") if kind == "GIF" else Image.fromarray(PIXELS)).save(file, kind)
    return file.getvalue()


def damaged(raw: bytes, rng: random.Random) -> bytes:
    """With some bytes changed, mostly among the first and the last hundred, or cut off."""
    changed = bytearray(raw)
    for _ in range(rng.choice((1, 3, 20))):
        place = rng.choice((rng.randrange(4, 100), len(raw) - rng.randrange(1, 240), rng.randrange(4, len(raw))))
        changed[place] = rng.choice((0, 1, 2, 255, rng.randrange(256)))
    return bytes(changed[: rng.randrange(8, len(raw))] if rng.random() < 0.2 else changed)


@pytest.mark.parametrize("kind", ["GIF", "JPEG2000", "AVIF", "TIFF", "TIFF of 64 bits"])
def test_a_damaged_file_is_an_image_or_one_message(tmp_path: Path, kind: str) -> None:
    raw, rng, path = written(kind), random.Random(0), tmp_path / "a"
    outcomes = set()
    for _ in range(150):
        path.write_bytes(damaged(raw, rng))
        extra_pages_message(path)
        try:
            outcomes.add(read_image(path).ndim)
        except UndecodableImage as error:
            assert str(error).startswith(f"{path}: ")
            outcomes.add(0)
    assert 0 in outcomes and outcomes <= {0, 3}


@pytest.mark.parametrize("of", ["the directory", "a tag's values"])
def test_offsets_beyond_the_end_of_a_file_are_damage(tmp_path: Path, of: str) -> None:
    raw, path = bytearray(tiff(PIXELS.astype(np.uint16), big=True)), tmp_path / "a.tif"
    if of == "a tag's values":  # nine values of eight bytes do not fit into the tag, which has their offset
        (directory,) = struct.unpack_from("<Q", raw, 8)
        struct.pack_into("<HQQ", raw, directory + 10, 16, 9, BIG)
    else:
        struct.pack_into("<Q", raw, 8, BIG)
    path.write_bytes(raw)
    assert extra_pages_message(path) == ""
    with pytest.raises(UndecodableImage):
        read_image(path)
