"""Sample images of a validation with labels and predictions: val_batch*.jpg and predictions.jpg."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tessera.utils.bit_depth import Pixels
from tessera.utils.errors import warn_on_error
from tessera.utils.machine.opencv import cv2
from tessera.utils.report.image_grid import MAX_IMAGES, MAX_SIDE, Annotations, labelled, save_grid
from tessera.utils.types import Batch, DatasetIndex, Detections

SHOWN = 3 * MAX_IMAGES  # of a validation
_SIDE = MAX_SIDE // 4  # pixels of an image in a full grid


class _Taken(NamedTuple):
    """An image without padding, its labels and predictions."""

    image: Pixels
    labelled: Annotations
    found: Annotations
    caption: str


class SampleImageCollector:
    """Collector of `images` images of a split, spread evenly over this rank's part, so that all shapes occur."""

    def __init__(self, index: DatasetIndex, ranks: int, images: int = SHOWN) -> None:
        self._index, self._most = index, images
        self._every = max(len(index) // (ranks * max(images, 1)), 1)
        self._seen = 0
        self._taken: list[_Taken] = []

    def __len__(self) -> int:
        return len(self._taken)

    def add(self, batch: Batch, found: Sequence[Detections]) -> None:
        """Collect the sampled images of a batch."""
        with warn_on_error("sample images of the validation"):
            for image in range(len(batch)):
                if self._seen % self._every == 0 and len(self._taken) < self._most:
                    self._taken.append(self._take(batch, image, found[image]))
                self._seen += 1

    def write(self, folder: Path, confidence: float) -> None:
        """Write `val_batch{0,1,2}_{labels,pred}.jpg`, 16 images each, with detections above a confidence."""
        grids = -(-len(self._taken) // MAX_IMAGES)
        for number in range(grids):
            taken = self._taken[number::grids]
            images, labels, _, captions = zip(*taken, strict=True)
            with warn_on_error(f"val_batch{number} images"):
                save_grid(images, labels, self._index.names, captions, folder / f"val_batch{number}_labels.jpg")
                self.write_predictions(folder / f"val_batch{number}_pred.jpg", confidence, taken)

    def write_predictions(self, target: Path, confidence: float, taken: Sequence[_Taken] = ()) -> None:
        """Write the predictions on some images, by default on the first 16."""
        taken = taken or self._taken
        found = [image.found.above(confidence) for image in taken]
        captions = [f"{image.caption} ≥ {confidence:.3f}" for image in taken]
        save_grid([image.image for image in taken], found, self._index.names, captions, target)

    def _take(self, batch: Batch, image: int, detections: Detections) -> _Taken:
        scale_x, scale_y, left, top = batch.placements[image].tolist()
        height, width = batch.sizes_hw[image].tolist()
        x1, y1, x2, y2 = (round(v) for v in (left, top, left + scale_x * width, top + scale_y * height))
        pixels = batch.images[image, y1:y2, x1:x2].cpu().numpy()
        shrunk = min(_SIDE / max(pixels.shape), 1.0)
        if shrunk < 1:
            pixels = cv2.resize(pixels, None, fx=shrunk, fy=shrunk, interpolation=cv2.INTER_AREA)

        labels = labelled(batch, image)
        scores = detections.scores.float().cpu().numpy()
        scale = np.array([scale_x, scale_y, scale_x, scale_y], np.float32)
        boxes = detections.boxes_xyxy.float().cpu().numpy() * scale + np.array([left, top, left, top], np.float32)
        classes = detections.classes.cpu().numpy().astype(np.int64)
        corner = np.array([x1, y1, x1, y1], np.float32)
        return _Taken(
            pixels,
            labels._replace(boxes_xyxy=(labels.boxes_xyxy - corner) * shrunk),
            Annotations((boxes - corner) * shrunk, classes, scores),
            self._index.path(int(batch.indices[image])).name,
        )
