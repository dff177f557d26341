"""Image headers without decoding, by Pillow: size, orientation, truncation, pixel limit; layouts and pages of TIFF.

A header of a few bytes can claim gigabytes, which a decoder allocates first.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from io import SEEK_END, BytesIO
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.PpmImagePlugin import PpmImageFile
from PIL.TiffImagePlugin import ImageFileDirectory_v2
from PIL.WebPImagePlugin import WebPImageFile

from tessera.utils.bit_depth import Pixels
from tessera.utils.environment import max_pixels
from tessera.utils.files import open_plain
from tessera.utils.machine.opencv import cv2
from tessera.utils.text import plural

warnings.filterwarnings("ignore", module=r"PIL\.TiffImagePlugin")  # about damaged EXIF; it does not name the file

LARGE = 1 << 25  # pixels; 100 MB decoded
KIND_BYTES = 64  # that identify the format
_BYTES_A_PIXEL = 16  # more than any format needs
_TAIL = 4096  # bytes that hold the end mark of most files

JPEG_START, JPEG_END, PNG_START = b"\xff\xd8", b"\xff\xd9", b"\x89PNG\r\n\x1a\n"
TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
# Opened directly: Image.open has its own limit of pixels, and tries every format.
_FORMATS: dict[bytes, type[ImageFile]] = {
    JPEG_START: JpegImageFile,
    PNG_START: PngImageFile,
    b"BM": BmpImageFile,
    b"RIFF": WebPImageFile,
    b"GIF8": GifImageFile,
    b"P": PpmImageFile,
}

Size = tuple[int, int]
_SUBFILE, _WIDTH, _HEIGHT, _DEPTH, _COLOUR = 254, 256, 257, 258, 262
_TURN, _BANDS, _PLANES, _EXTRA, _FORM = 274, 277, 284, 338, 339
_SHORT = 3  # type of a tag
_STRAIGHT_ALPHA = 2  # OpenCV multiplies 8-bit levels by it
_WHITE_IS_0, _BLACK_IS_0, _RGB = 0, 1, 2
_COLOURED = ((3, _RGB), (4, _RGB), (3, _BLACK_IS_0), (4, _BLACK_IS_0))  # (bands, colour); GDAL omits RGB above 8 bits
_SENSOR = (32803, 34892)  # DNG, of which OpenCV returns sensor levels
_FORMS = {1: "u", 2: "i", 3: "f", 4: "u"}
_TYPES = ("u1", "i1", "u2", "i2", "u4", "i4", "f4", "u8", "i8", "f8")


def has_8_bits(head: bytes) -> bool:
    """Return whether the format has 8 bits a channel; OpenCV converts AVIF and HEIF to 8 bits."""
    if head[:8] == PNG_START:
        return head[24:25] != b"\x10"
    return head[:2] in (JPEG_START, b"BM") or head[8:12] == b"WEBP" or head[4:8] == b"ftyp"


class Header(NamedTuple):
    """Facts from the header of an image."""

    size_hw: Size  # height and width in pixels
    is_decoded_size: bool = False  # whether the decoded image is sure to have this size, EXIF orientation included
    orientation: int = 1  # EXIF orientation of a JPEG: 1 is upright, 2 to 8 are rotated or mirrored by decoding

    @property
    def pixels(self) -> int:
        """Height times width."""
        return self.size_hw[0] * self.size_hw[1]


def read_header(file: IO[bytes]) -> Header | None:
    """Return the header of an image file; None if Pillow does not know its format, or refuses it."""
    head = file.read(KIND_BYTES)
    try:
        if head[:4] in TIFF_STARTS:
            first = next(_directories(file))
            return Header((_numbers(first, _HEIGHT)[0], _numbers(first, _WIDTH)[0]))
        opened = next((opened for start, opened in _FORMATS.items() if head.startswith(start)), None)
        file.seek(0)
        image = opened(file) if opened else None
    except Exception:  # damaged: Pillow raises errors of many kinds
        return None
    if image is None:
        return None
    size_hw, length = image.size[::-1], file.seek(0, SEEK_END)
    file.seek(max(length - _TAIL, 0))
    tail = file.read()
    match image:
        case JpegImageFile():
            orientation = _orientation(image)
            is_usual = orientation is not None and bool(image.quantization) and JPEG_END in tail
            return Header(size_hw[::-1] if (orientation or 1) >= 5 else size_hw, is_usual, orientation or 1)
        case PngImageFile():  # readers differ in whether the eXIf chunk, before or after the pixels, rotates them
            return Header(size_hw, "exif" not in image.info and b"eXIf" not in tail and b"IEND" in tail)
        case BmpImageFile():
            return Header(size_hw, int.from_bytes(head[2:6], "little") <= length and head[14] >= 40)
        case WebPImageFile():
            return Header(size_hw, "exif" not in image.info and not getattr(image, "is_animated", False))
    return Header(size_hw)


def read_file_header(path: str) -> Header | None:
    """Return the header of a plain file, as `read_header`.

    Raises:
        OSError: it cannot be read; `strerror` says why.
    """
    with open_plain(path) as file:
        return read_header(file)


def _orientation(image: JpegImageFile) -> int | None:
    """Return the EXIF orientation, 1 if there is none; None if readers may differ: damaged, or in several segments."""
    segments = [data for name, data in image.applist if name == "APP1"]
    holds_exif = [data.startswith(b"Exif\0\0") for data in segments]
    if not any(holds_exif):
        return 1
    try:
        tags = next(_directories(BytesIO(segments[0][6:])))
        value = tags.get(_TURN, 1)
        if any(holds_exif[1:]) or tags.tagtype.get(_TURN, _SHORT) != _SHORT or not isinstance(value, int):
            return None
    except Exception:  # damaged
        return None
    return value if value in range(1, 9) else 1


class _Bounded:
    """File whose reads add up to at most its length: the directories of a TIFF do not overlap, unless crafted."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._left = file, file.seek(0, SEEK_END)
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int) -> bytes:
        """Read `size` bytes; raise EOFError if there are fewer."""
        self._left -= size
        data = self._file.read(size) if self._left >= 0 else b""
        if len(data) < size:
            raise EOFError
        return data


def _directories(file: IO[bytes]) -> Iterator[ImageFileDirectory_v2]:
    """Yield the directories of a TIFF; raises errors of many kinds if it is damaged."""
    file.seek(0)
    start, content, seen = file.read(16), _Bounded(file), {0}
    order, is_big = start[:2], 43 in start[2:4]
    # In little-endian form, as Pillow takes a big-endian BigTIFF for a TIFF.
    start = b"II+\0" + start[4:] if is_big else b"II*\0" + start[4:8]
    at = ImageFileDirectory_v2(start, order).next
    while at not in seen:
        seen.add(at)
        directory = ImageFileDirectory_v2(start, order)
        content.seek(at)
        directory.load(content)  # type: ignore[arg-type]
        yield directory
        at = directory.next


def _numbers(directory: ImageFileDirectory_v2, tag: int, *default: int) -> tuple[int, ...]:
    value = directory.get(tag, default)
    numbers = value if isinstance(value, tuple) else (value,)
    if not numbers or not all(isinstance(number, int) for number in numbers):
        raise ValueError(f"tag {tag}")
    return numbers


def most_bytes() -> int:
    """Return the largest size of an image file."""
    return _BYTES_A_PIXEL * max_pixels()


def require_decodable_size(header: Header | None, length: int) -> None:
    """Raise a ValueError if an image, or its file of `length` bytes, exceeds TESSERA_MAX_PIXELS."""
    most = max_pixels()
    if length > most_bytes():
        raise ValueError(f"{length:,} bytes, more than the maximum of {most:,} pixels (TESSERA_MAX_PIXELS) needs")
    if header is not None and header.pixels > most:
        raise ValueError(
            f"{header.pixels:,} pixels, expected at most {most:,}; set TESSERA_MAX_PIXELS to use larger images"
        )


def is_truncated(encoded: Path | bytes) -> bool:
    """Return whether a decoded JPEG or PNG lacks its end mark; False for other formats."""
    try:
        content = encoded.read_bytes() if isinstance(encoded, Path) else encoded
    except OSError:  # gone since it was decoded
        return False
    if content[:8] == PNG_START:
        return b"IEND" not in content
    if content[:2] != JPEG_START or content.endswith(JPEG_END):
        return False
    file = BytesIO(content)
    try:
        JpegImageFile(file)  # up to the first scan, as the headers may hold a preview with an end mark
    except Exception:  # unusual, although OpenCV decodes it
        file.seek(0)
    return JPEG_END not in content[file.tell() :]


def extra_pages_message(encoded: Path | bytes) -> str:
    """Return a message if a decoded TIFF, file or content, has several pages besides thumbnails and masks; else ""."""
    count = 0
    try:
        with open_plain(encoded) if isinstance(encoded, Path) else BytesIO(encoded) as file:
            if file.read(4) in TIFF_STARTS:
                for directory in _directories(file):
                    count += not _numbers(directory, _SUBFILE, 0)[0] & 0b101
    except Exception:  # damaged, or deleted since it was decoded
        pass
    if count < 2:
        return ""
    others = "the other is" if count == 2 else f"the other {count - 1:,} are"
    return f"the first of {count:,} pages is used, {others} skipped; save each page as a file"


def read_tiff(encoded: Pixels) -> NDArray[Any] | None:
    """Return the levels (H, W, 3) of a layout that OpenCV misreads; None if OpenCV reads it.

    Raises:
        ValueError: the layout is not supported; the message names it.
    """
    try:
        tags = next(_directories(BytesIO(encoded.data)))
        depths, forms = set(_numbers(tags, _DEPTH, 1)), set(_numbers(tags, _FORM, 1))
        colour, bands = _numbers(tags, _COLOUR, _BLACK_IS_0)[0], _numbers(tags, _BANDS, 1)[0]
        is_planar = bands > 1 and _numbers(tags, _PLANES, 1)[0] == 2
        depth, form = max(depths), _FORMS.get(max(forms), "")
    except Exception:  # damaged
        return None
    is_coloured = colour != _BLACK_IS_0 or bands < 3
    if colour in _SENSOR or (depth <= 8 and form == "u" and is_coloured):
        return None
    if depth in (10, 12, 14) and form == "u" and colour in (_BLACK_IS_0, _RGB) and not is_planar:
        return None
    dtype, layout = f"{form}{depth // 8}", (bands, colour)
    name = (
        f"a TIFF of {plural(bands, 'band')} of {'/'.join(map(str, sorted(depths)))} bits"
        f"{' in planes' if is_planar else ''} whose PhotometricInterpretation is {colour}"
    )
    is_read = (
        len(depths) == len(forms) == 1
        and depth % 8 == 0
        and dtype in _TYPES
        and not is_planar
        and (depth > 8 or is_coloured)
        and (layout == (1, _BLACK_IS_0) or (layout == (1, _WHITE_IS_0) and form == "u") or layout in _COLOURED)
        and (bands < 4 or depth == 16 or (depth == 8 and _numbers(tags, _EXTRA, 0)[0] != _STRAIGHT_ALPHA))
    )
    if not is_read:
        raise ValueError(
            f"{name}, expected grey, RGB or RGBA, pixel by pixel, in whole or floating numbers of one type. Save it as "
            "RGB of 8 or 16 bits"
        )
    levels = cv2.imdecode(encoded, cv2.IMREAD_ANYDEPTH | (cv2.IMREAD_COLOR if bands > 1 else 0))
    if levels is None or levels.dtype.itemsize != np.dtype(dtype).itemsize:
        raise ValueError(f"{name} that does not decode: it is damaged, or of an unknown compression")
    samples: NDArray[Any] = np.ascontiguousarray(levels[..., ::-1] if bands > 1 else np.dstack([levels] * 3)).view(
        dtype
    )
    return np.iinfo(dtype).max - samples if colour == _WHITE_IS_0 else samples
