"""Image size of `--imgsz`: one number, or height and width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class SizeHw(NamedTuple):
    """Height and width in pixels, which differ; as text 384x640."""

    height: int
    width: int

    def __str__(self) -> str:
        return f"{self.height}x{self.width}"


# Of `--imgsz`: images are resized to this long side, or to fit into this height and width. One number N is N x N.
ImageSize = int | SizeHw


def image_size(value: int | Sequence[int]) -> ImageSize:
    """Return the image size of a number or of two; raise ValueError or TypeError for anything else."""
    height, width = (value, value) if isinstance(value, int) else value
    return int(height) if height == width else SizeHw(int(height), int(width))


def size_hw_of(imgsz: ImageSize) -> SizeHw:
    """Return the height and width that images fit into."""
    return SizeHw(imgsz, imgsz) if isinstance(imgsz, int) else imgsz


def round_imgsz(imgsz: ImageSize, stride: int) -> ImageSize:
    """Return the image size, sides rounded up to multiples of the stride, and of 32 if the stride is smaller."""
    return image_size([-(-side // max(stride, 32)) * max(stride, 32) for side in size_hw_of(imgsz)])
