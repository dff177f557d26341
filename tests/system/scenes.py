"""Large drawn scenes with small objects: an aerial picture's manner, for tiles."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import yaml
from numpy.typing import NDArray

NAMES = ("disc", "cross")
Box = tuple[int, float, float, float, float]  # class, then centre and size in pixels


def make_scenes(folder: Path, *, train: int, val: int, size: int, objects: int, side: int = 12) -> Path:
    """Draw square scenes of `size` pixels, each with `objects` of `side` pixels; returns the YAML."""
    for split, count, first in (("train", train, 0), ("val", val, 1_000)):
        for number in range(count):
            picture, boxes = scene(size, objects, side, np.random.default_rng(first + number))
            image, label = (folder / "scenes" / kind / split / f"{number}" for kind in ("images", "labels"))
            for path in (image, label):
                path.parent.mkdir(parents=True, exist_ok=True)
            assert cv2.imwrite(str(image.with_suffix(".jpg")), picture, [cv2.IMWRITE_JPEG_QUALITY, 92])
            rows = [f"{c} {x / size:.7f} {y / size:.7f} {w / size:.7f} {h / size:.7f}" for c, x, y, w, h in boxes]
            label.with_suffix(".txt").write_text("\n".join(rows) + "\n")
    content = {"path": str(folder / "scenes"), "train": "images/train", "val": "images/val", "names": list(NAMES)}
    path = folder / "scenes.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def scene(size: int, objects: int, side: int, rng: np.random.Generator) -> tuple[NDArray[np.uint8], list[Box]]:
    """Ground of patches and noise, with objects on it that do not touch, and as many spots that are none."""
    patches = rng.integers(60, 150, (size // 100 + 2, size // 100 + 2, 3)).astype(np.float32)
    ground = cv2.resize(patches, (size, size), interpolation=cv2.INTER_CUBIC)
    picture = np.clip(ground + rng.normal(0, 6, (size, size, 1)), 0, 255).astype(np.uint8)
    cells = rng.permutation((size // (2 * side)) ** 2)[: 2 * objects]
    boxes: list[Box] = []
    for number, cell in enumerate(cells.tolist()):
        row, column = divmod(cell, size // (2 * side))
        x, y = (side * (2 * at + 1) + int(rng.integers(-side // 3, side // 3 + 1)) for at in (column, row))
        colour = rng.integers(190, 256, 3).tolist()
        reach = side // 2
        if number >= objects:  # a line: bright, but no object
            picture[y - side // 8 : y + side // 8 + 1, x - reach : x + reach + 1] = colour
            continue
        kind = number % 2
        if kind == 0:
            cv2.circle(picture, (x, y), reach, colour, -1)
        else:
            picture[y - side // 8 : y + side // 8 + 1, x - reach : x + reach + 1] = colour
            picture[y - reach : y + reach + 1, x - side // 8 : x + side // 8 + 1] = colour
        boxes.append((kind, x + 0.5, y + 0.5, 2 * reach + 1, 2 * reach + 1))
    return picture, boxes
