"""Images of coloured squares, which a model of 3,000 parameters learns to detect.

They are drawn by integer arithmetic, so they are equal with every version of NumPy and OpenCV, and must stay equal.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import yaml
from numpy.typing import NDArray
from PIL import Image

SIZE = 64
NAMES = ("red", "blue")
_COLOURS = ((215, 60, 50), (45, 80, 210))
COUNTS = {"val": 6, "train": 64}


def write_squares(folder: Path) -> Path:
    number = 0
    for split, count in COUNTS.items():
        for kind in ("images", "labels"):
            (folder / kind / split).mkdir(parents=True)
        for _ in range(count):
            pixels, rows = draw(number)
            Image.fromarray(pixels).save(folder / "images" / split / f"{number:02}.png")
            (folder / "labels" / split / f"{number:02}.txt").write_text("\n".join(rows) + "\n")
            number += 1
    path = folder / "squares.yaml"
    described = {"path": str(folder), "train": "images/train", "val": "images/val", "names": list(NAMES)}
    path.write_text(yaml.safe_dump(described))
    return path


def draw(number: int) -> tuple[NDArray[np.uint8], list[str]]:
    """Return an image, uint8 (SIZE, SIZE, 3) RGB, and the label rows of its two squares, one in each half."""
    column = np.arange(SIZE)
    grey = 90 + (column[:, None] * (1 + number % 3) + column[None] * (number % 5)) % 64
    pixels = np.repeat(grey[..., None], 3, axis=2).astype(np.uint8)
    rows = []
    for half in range(2):
        kind, side = (number + half * (number // 2)) % len(NAMES), 14 + (number * 5 + half * 7) % 13
        left = half * 32 + (number * 3) % (33 - side)
        top = (number * 11 + half * 17) % (SIZE - side + 1)
        pixels[top : top + side, left : left + side] = _COLOURS[kind]
        x, y = left + side / 2, top + side / 2
        rows.append(" ".join([str(kind), *(f"{value / SIZE:.6f}" for value in (x, y, side, side))]))
    return pixels, rows
