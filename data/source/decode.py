"""Image decoding to uint8 (H, W, 3) RGB with EXIF orientation applied, and image sizes without decoding."""

from __future__ import annotations

import logging
import re
import struct
import threading
from contextlib import nullcontext
from functools import lru_cache
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any, cast
from warnings import catch_warnings

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tessera.data.source.image_header import (
    JPEG_END,
    JPEG_START,
    KIND_BYTES,
    LARGE,
    PNG_START,
    TIFF_STARTS,
    Header,
    Size,
    has_8_bits,
    most_bytes,
    read_file_header,
    read_header,
    read_tiff,
    require_decodable_size,
)
from tessera.utils.bit_depth import (
    READS_HEIC,
    UNREAD_SUFFIXES,
    PixelRule,
    Pixels,
    levels_of_image,
    to_uint8,
    unread_images,
)
from tessera.utils.errors import LFS_POINTER, ConfigError, UserError, is_lfs_pointer
from tessera.utils.files import is_address, open_plain, suffix_of
from tessera.utils.machine.host import capture_library_output
from tessera.utils.machine.opencv import cv2
from tessera.utils.text import first_line

log = logging.getLogger(__name__)

_RGB = getattr(cv2, "IMREAD_COLOR_RGB", None)  # since OpenCV 4.11
_REDUCED = {8: cv2.IMREAD_REDUCED_COLOR_8, 4: cv2.IMREAD_REDUCED_COLOR_4, 2: cv2.IMREAD_REDUCED_COLOR_2}
MIN_SIDE = 10  # pixels
in_loader_worker = threading.Event()  # where libraries' warnings are logged with the file's name
REDUCTIONS = tuple(_REDUCED)  # divisors for the sides of a JPEG during decoding, largest first
# Bounds memory: threads decode concurrently, but one large image at a time.
_ONE_LARGE = threading.Lock()
_FOR_PILLOW = re.compile(rb".{4}ftyp|GIF8|\0\0\0\x0cjP  \r\n", re.DOTALL)
# Warnings of libjpeg (jerror.h), and of libpng, whose warnings do not affect the pixels.
_WARNINGS = re.compile(
    b"Corrupt JPEG data: |Premature end of JPEG file|Inconsistent progression |Invalid SOS parameters |"
    b"Unknown Adobe color |Warning: unknown JFIF |Application transferred too many |libpng warning: "
)


class UndecodableImage(UserError):
    """Error of a file that is not an image, or not the indexed one; the same on every rank."""


class RefusedImage(UndecodableImage):
    """Error of a file that is not decoded: too many pixels, an unsupported layout, a git-lfs pointer."""


class UnusableImage(Exception):
    """Error of an image that cannot be trained on; the message says why."""


def decoded_size(path: str, length: int) -> Size:
    """Return height and width of the decoded image, from the header if nothing in it is unusual.

    `length` is the file's in bytes; -1 if it does not exist, below -1 if it is not a plain file.

    Raises:
        UnusableImage: the file cannot be used.
    """
    if length == -1 and is_address(path):
        raise UnusableImage("it is an address, expected a file")
    if length in (0, -1):
        raise UnusableImage("the file is empty" if length == 0 else "no such file")
    try:
        header = read_file_header(path)
        require_decodable_size(header, length)
        height, width = header.size_hw if header and header.is_decoded_size else read_image(Path(path)).shape[:2]
    except ConfigError:  # concerns the whole run
        raise
    except RefusedImage as error:
        raise UnusableImage(str(error).removeprefix(f"{path}: ").rstrip(".")) from error
    except UserError as error:
        raise UnusableImage("not an image that OpenCV or Pillow can decode, or damaged") from error
    except OSError as error:
        raise UnusableImage(f"cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise UnusableImage(str(error)) from error
    if height < MIN_SIDE or width < MIN_SIDE:
        raise UnusableImage(f"{width} x {height} pixels, expected at least {MIN_SIDE} on each side")
    return height, width


def read_image(path: Path, reduction: int = 1, rule: PixelRule | None = None) -> Pixels:
    """Decode a file as uint8 (H, W, 3) RGB.

    Grey and palette images become RGB, alpha is dropped, EXIF orientation is applied, deep levels become 8 bits by
    `rule`. A truncated JPEG is decoded as far as possible; loader workers warn.

    Args:
        path: the file.
        reduction: 1, 2, 4 or 8: divisor of the sides of a JPEG, rounded up; other formats keep their size.
        rule: conversion of levels of more than 8 bits.

    Raises:
        UserError: the file cannot be read.
        MemoryError: too little memory.
        UndecodableImage: it holds no image, or one that is too large.
    """
    return to_uint8(read_raw_pixels(path, reduction), rule)


def read_raw_pixels(path: Path, reduction: int = 1) -> NDArray[Any]:
    """Decode as `read_image`, keeping the levels of the file: (H, W, 3) of any integer or floating type."""
    try:
        with open_plain(path, most_bytes()) as file:  # cv2.imread does not take all Unicode paths on all systems
            content = file.read()
    except OSError as error:
        raise UserError(
            f"{path}: cannot read the image ({error.strerror}). Restore it or remove it from the dataset."
        ) from error
    except MemoryError as error:
        raise MemoryError(f"{path}: {error}") from error
    return decode_raw_pixels(content, str(path), reduction)


def decode_raw_pixels(content: bytes, name: str, reduction: int = 1) -> NDArray[Any]:
    """Decode as `read_raw_pixels`, from the content of a file; `name` is for messages."""
    header = read_header(BytesIO(content))
    try:
        require_decodable_size(header, len(content))
    except ValueError as error:
        raise RefusedImage(f"{name}: {error}.") from error
    # The libraries print warnings without naming the file.
    listening = capture_library_output(_WARNINGS) if in_loader_worker.is_set() else nullcontext(list[str]())
    alone = nullcontext() if header is not None and header.pixels < LARGE else _ONE_LARGE
    try:
        with alone, listening as words:
            levels = _read(name, np.frombuffer(content, np.uint8), reduction)
    except MemoryError as error:
        raise MemoryError(f"{name}: {error}") from error
    if words:
        _warn(name, words[0])
    return levels


@lru_cache(maxsize=10_000)
def _warn(name: str, words: str) -> None:
    """Warn once per file and process."""
    harmless = words.startswith("libpng")
    log.warning(f"{name}: {words}." if harmless else f"{name}: damaged ({words}); the decodable part is used.")


def _read(name: str, encoded: Pixels, reduction: int) -> NDArray[Any]:
    head = encoded[:KIND_BYTES].tobytes()
    jpeg = head[:2] == JPEG_START
    if head[:8] == PNG_START:
        encoded = _without_profile(encoded)
    reduction = reduction if jpeg else 1
    try:
        levels = _decode(encoded, reduction)
        if levels is None and jpeg:
            # Truncated: with an end mark appended, the decoder returns what there is, and grey for the rest.
            levels = _decode(np.concatenate((encoded, np.frombuffer(JPEG_END, np.uint8))), reduction)
        if levels is None and _FOR_PILLOW.match(head):
            levels = _read_by_pillow(encoded)
        if is_lfs_pointer(head):
            raise ValueError(LFS_POINTER)
    except ConfigError:  # concerns the whole run
        raise
    except ValueError as error:
        raise RefusedImage(f"{name}: {error}.") from error
    if levels is None and suffix_of(name) in UNREAD_SUFFIXES:
        raise RefusedImage(f"{name}: {unread_images([name])}.")
    if levels is None:
        raise UndecodableImage(
            f"{name}: found {len(encoded)} bytes that do not decode, expected an image. Replace the file or remove it."
        )
    return levels


def _without_profile(encoded: Pixels) -> Pixels:
    """Return a PNG without colour profiles, which OpenCV ignores, and whose names libpng prints with escapes."""
    pieces, begun, at = list[Pixels](), 0, len(PNG_START)
    while at + 12 <= len(encoded):
        length, kind = struct.unpack_from(">I4s", encoded.data, at)
        if kind == b"IDAT":
            break
        if kind == b"iCCP":
            pieces.append(encoded[begun:at])
            begun = at + 12 + length
        at += 12 + length
    return np.concatenate((*pieces, encoded[begun:])) if pieces else encoded


def _read_by_pillow(encoded: Pixels) -> NDArray[Any] | None:
    """Decode AVIF, GIF and JPEG 2000 if OpenCV was built without them, and HEIC if pillow-heif is installed."""
    if READS_HEIC:
        try:
            import_module("pillow_heif").register_heif_opener()
        except (ImportError, OSError) as error:
            raise ConfigError(
                f"pillow-heif: the package is installed, but does not load ({first_line(error)}). Reinstall it, or "
                "uninstall it to skip HEIC images: pip uninstall pillow-heif."
            ) from error
    try:
        with catch_warnings(action="ignore", category=Image.DecompressionBombWarning):  # it does not name the file
            image = Image.open(BytesIO(encoded.data))
        with image:
            require_decodable_size(Header((image.height, image.width)), len(encoded))
            levels = levels_of_image(image)
    except Image.DecompressionBombError as error:
        raise ValueError(str(error)) from error
    except (ValueError, MemoryError):
        raise
    except Exception:  # unknown format or damaged: Pillow's decoders raise errors of many kinds
        return None
    return levels if levels.ndim == 3 else np.repeat(levels[..., None], 3, 2)


def _decode(encoded: Pixels, reduction: int) -> NDArray[Any] | None:
    head = encoded[:KIND_BYTES].tobytes()
    try:
        if head[:4] in TIFF_STARTS and (levels := read_tiff(encoded)) is not None:
            return levels
        shallow = has_8_bits(head)
        if shallow and _RGB is not None and reduction == 1:
            return cast("NDArray[Any] | None", cv2.imdecode(encoded, _RGB))
        # Deep images are decoded as BGR: OpenCV 5.0 does not swap the channels of 16-bit TIFF files to RGB.
        depth = 0 if shallow else cv2.IMREAD_ANYDEPTH
        image = cv2.imdecode(encoded, _REDUCED.get(reduction, cv2.IMREAD_COLOR) | depth)
        if image is None or image.dtype == np.float64:  # cvtColor does not take float64
            return None if image is None else np.ascontiguousarray(image[..., ::-1])
        return cv2.cvtColor(image, cv2.COLOR_BGR2RGB)
    except cv2.error as error:
        if error.code == cv2.Error.StsNoMem:
            raise MemoryError(error.err) from error
        return None
