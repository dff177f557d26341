"""A picture's way through a network: shape, resize, letterbox, network, suppression, boxes in the picture's pixels.

Every step is the function that validation uses, in its order and precision, so that what is measured is what is found.
"""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tessera.data.augment.mosaic import Placement, letterbox
from tessera.data.feed.image_sizes import loaded_sizes, resized, validation_shapes
from tessera.data.feed.tile_grid import DEFAULT_OVERLAP, check_tiles, windows_of
from tessera.models.heads.head import Head
from tessera.models.nms import (
    Suppression,
    non_max_suppression,
    strongest_candidates,
    suppress_candidates,
    undo_letterbox,
)
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.runtime.merge_tiles import join
from tessera.utils.runtime.model import Backend, Model, PictureBackend
from tessera.utils.types import Detections, Sample

_NO_BOXES, _NO_CLASSES = np.zeros((0, 4), np.float32), np.zeros(0, np.int32)


class TimedDetections(NamedTuple):
    """What was found on a picture, on the host and in its pixels; milliseconds: preparation, inference, suppression."""

    detections: Detections
    speed_ms: tuple[float, float, float]


class Pipeline:
    """A network with all that lies around it; threads may share it.

    Args:
        backend: what computes.
        imgsz: the long side of a picture becomes this many pixels, a multiple of the backend's stride; a file with the
            whole pipeline has its own.
        tile: larger pictures are taken in tiles of so many pixels, and as a whole for objects larger than the overlap;
            0 = as a whole alone.
        overlap: least share of a tile that the next one overlaps.

    Raises:
        ConfigError: `tile` or `overlap` is out of range.
    """

    def __init__(
        self, backend: Backend | PictureBackend, imgsz: int, tile: int = 0, overlap: float = DEFAULT_OVERLAP
    ) -> None:
        if tile:
            check_tiles(tile, overlap)
        self.backend, self.imgsz, self._tile, self._overlap = backend, imgsz, tile, overlap

    def __call__(self, picture: NDArray[np.uint8], rules: Suppression) -> TimedDetections:
        """Find objects.

        Args:
            picture: uint8 (H, W, 3) RGB.
            rules: which predictions become detections; what follows from the network is added here.
        """
        if isinstance(self.backend, Backend):
            rules = rules_of_network(rules, self.backend)
        size_hw = picture_size(picture)
        tiles = windows_of(size_hw, self._tile, self._overlap) if self._tile else []
        if len(tiles) < 2:
            return self._untiled(picture, rules)
        parts, spent = [], np.zeros(3)
        for left, top, right, bottom in tiles:
            found, speed_ms = self._untiled(np.ascontiguousarray(picture[top:bottom, left:right]), rules)
            moved = found.boxes_xyxy + found.boxes_xyxy.new_tensor((left, top, left, top))
            parts.append(Detections(moved, found.scores, found.classes))
            spent += speed_ms
        started = time.perf_counter()
        joined = join(tiles, parts, size_hw, rules)
        spent[2] += 1000 * (time.perf_counter() - started)
        preparation, inference, suppression = spent.tolist()
        return TimedDetections(joined, (preparation, inference, suppression))

    def _untiled(self, picture: NDArray[np.uint8], rules: Suppression) -> TimedDetections:
        started = time.perf_counter()
        if isinstance(self.backend, PictureBackend):
            detections = self.backend.detect(picture, rules)
            return TimedDetections(detections, (0.0, 1000 * (time.perf_counter() - started), 0.0))
        accelerator = self.backend.accelerator
        canvas, placement = fit_picture(picture, self.imgsz, self.backend.stride, self.backend.size_hw)
        with torch.no_grad():  # of this thread, and not while a caller has the result
            images = network_input(canvas, accelerator.device)
            prepared = time.perf_counter()
            decoded = self.backend(images)
            accelerator.synchronize()
            predicted = time.perf_counter()
            in_batch = _suppressed(decoded, rules, accelerator)
            placed = undo_letterbox(in_batch, torch.tensor(placement, dtype=torch.float64), picture_size(picture))
        times = (started, prepared, predicted, time.perf_counter())
        preparation, inference, suppression = (1000 * (b - a) for a, b in pairwise(times))
        return TimedDetections(placed, (preparation, inference, suppression))


def _suppressed(decoded: Tensor, rules: Suppression, accelerator: Accelerator) -> Detections:
    """Detections of the one picture in a batch, on the host."""
    if accelerator.queue_depth:  # as in a validation: the host waits for one copy
        return suppress_candidates(strongest_candidates(decoded, rules).cpu()[0], rules)
    (found,) = non_max_suppression(decoded, rules, accelerator.widest)
    return Detections(found.boxes_xyxy.cpu(), found.scores.cpu(), found.classes.cpu())


def rules_of_network(rules: Suppression, network: Backend | Head) -> Suppression:
    """The rules for what a network predicts: whether it needs a suppression, and has an objectness."""
    iou = rules.iou if network.needs_suppression else 1.0
    return replace(rules, iou=iou, has_objectness=network.has_objectness)


def suppression_of(
    model: Model,
    *,
    conf: float,
    iou: float,
    max_det: int,
    agnostic: bool = False,
    class_confs: tuple[float, ...] = (),
) -> Suppression:
    """The rules of a validation, with what `Suppression` takes: several labels a box unless there is one class."""
    one_class = len(model.names) == 1
    rules = Suppression(
        conf, iou, max_det, multi_label=not one_class, agnostic=agnostic or one_class, class_confs=class_confs
    )
    return rules_of_network(rules, model) if isinstance(model, Backend) else rules


def fit_picture(
    picture: NDArray[np.uint8], imgsz: int, stride: int, size_hw: tuple[int, int] | None = None
) -> tuple[NDArray[np.uint8], Placement]:
    """What the network sees of a picture.

    Args:
        picture: uint8 (H, W, 3) RGB.
        imgsz: the long side becomes this.
        stride: sides of the result are multiples of it.
        size_hw: height and width of the result, where the network takes no other; None = as large as it needs.

    Returns:
        uint8 (h, w, 3), and the placement scale_x, scale_y, left, top: x = x_picture · scale_x + left.
    """
    height, width = picture_size(picture)
    original_hw = np.array((height, width))
    loaded_h, loaded_w = loaded_sizes(original_hw, imgsz).tolist()
    small = resized(picture, (loaded_h, loaded_w), area=max(height, width) > imgsz)
    shape_h, shape_w = size_hw or validation_shapes(original_hw[None], imgsz, stride)[0].tolist()
    placed, (scale_x, scale_y, left, top) = letterbox(Sample(small, _NO_BOXES, _NO_CLASSES), (shape_h, shape_w))
    return placed.image, (scale_x * (loaded_w / width), scale_y * (loaded_h / height), left, top)


def network_input(canvas: NDArray[np.uint8], device: torch.device) -> Tensor:
    """uint8 (H, W, 3) as float32 (1, 3, H, W) in 0 … 1 on `device`: as `Batch.images_on`."""
    return torch.from_numpy(canvas[None]).to(device).permute(0, 3, 1, 2).float().div_(255)


def picture_size(picture: NDArray[np.uint8]) -> tuple[int, int]:
    """Height and width."""
    return picture.shape[0], picture.shape[1]
