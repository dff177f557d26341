"""A DatasetIndex made by hand, with images on disk where a test decodes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from tessera.utils.types import DatasetIndex

NAMES = ("circle", "square", "star")


def make_index(
    sizes_hw: Sequence[tuple[int, int]],
    *,
    paths: Sequence[Path] = (),
    classes: Sequence[Sequence[int]] = (),
    polygons: bool = False,
) -> DatasetIndex:
    """Images of the given sizes; image i has objects of `classes[i]` (by default i % 3 of class i % 3), boxes inside.

    With `polygons` every object's polygon is the triangle of its box's top left, top right and bottom right corners.
    """
    labels = list(classes) or [[i % 3] * (i % 3) for i in range(len(sizes_hw))]
    encoded = [str(path).encode() for path in paths] or [f"/nowhere/{i}.png".encode() for i in range(len(sizes_hw))]
    boxes = [
        [width * 0.1, height * 0.2, width * (0.5 + 0.1 * k), height * 0.9]
        for (height, width), own in zip(sizes_hw, labels, strict=True)
        for k in range(len(own))
    ]
    boxes_xyxy = np.array(boxes, np.float32).reshape(-1, 4)
    points = boxes_xyxy[:, [0, 1, 2, 1, 2, 3]].reshape(-1, 2)
    return DatasetIndex(
        split="train",
        names=NAMES,
        path_bytes=np.frombuffer(b"".join(encoded), np.uint8),
        path_offsets=np.cumsum([0, *map(len, encoded)]),
        sizes_hw=np.array(sizes_hw, np.int32),
        box_offsets=np.cumsum([0, *map(len, labels)]),
        classes=np.array([c for own in labels for c in own], np.int32),
        boxes_xyxy=boxes_xyxy,
        segment_offsets=np.arange(len(boxes_xyxy) + 1) * 3 if polygons else np.zeros(0, np.int64),
        segment_points=points if polygons else np.zeros((0, 2), np.float32),
        digest="0123456789abcdef" * 4,
    )


def write_images(folder: Path, sizes_hw: Sequence[tuple[int, int]]) -> list[Path]:
    """Write PNG files of smooth colours, each different; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for i, size_hw in enumerate(sizes_hw):
        path = folder / f"{i}.png"
        cv2.imwrite(str(path), cv2.cvtColor(made_image(i, size_hw), cv2.COLOR_RGB2BGR))
        paths.append(path)
    return paths


def made_image(number: int, size_hw: tuple[int, int]) -> NDArray[np.uint8]:
    """The RGB pixels that `write_images` writes for image `number`."""
    y, x = np.mgrid[: size_hw[0], : size_hw[1]]
    return np.stack((x * 3 + number * 20, y * 3, np.full_like(x, number * 37)), -1).astype(np.uint8)
