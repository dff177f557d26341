"""Helpers for tests of sources: reading of items, and frames that carry their number."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from tessera.data.source.decode import read_image
from tessera.deploy.inference.sources.frames import Frame, SourceEvent
from tessera.deploy.inference.sources.sources import open_sources
from tessera.utils.bit_depth import Pixels
from tessera.utils.errors import UserError


def read(picture: Path | bytes) -> Pixels:
    if isinstance(picture, Path):
        return read_image(picture)
    image = cv2.imdecode(np.frombuffer(picture, np.uint8), cv2.IMREAD_COLOR) if picture else None
    if image is None:
        raise UserError("the bytes do not decode")
    return cv2.cvtColor(image, cv2.COLOR_BGR2RGB)


def items(specs: Any, **options: Any) -> list[Frame | SourceEvent]:
    with open_sources(specs, read=read, **options) as sources:
        return list(sources)


def frames(found: Iterable[Frame | SourceEvent]) -> list[Frame]:
    return [item for item in found if isinstance(item, Frame)]


def events(found: Iterable[Frame | SourceEvent]) -> list[SourceEvent]:
    return [item for item in found if isinstance(item, SourceEvent)]


def kinds(found: Iterable[Frame | SourceEvent]) -> list[str]:
    return [event.kind for event in events(found)]


BITS, STRIPE, HEIGHT = 12, 16, 64
WIDTH = BITS * STRIPE


def barcode(number: int) -> Pixels:
    """uint8 (64, 192, 3) whose vertical stripes are the bits of a number, the lowest one on the left."""
    bits = np.array([number >> bit & 1 for bit in range(BITS)], np.uint8) * 255
    return np.broadcast_to(np.repeat(bits, STRIPE)[None, :, None], (HEIGHT, WIDTH, 3)).copy()


def number_of(pixels: Pixels) -> int:
    """What `barcode` has written, whatever a codec has made of it."""
    assert pixels.shape == (HEIGHT, WIDTH, 3), pixels.shape
    levels = pixels[HEIGHT // 4 : -HEIGHT // 4].mean(axis=(0, 2)).reshape(BITS, STRIPE)[:, 4:-4].mean(axis=1)
    return sum(1 << bit for bit in range(BITS) if levels[bit] > 127)


def write_video(path: Path, numbers: Iterable[int], fps: float = 10, codec: str = "mp4v") -> Path:
    writer = cv2.VideoWriter(str(path), cv2.CAP_FFMPEG, cv2.VideoWriter_fourcc(*codec), fps, (WIDTH, HEIGHT))
    assert writer.isOpened()
    for number in numbers:
        writer.write(barcode(number))
    writer.release()
    return path
