"""Tile positions in large images, shared by training, validation and detection."""

from __future__ import annotations

import math
from typing import NamedTuple

from tessera.utils.errors import ConfigError

DEFAULT_OVERLAP = 0.2
_SMALLEST, _LARGEST, _MOST_OVERLAP = 32, 65536, 0.9


class Tile(NamedTuple):
    """A window of an image, in pixels; right and bottom are exclusive."""

    left: int
    top: int
    right: int
    bottom: int


def check_tiles(tile: int, overlap: float) -> None:
    """Raise ConfigError for a tile size or overlap out of range."""
    if not _SMALLEST <= tile <= _LARGEST:
        raise ConfigError(f"tile: found {tile}, allowed is {_SMALLEST} to {_LARGEST} pixels, or 0 for no tiles.")
    if not 0 <= overlap <= _MOST_OVERLAP:
        raise ConfigError(f"overlap: found {overlap:g}, allowed is 0 to {_MOST_OVERLAP:g}, a fraction of a tile.")


def tile_windows(size_hw: tuple[int, int], tile: int, overlap: float) -> list[Tile]:
    """Return the tiles of an image and, last, the whole image; only the whole image if it fits into one tile."""
    whole = Tile(0, 0, size_hw[1], size_hw[0])
    return [whole] if max(size_hw) <= tile else [*cut(size_hw, tile, overlap), whole]


def cut(size_hw: tuple[int, int], tile: int, overlap: float) -> list[Tile]:
    """Return the fewest tiles that cover an image, evenly spaced, row by row.

    A side shorter than `tile` pixels is not split. Adjacent tiles share at least the fraction `overlap` of a tile.
    """
    rows, columns = (_starts(side, tile, overlap) for side in size_hw)
    height, width = (min(side, tile) for side in size_hw)
    return [Tile(left, top, left + width, top + height) for top in rows for left in columns]


def _starts(side: int, tile: int, overlap: float) -> list[int]:
    if side <= tile:
        return [0]
    step = max(tile - math.ceil(overlap * tile), 1)
    count = math.ceil((side - tile) / step) + 1
    return [(side - tile) * place // (count - 1) for place in range(count)]
