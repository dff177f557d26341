"""Hostile images: truncated, flipped, huge by their headers, of another format, or special files."""

from __future__ import annotations

import os
import random
import struct
import zlib
from pathlib import Path

import cv2
import numpy as np

from tessera.analysis.checks.run_checks import check_dataset
from tessera.data.feed.dataset import ValDataset
from tessera.data.feed.image_store import ImageStore
from tessera.data.source.dataset_yaml import load_spec
from tessera.data.source.index import build_index
from tessera.utils.types import DatasetIndex, Draw
from tests.data.make import write_image
from tests.hostile.damages import cut, named, zeroed
from tests.hostile.expect import checked, message_or_result

CASES, FAST_CASES = 1500, 20
TIME_LIMIT_S = 60

_FORMATS = (".jpg", ".png", ".bmp", ".webp", ".tif", ".gif", ".ppm", ".pfm", ".jp2", ".hdr", ".ras", ".avif")
_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".pfm", ".dng", ".mpo")
_NAMES = ("a", "\x1b[2J", "a\nb", "\u202egnp", "ü" * 100, "a b", "%s%n", "'\"")


def trial(rng: random.Random, folder: Path) -> str:
    os.environ["TESSERA_MAX_PIXELS"] = str(2**25)
    damage = rng.choice([*_DAMAGES, "special file"])
    images = folder / "images" / "train"
    good = [write_image(images / f"good{i}.jpg") for i in range(2)]
    bad = images / (rng.choice(_NAMES) + rng.choice(_SUFFIXES))
    if damage == "special file":
        make_special(bad, rng)
    else:
        bad.write_bytes(_DAMAGES[damage](rng, encoded(rng)))
    for path in (*good, bad):
        label = folder / "labels" / "train" / f"{path.stem}.txt"
        label.parent.mkdir(parents=True, exist_ok=True)
        label.write_text("0 .5 .5 .5 .5\n")
    yaml = folder / "set.yaml"
    yaml.write_text(f"path: {folder}\ntrain: images/train\nval: images/train\nnames: [cat]\n")
    index = message_or_result(lambda: build_index(load_spec(yaml), "train"))
    assert isinstance(index, DatasetIndex) and len(index) + len(index.problems) == 3, index
    for line in [*index.problems, *check_dataset(load_spec(yaml)).lines()]:
        checked(line)
    use(index)
    return damage


def use(index: DatasetIndex) -> None:
    """Load every image as a validation does; those that do not decode are skipped, with a reason."""
    for interpolation in ("area", "linear"):
        dataset = ValDataset(index, ImageStore(index, 64, interpolation))  # type: ignore[arg-type]
        batch = dataset.__getitems__([Draw(i, i, 0, (64, 64)) for i in range(len(index))])
        assert not isinstance(batch, Exception), batch
        assert len(batch) + len(batch.undecodable) == len(index) and len(batch) >= 2
        for why in batch.undecodable.values():
            checked(why)


def encoded(rng: random.Random) -> bytes:
    suffix = rng.choice(_FORMATS)
    size = rng.randint(32, 80), rng.randint(32, 80), 3  # JPEG 2000 needs so many
    pixels = np.random.default_rng(rng.getrandbits(32)).integers(0, 256, size).astype(np.uint8)
    ok, content = cv2.imencode(suffix, pixels.astype(np.float32) / 255 if suffix in (".pfm", ".hdr") else pixels)
    assert ok, suffix
    return bytes(content)


def flipped(rng: random.Random, raw: bytes) -> bytes:
    """Change a few bytes, more often near the start."""
    changed = bytearray(raw)
    for _ in range(rng.randint(1, 8)):
        end = min(len(raw), rng.choice((64, 700, len(raw))))
        changed[rng.randrange(end)] = rng.choice((0, 255, rng.randrange(256)))
    return bytes(changed)


def spliced(rng: random.Random, raw: bytes) -> bytes:
    """The start of one image, the end of another."""
    return cut(rng, raw) + encoded(rng)[rng.randrange(20) :]


def repeated_often(rng: random.Random, raw: bytes) -> bytes:
    start = rng.randrange(len(raw))
    stretch = raw[start : start + rng.randint(1, 40)]
    return raw[:start] + stretch * rng.randint(2, 20_000) + raw[start:]


def enlarged(rng: random.Random, raw: bytes) -> bytes:
    """Huge numbers where a size is likely to be."""
    changed, size = bytearray(raw), rng.choice((0xFFFF, 30_000, 0x7FFFFFFF, 0xFFFFFFFF, 12_000, 5_000))
    places = {b"\xff\xd8": [m + 5 for m in range(len(raw) - 10) if raw[m] == 0xFF and raw[m + 1] in (0xC0, 0xC2)]}
    likely = places.get(raw[:2], [16, 18, 20, 22, 24, 26, rng.randrange(len(raw))])
    for at in likely if rng.random() < 0.5 else [rng.choice(likely or [0])]:
        width = 2 if raw[:2] == b"\xff\xd8" or (size <= 0xFFFF and rng.random() < 0.5) else 4
        number = struct.pack(rng.choice("<>") + ("H" if width == 2 else "I"), size & (2 ** (8 * width) - 1))
        changed[at : at + width] = number
    return bytes(changed)


def noise(rng: random.Random, raw: bytes) -> bytes:
    """The mark of a format, and random bytes."""
    return raw[: rng.randrange(16)] + rng.randbytes(rng.randrange(5000))


def profile(rng: random.Random, raw: bytes) -> bytes:
    """A PNG whose colour profiles have errors, and names with which libpng reports them."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    whole = cv2.imencode(".png", np.zeros((40, 40, 3), np.uint8))[1].tobytes()
    content = zlib.compress(struct.pack(">I", rng.choice((3999, 4200))) + rng.randbytes(4196))
    names = rng.choices((b"\x1b]0;x\x07", b"a\x1b[2Jb\x9b", b"plain", b"\r"), k=rng.randint(1, 3))
    profiles = b"".join(chunk(b"iCCP", name + b"\0\0" + content) for name in names)
    return whole[:33] + profiles + (cut(rng, whole[33:]) if rng.random() < 0.3 else whole[33:])


_DAMAGES = {
    **named(flipped, cut, zeroed, spliced, repeated_often, enlarged, noise, profile),
    "other suffix": lambda rng, raw: raw,
}


def make_special(path: Path, rng: random.Random) -> None:
    kind = rng.randrange(6)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.mkdir()
    elif kind == 5:
        path.touch()
        os.truncate(path, 50 << 30)
    else:
        path.symlink_to(("/dev/zero", "/nowhere", path.name)[kind - 2])
