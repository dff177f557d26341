"""Image files become pixels: uint8 RGB, height × width × 3, EXIF orientation applied, by one rule for all readers."""

from __future__ import annotations

import logging
import re
import threading
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import get_worker_info

from tessera.data.source.bounds import LARGE, refuse_large
from tessera.utils.errors import UserError
from tessera.utils.files import open_plain
from tessera.utils.machine.opencv import cv2
from tessera.utils.pixels import PixelRule, to_uint8
from tessera.utils.streams import words_of_libraries

log = logging.getLogger(__name__)

Pixels = NDArray[np.uint8]

_RGB = getattr(cv2, "IMREAD_COLOR_RGB", None)  # since OpenCV 4.11
_REDUCED = {8: cv2.IMREAD_REDUCED_COLOR_8, 4: cv2.IMREAD_REDUCED_COLOR_4, 2: cv2.IMREAD_REDUCED_COLOR_2}
_LEVELS = (np.uint8, np.uint16, np.float32, np.float64)
REDUCTIONS = tuple(_REDUCED)  # what the sides of a JPEG can be divided by while it is decoded, largest first
# Threads decode side by side, but one large picture at a time. No process is forked while they do.
_ONE_LARGE = threading.Lock()
_JPEG_START, _JPEG_END = b"\xff\xd8", b"\xff\xd9"
# How the warnings of libjpeg begin (its jerror.h), and those of libpng, which leave the pixels whole.
_WARNINGS = re.compile(
    b"Corrupt JPEG data: |Premature end of JPEG file|Inconsistent progression |Invalid SOS parameters |"
    b"Unknown Adobe color |Warning: unknown JFIF |Application transferred too many |libpng warning: "
)


class UndecodableImage(UserError):
    """The content of a file is not an image, or not the one that was indexed; the same on every rank."""


class TooLarge(UndecodableImage):
    """A picture has more pixels than TESSERA_MAX_PIXELS allows, or than its file can hold."""


def read_image(path: Path, reduction: int = 1, rule: PixelRule | None = None) -> Pixels:
    """Decode a file as uint8 (H, W, 3) RGB.

    Grey and palette become colours, alpha is dropped, EXIF orientation is applied, and more than 8 bits become 8 by
    `rule`. A JPEG that breaks off is decoded as far as it goes. A loader worker warns of it.

    Args:
        path: the file.
        reduction: 1, 2, 4 or 8: a JPEG comes with its sides divided by it, rounded up; others as they are.
        rule: for levels of more than 8 bits.

    Raises:
        UserError: the file cannot be read.
        MemoryError: too little memory.
        UndecodableImage: it holds no image, or one that is too large.
    """
    return to_uint8(read_levels(path, reduction), rule)


def read_levels(path: Path, reduction: int = 1) -> NDArray[Any]:
    """As `read_image`, with the levels of the file: (H, W, 3) of uint8, uint16 or a floating type."""
    try:
        with open_plain(path) as file:  # unlike cv2.imread, takes any Unicode path on every system
            encoded = np.fromfile(file, np.uint8)
    except OSError as error:
        raise UserError(f"{path}: cannot read the image ({error.strerror}). Restore it or take it out.") from error
    return decode_levels(encoded, str(path), reduction)


def decode_levels(encoded: Pixels, name: str, reduction: int = 1) -> NDArray[Any]:
    """As `read_levels`, of a file's content.

    Args:
        encoded: uint8 (n,).
        name: of the file, for messages.
        reduction: as in `read_image`.

    Raises:
        MemoryError, UndecodableImage: as in `read_image`.
    """
    try:
        pixels = refuse_large(encoded.data)
    except ValueError as error:
        raise TooLarge(f"{name}: {error}.") from error
    # The libraries print what they find wrong, but not in which file.
    listening: AbstractContextManager[list[str]] = (
        words_of_libraries(_WARNINGS) if get_worker_info() else nullcontext([])
    )
    with nullcontext() if pixels is not None and pixels < LARGE else _ONE_LARGE:  # noqa: SIM117
        with listening as words:
            levels = _read(name, encoded, reduction)
    if words:
        _warn(name, words[0])
    return levels


@lru_cache(maxsize=10_000)
def _warn(name: str, words: str) -> None:
    """Once for each file in a process."""
    harmless = words.startswith("libpng")
    log.warning(f"{name}: {words}." if harmless else f"{name}: damaged ({words}); what decodes of it is used.")


def _read(name: str, encoded: Pixels, reduction: int) -> NDArray[Any]:
    jpeg = encoded[:2].tobytes() == _JPEG_START
    reduction = reduction if jpeg else 1
    levels = _decode(encoded, reduction)
    if levels is None and jpeg:
        # Cut off somewhere: with an end in its place, the decoder gives what there is, and grey for the rest.
        levels = _decode(np.concatenate((encoded, np.frombuffer(_JPEG_END, np.uint8))), reduction)
    if levels is None:
        raise UndecodableImage(
            f"{name}: found {len(encoded)} bytes that do not decode, expected an image. Replace the file or remove it."
        )
    return levels


def _decode(encoded: Pixels, reduction: int) -> NDArray[Any] | None:
    if len(encoded) == 0:
        return None
    try:
        return _rgb(encoded, reduction)
    except cv2.error as error:
        if error.code == cv2.Error.StsNoMem:
            raise MemoryError(error.err) from error
        return None


def _rgb(encoded: Pixels, reduction: int) -> NDArray[Any] | None:
    shallow = _is_shallow(encoded[:32].tobytes())
    if shallow and _RGB is not None and reduction == 1:
        return cast("NDArray[Any] | None", cv2.imdecode(encoded, _RGB))
    # Deep ones not in RGB: OpenCV 5.0 forgets to swap the channels of TIFF files of 16 bits.
    image = cv2.imdecode(encoded, _REDUCED.get(reduction, cv2.IMREAD_COLOR) | (0 if shallow else cv2.IMREAD_ANYDEPTH))
    if image is not None and image.dtype not in _LEVELS:  # such as signed ones: by OpenCV's own conversion
        image = cv2.imdecode(encoded, cv2.IMREAD_COLOR)
    if image is None or image.dtype == np.float64:  # which OpenCV does not convert
        return None if image is None else np.ascontiguousarray(image[..., ::-1])
    return cv2.cvtColor(image, cv2.COLOR_BGR2RGB)


def _is_shallow(head: bytes) -> bool:
    """Whether a format has 8 bits a channel: JPEG, BMP, WebP, most PNG; of AVIF and HEIF OpenCV makes 8."""
    if head[:8] == b"\x89PNG\r\n\x1a\n":
        return head[24:25] != b"\x10"
    return head[:2] in (_JPEG_START, b"BM") or head[8:12] == b"WEBP" or head[4:8] == b"ftyp"
