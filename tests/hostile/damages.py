"""Byte-level damages of files."""

from __future__ import annotations

import io
import random
import zipfile
from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable[..., object])


def named(*functions: F) -> dict[str, F]:
    """Functions by the words of their names."""
    return {function.__name__.strip("_").replace("_", " "): function for function in functions}


def flipped(rng: random.Random, raw: bytes) -> bytes:
    changed = bytearray(raw)
    for _ in range(rng.randint(1, 3)):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def cut(rng: random.Random, raw: bytes) -> bytes:
    return raw[: rng.randrange(len(raw))]


def zeroed(rng: random.Random, raw: bytes, block: int = 1) -> bytes:
    """Zeros in the place of a stretch; of whole blocks."""
    start, end = _stretch(rng, raw, block)
    return raw[:start] + bytes(end - start) + raw[end:]


def left_out(rng: random.Random, raw: bytes, block: int = 1) -> bytes:
    start, end = _stretch(rng, raw, block)
    return raw[:start] + raw[end:]


def repeated(rng: random.Random, raw: bytes) -> bytes:
    start, end = _stretch(rng, raw, 1)
    return raw[:end] + raw[start:]


def _stretch(rng: random.Random, raw: bytes, block: int) -> tuple[int, int]:
    """Where it starts and ends: a byte, a block or a few, or up to half of all."""
    start = rng.randrange(len(raw)) // block * block
    length = rng.choice((block, rng.randint(1, 4) * block, rng.randint(1, max(len(raw) // 2 // block, 1)) * block))
    return start, min(start + length, len(raw))


def repacked(
    raw: bytes, change: Callable[[str, bytes], bytes], method: Callable[[str], int] = lambda _: zipfile.ZIP_STORED
) -> bytes:
    """A file of torch as another archive, its members changed and packed by name."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as source, zipfile.ZipFile(file, "w") as target:
        for name in source.namelist():
            target.writestr(name, change(name, source.read(name)), method(name))
    return file.getvalue()


def pickle_changed(rng: random.Random, raw: bytes) -> bytes:
    """Numbers and opcodes of the pickle are others: sizes, strides, offsets, keys of storages, dtypes."""

    def change(name: str, content: bytes) -> bytes:
        if not name.endswith("data.pkl"):
            return content
        changed = bytearray(content)
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(len(changed))] = rng.choice([*b"(.)]}tuebsaQRcK", rng.randrange(256)])
        return bytes(changed)

    return repacked(raw, change)
