"""The plain way to make a training sample, which figures are compared with.

Four pictures on a double canvas, one warp of it, HSV plane by plane through tables, flip, and a copy to channels first:
what a straightforward loader does, without the parts that any of its steps could save.
"""

from __future__ import annotations

import math

import cv2
import numpy as np

from tessera.utils.config import Hyp

FILL = 114


class PlainLoader:
    """Training samples of a list of pictures at loading size.

    Args:
        load: picture by number, uint8 (H, W, 3) BGR, long side `imgsz`.
        boxes: float (n, 5) of each picture: class, x0, y0, x1, y1 in its pixels.
        hyp: strengths.
        imgsz: side of a sample in pixels.
    """

    def __init__(self, load, boxes: list[np.ndarray], hyp: Hyp, imgsz: int) -> None:  # type: ignore[no-untyped-def]
        self.load, self.boxes, self.hyp, self.imgsz = load, boxes, hyp, imgsz
        self.rng = np.random.default_rng(0)

    def __call__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Picture (3, S, S) and boxes (n, 5)."""
        size, rng, hyp = self.imgsz, self.rng, self.hyp
        centre_x, centre_y = (int(v) for v in rng.uniform(0.5 * size, 1.5 * size, 2))
        canvas = np.full((2 * size, 2 * size, 3), FILL, np.uint8)
        labels = []
        for corner, number in enumerate([index, *rng.integers(len(self.boxes), size=3).tolist()]):
            image = self.load(number)
            height, width = image.shape[:2]
            left = centre_x - width if corner in (0, 2) else centre_x
            top = centre_y - height if corner in (0, 1) else centre_y
            x0, y0, x1, y1 = max(left, 0), max(top, 0), min(left + width, 2 * size), min(top + height, 2 * size)
            canvas[y0:y1, x0:x1] = image[y0 - top : y1 - top, x0 - left : x1 - left]
            moved = self.boxes[number].copy()
            moved[:, 1:] = (moved[:, 1:] + [left, top, left, top]).clip(0, 2 * size)
            labels.append(moved)
        image, boxes = self._warp(canvas, np.concatenate(labels))
        self._hsv(image)
        if rng.random() < hyp.fliplr:
            image = np.fliplr(image)
            boxes[:, [1, 3]] = size - boxes[:, [3, 1]]
        return np.ascontiguousarray(image.transpose(2, 0, 1)[::-1]), boxes

    def _warp(self, canvas: np.ndarray, boxes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        size, rng, hyp = self.imgsz, self.rng, self.hyp
        zoom = rng.uniform(1 - hyp.scale, 1 + hyp.scale)
        angle = math.radians(rng.uniform(-hyp.degrees, hyp.degrees))
        shift = rng.uniform(0.5 - hyp.translate, 0.5 + hyp.translate, 2) * size
        cos, sin = zoom * math.cos(angle), zoom * math.sin(angle)
        matrix = np.array([[cos, -sin, 0], [sin, cos, 0], [0, 0, 1]])
        matrix = np.array([[1, 0, shift[0]], [0, 1, shift[1]], [0, 0, 1]]) @ matrix
        matrix = matrix @ np.array([[1, 0, -size], [0, 1, -size], [0, 0, 1]])
        image = cv2.warpAffine(canvas, matrix[:2], (size, size), borderValue=(FILL, FILL, FILL))
        corners = np.ones((4 * len(boxes), 3))
        corners[:, :2] = boxes[:, [1, 2, 3, 4, 1, 4, 3, 2]].reshape(-1, 2)
        mapped = (corners @ matrix.T)[:, :2].reshape(-1, 4, 2)
        after = np.concatenate([mapped.min(1), mapped.max(1)], 1).clip(0, size)
        sides, before = after[:, 2:] - after[:, :2], (boxes[:, 3:] - boxes[:, 1:3]) * zoom
        kept = (sides > 2).all(1) & (sides.prod(1) > 0.1 * before.prod(1))
        return image, np.concatenate([boxes[kept, :1], after[kept]], 1)

    def _hsv(self, image: np.ndarray) -> None:
        gains = self.rng.uniform(-1, 1, 3) * [self.hyp.hsv_h, self.hyp.hsv_s, self.hyp.hsv_v] + 1
        values = np.arange(256)
        tables = [(values * gains[0]) % 180, *((values * gain).clip(0, 255) for gain in gains[1:])]
        planes = cv2.split(cv2.cvtColor(image, cv2.COLOR_BGR2HSV))
        merged = cv2.merge([cv2.LUT(p, t.astype(np.uint8)) for p, t in zip(planes, tables, strict=True)])
        cv2.cvtColor(merged, cv2.COLOR_HSV2BGR, dst=image)
