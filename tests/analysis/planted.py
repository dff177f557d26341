"""Label errors planted into label files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera.utils.evaluation.matching import pairwise_iou

KINDS = ("missing", "spurious", "shifted", "wrong class", "duplicate")
Rows = NDArray[np.float64]  # (n, 5): class, centre x, centre y, width, height


class Planted(NamedTuple):
    """A planted error: its kind, the stem of its label file, and its box, xyxy as fractions of the image."""

    kind: str
    stem: str
    box: NDArray[np.float64]


def plant(folder: Path, share: float, nc: int, seed: int = 0, kinds: Sequence[str] = KINDS) -> list[Planted]:
    """Change a fraction `share` of the labels below `folder` into errors of each kind; return them.

    A shifted label has an IoU of 0.3 to 0.6 with the object, a duplicate one of 0.85 to 0.95 with another label.
    """
    rng = np.random.default_rng(seed)
    rows: dict[Path, Rows] = {path: _read(path) for path in sorted(folder.rglob("*.txt"))}
    places = [(path, number) for path, found in rows.items() for number in range(len(found))]
    every = np.concatenate(list(rows.values()))
    count = round(share * len(places))
    taken = [places[at] for at in rng.permutation(len(places))[: count * len(kinds)]]
    planted: list[Planted] = []
    drop: dict[Path, set[int]] = {}
    more: dict[Path, list[Rows]] = {}
    for number, (path, row) in enumerate(taken):
        kind, own = kinds[number // count], rows[path][row]
        about = own.copy()
        if kind == "missing":
            drop.setdefault(path, set()).add(row)
        elif kind == "wrong class":
            own[0] = (own[0] + rng.integers(1, nc)) % nc
        elif kind == "shifted":
            own[1:] = about[1:] = _moved(own[1:], 0.3, 0.6, rng)
        else:
            about = _spurious(rows[path], every, rng) if kind == "spurious" else own.copy()
            if kind == "duplicate":
                about[1:] = _moved(own[1:], 0.85, 0.95, rng)
            more.setdefault(path, []).append(about[None])
        planted.append(Planted(kind, path.stem, corners(about[None])[0]))
    for path, found in rows.items():
        kept = np.delete(found, sorted(drop.get(path, ())), axis=0)
        lines = [f"{row[0]:.0f} {' '.join(f'{x:.7f}' for x in row[1:])}\n" for row in (*kept, *_joined(more.get(path)))]
        path.write_text("".join(lines))
    return planted


def corners(rows: Rows) -> Rows:
    """Convert rows to boxes xyxy, as fractions of the image."""
    return np.concatenate((rows[:, 1:3] - rows[:, 3:] / 2, rows[:, 1:3] + rows[:, 3:] / 2), 1)


def _read(path: Path) -> Rows:
    return np.array([line.split() for line in path.read_text().splitlines()], np.float64).reshape(-1, 5)


def _joined(rows: list[Rows] | None) -> Rows:
    return np.concatenate(rows) if rows else np.zeros((0, 5))


def _moved(box: Rows, low: float, high: float, rng: np.random.Generator) -> Rows:
    """Return a box in the image whose IoU with `box`, centre and size, is between `low` and `high`."""
    spread = 0.6 * (1 - (low + high) / 2)
    while True:
        size = np.minimum(box[2:] * np.exp(rng.normal(0, spread, 2)), 1)
        centre = np.clip(box[:2] + rng.normal(0, spread, 2) * box[2:], size / 2, 1 - size / 2)
        moved = np.concatenate((centre, size))
        if low <= pairwise_iou(*(corners(np.append(0, b)[None]) for b in (box, moved)))[0, 0] <= high:
            return moved


def _spurious(own: Rows, every: Rows, rng: np.random.Generator) -> Rows:
    """Return the box of some other object, where this image has none."""
    for most in np.linspace(0.1, 1, 1000):
        row = every[rng.integers(len(every))].copy()
        row[1:3] = rng.uniform(row[3:] / 2, 1 - row[3:] / 2)
        if pairwise_iou(corners(row[None]), corners(own)).max(initial=0) <= most:
            break
    return row
