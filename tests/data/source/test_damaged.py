"""Damaged images of formats read by TIFF tags or Pillow: one message each."""

from __future__ import annotations

import io
import random
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, features

from tessera.data.source.decode import UndecodableImage, read_image
from tessera.data.source.tiff import extra_pages_message
from tests.data.source.made_tiff import tiff

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


@pytest.mark.parametrize("place", [8, "tag"])
def test_places_beyond_every_file_are_damage(tmp_path: Path, place: int | str) -> None:
    raw, path = bytearray(tiff(PIXELS.astype(np.uint16), big=True)), tmp_path / "a.tif"
    if place == "tag":  # the first entry, of kind 16, has so many numbers that they lie elsewhere
        (directory,) = struct.unpack_from("<Q", raw, 8)
        struct.pack_into("<HQQ", raw, directory + 10, 16, 9, BIG)
    else:
        struct.pack_into("<Q", raw, 8, BIG)
    path.write_bytes(raw)
    assert extra_pages_message(path) == ""
    with pytest.raises(UndecodableImage):
        read_image(path)


def test_more_pixels_than_pillow_opens_are_refused(tmp_path: Path) -> None:
    raw, path = bytearray(written("JPEG2000")), tmp_path / "a.jp2"
    for start in (raw.index(b"ihdr") + 4, raw.index(b"\xff\x51") + 6):  # of the container and of its stream
        struct.pack_into(">II", raw, start, 1 << 30, 1 << 30)
    path.write_bytes(raw)
    with pytest.raises(UndecodableImage, match=r"a\.jp2: "):
        read_image(path)
