"""Conversion of images of more than 8 bits to 8, by one rule everywhere; and the image suffixes that are read.

By default, 16-bit levels give their high byte, and floats 0 … 1 become 0 … 255. Images of a 12-bit camera, which use a
sixteenth of 16 bits, would be nearly black: the key `pixels:` of the dataset's YAML sets the range.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from tessera.utils.errors import ConfigError
from tessera.utils.files import suffix_of
from tessera.utils.text import plural, shown

Pixels = NDArray[np.uint8]
Unit = Literal["range", "percentile"]
READS_HEIC = find_spec("pillow_heif") is not None
_HEIC = frozenset({".heic", ".heif"})
IMAGE_SUFFIXES = frozenset(
    {
        *(".avif", ".bmp", ".dng", ".gif", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg", ".mpo", ".pbm", ".pfm", ".pgm"),
        *(".png", ".pnm", ".ppm", ".tif", ".tiff", ".webp", *(_HEIC if READS_HEIC else ())),
    }
)
UNREAD_SUFFIXES = _HEIC - IMAGE_SUFFIXES | {
    *(".arw", ".cr2", ".cr3", ".dcm", ".exr", ".hdr", ".ico", ".j2k", ".jxl", ".jxr", ".nef", ".orf", ".psd", ".raf"),
    *(".rw2", ".svg", ".tga"),
}
DARK = 128  # a converted image with a lower maximum uses less than eight bits
_EXPECTED = "{range: [0, 4095]} or {percentile: [1, 99.5]}"


def unread_images(paths: Sequence[str]) -> str:
    """Return the message about images of unsupported suffixes; "" without any."""
    if not paths:
        return ""
    counts = Counter(map(suffix_of, paths))
    each = ", ".join(f"{count:,} {suffix}" for suffix, count in sorted(counts.items()))
    their, them = ("its", "it") if len(paths) == 1 else ("their", "them")
    remedy = f"Convert {them} to PNG or JPEG"
    if {".heic", ".heif"} & counts.keys():
        remedy += "; the package pillow-heif reads HEIC: pip install pillow-heif"
    return f"{plural(len(paths), 'image')} not read because of {their} suffix: {each}. {remedy}"


@dataclass(frozen=True)
class PixelRule:
    """Levels that become 0 and 255; linear between them, clipped beyond."""

    unit: Unit  # levels, or percentiles of each image's own levels, all channels together
    low: float
    high: float

    @classmethod
    def from_plain(cls, value: Any, where: str) -> PixelRule | None:
        """Parse a rule of a YAML or checkpoint, None if there is none; raise ConfigError that begins with `where`."""
        if value is None:
            return None
        unit, limits = "", value
        if isinstance(value, Mapping) and len(value) == 1:
            ((unit, limits),) = value.items()
        match limits:
            case [int() | float() as low, int() | float() as high] if -math.inf < low < high < math.inf:
                within = unit == "range" or (unit == "percentile" and low >= 0 and high <= 100)
                if within and not isinstance(low, bool) and not isinstance(high, bool):
                    return cls(cast(Unit, unit), float(low), float(high))
        raise ConfigError(f"{where}: found {shown(value)}, expected {_EXPECTED}, the lower of the two first.")

    def as_dict(self) -> dict[str, list[float]]:
        """Return the plain form, as in a YAML."""
        return {self.unit: [self.low, self.high]}

    def __str__(self) -> str:
        """Return a short form for messages and cache names."""
        return f"{self.unit}-{self.low:.15g}-{self.high:.15g}"


def max_finite_level(levels: NDArray[Any]) -> float:
    """Return the largest finite level; at least 0."""
    return float(np.max(levels, where=np.isfinite(levels), initial=0))


def to_uint8(levels: NDArray[Any], rule: PixelRule | None = None) -> NDArray[np.uint8]:
    """Convert levels of any shape to uint8, by a rule for those that become 0 and 255.

    uint8 is returned unchanged. Without a rule 0 … the maximum of an integer type, or 0 … 1 of floats, become 0 … 255.
    NaN becomes the darkest level.
    """
    if levels.dtype == np.uint8:
        return cast("NDArray[np.uint8]", levels)
    if levels.dtype == np.uint16:
        if rule is None:
            return (levels >> 8).astype(np.uint8)
        low, high = _limits(levels, rule)
        return cast("NDArray[np.uint8]", _table(low, high)[levels])
    brightest = 1.0 if np.issubdtype(levels.dtype, np.floating) else float(np.iinfo(levels.dtype).max)
    low, high = (0.0, brightest) if rule is None else _limits(levels, rule)
    return _scaled(levels, low, high)


def _limits(levels: NDArray[Any], rule: PixelRule) -> tuple[float, float]:
    if rule.unit == "range":
        return rule.low, rule.high
    known = levels if levels.dtype == np.uint16 else levels[np.isfinite(levels)]
    if known.size == 0:
        return 0.0, 1.0
    low, high = np.percentile(known, [rule.low, rule.high]).tolist()
    return low, high


@lru_cache(maxsize=8)
def _table(low: float, high: float) -> NDArray[np.uint8]:
    """Return the byte of each 16-bit level."""
    return _scaled(np.arange(1 << 16), low, high)


def _scaled(levels: NDArray[Any], low: float, high: float) -> NDArray[np.uint8]:
    """Scale levels to bytes; all black if the limits coincide."""
    numbers = np.nan_to_num(levels.astype(np.float32), nan=low, posinf=high, neginf=low)
    scale = 255 / (high - low) if high > low else 0.0
    return np.rint(((numbers - np.float32(low)) * np.float32(scale)).clip(0, 255)).astype(np.uint8)


def levels_of_image(image: Image.Image) -> NDArray[Any]:
    """Return a PIL image with EXIF orientation applied: (H, W) grey, or (H, W, 2 to 4) with alpha last.

    Raises:
        OSError, SyntaxError, ValueError: the file cannot be decoded, which PIL does here.
    """
    upright = ImageOps.exif_transpose(image)
    if upright.mode in ("P", "PA"):
        return np.asarray(upright.convert("RGBA"))[..., :3]
    if upright.mode == "CMYK":  # as OpenCV's JPEG decoder converts it; PIL gives the complement of its inks
        light = 255 - np.asarray(upright).astype(np.int32)
        ink, black = light[..., :3], light[..., 3:]
        return (black - ((255 - ink) * black >> 8)).clip(0, 255).astype(np.uint8)
    if upright.mode == "I":  # 16-bit grey in earlier versions of Pillow
        return np.asarray(upright).clip(0, 65535).astype(np.uint16)
    if upright.mode.startswith("I;16"):
        return np.asarray(upright).astype(np.uint16)
    if upright.mode in ("L", "LA", "RGB", "RGBA", "F"):
        return np.asarray(upright)
    return np.asarray(upright.convert("L" if upright.mode == "1" else "RGB"))
