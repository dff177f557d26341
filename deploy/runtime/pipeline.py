"""Inference pipeline of one image: resize, letterbox, network, NMS, boxes in the image's pixels.

Every step is the function that validation uses, in the same order and precision.
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

from tessera.data.augment.pipeline import Placement, letterbox
from tessera.data.feed.image_sizes import (
    DEFAULT_OVERLAP,
    check_tiles,
    rect_val_shapes,
    resized,
    resized_sizes,
    tile_windows,
)
from tessera.deploy.runtime.merge_tiles import join
from tessera.models.heads.head import Head
from tessera.models.nms import NmsSettings, nms_of_candidates, non_max_suppression, select_candidates, undo_letterbox
from tessera.utils.evaluation.backend import Backend, ImageBackend, Model
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.types import Detections, Sample

_NO_BOXES, _NO_CLASSES = np.zeros((0, 4), np.float32), np.zeros(0, np.int32)


class TimedDetections(NamedTuple):
    """Detections of an image, on the host and in its pixels; milliseconds of preprocessing, inference and NMS."""

    detections: Detections
    speed_ms: tuple[float, float, float]


class Pipeline:
    """A network with preprocessing and postprocessing; thread-safe.

    Args:
        backend: computes predictions or detections.
        imgsz: long side in pixels that images are resized to, a multiple of the stride.
        tile: split larger images into tiles of this many pixels, besides the whole image; 0 = off.
        overlap: smallest overlap of neighbouring tiles as a fraction of a tile.

    Raises:
        ConfigError: `tile` or `overlap` is out of range.
    """

    def __init__(
        self, backend: Backend | ImageBackend, imgsz: int, tile: int = 0, overlap: float = DEFAULT_OVERLAP
    ) -> None:
        if tile:
            check_tiles(tile, overlap)
        self.backend, self.imgsz, self._tile, self._overlap = backend, imgsz, tile, overlap

    def __call__(self, image: NDArray[np.uint8], rules: NmsSettings) -> TimedDetections:
        """Detect objects in uint8 (H, W, 3) RGB; settings that follow from the network are added to `rules`."""
        if isinstance(self.backend, Backend):
            rules = network_nms(rules, self.backend)
        size_hw = image_hw(image)
        tiles = tile_windows(size_hw, self._tile, self._overlap) if self._tile else []
        if len(tiles) < 2:
            return self._untiled(image, rules)
        parts, spent = [], np.zeros(3)
        for left, top, right, bottom in tiles:
            found, speed_ms = self._untiled(np.ascontiguousarray(image[top:bottom, left:right]), rules)
            moved = found.boxes_xyxy + found.boxes_xyxy.new_tensor((left, top, left, top))
            parts.append(Detections(moved, found.scores, found.classes))
            spent += speed_ms
        started = time.perf_counter()
        joined = join(tiles, parts, size_hw, rules)
        spent[2] += 1000 * (time.perf_counter() - started)
        preprocessing, inference, nms = spent.tolist()
        return TimedDetections(joined, (preprocessing, inference, nms))

    def _untiled(self, image: NDArray[np.uint8], rules: NmsSettings) -> TimedDetections:
        started = time.perf_counter()
        if isinstance(self.backend, ImageBackend):
            detections = self.backend.detect(image, rules)
            return TimedDetections(detections, (0.0, 1000 * (time.perf_counter() - started), 0.0))
        accelerator = self.backend.accelerator
        canvas, placement = letterbox_image(image, self.imgsz, self.backend.stride, self.backend.size_hw)
        with torch.no_grad():  # ends before a caller has the result
            images = network_input(canvas, accelerator.device)
            prepared = time.perf_counter()
            decoded = self.backend(images)
            accelerator.synchronize()
            predicted = time.perf_counter()
            in_batch = _apply_nms(decoded, rules, accelerator)
            placed = undo_letterbox(in_batch, torch.tensor(placement, dtype=torch.float64), image_hw(image))
        times = (started, prepared, predicted, time.perf_counter())
        preprocessing, inference, nms = (1000 * (b - a) for a, b in pairwise(times))
        return TimedDetections(placed, (preprocessing, inference, nms))


def _apply_nms(decoded: Tensor, rules: NmsSettings, accelerator: Accelerator) -> Detections:
    """Return the detections of a batch of one image on the host."""
    if accelerator.queue_depth:  # as in a validation, the host waits for one copy
        return nms_of_candidates(select_candidates(decoded, rules).cpu()[0], rules)
    (found,) = non_max_suppression(decoded, rules, accelerator.widest)
    return Detections(found.boxes_xyxy.cpu(), found.scores.cpu(), found.classes.cpu())


def network_nms(rules: NmsSettings, network: Backend | Head) -> NmsSettings:
    """Add to the rules whether the network needs NMS and has an objectness."""
    iou = rules.iou if network.needs_nms else 1.0
    return replace(rules, iou=iou, has_objectness=network.has_objectness)


def nms_settings(
    model: Model, *, conf: float, iou: float, max_det: int, agnostic: bool = False, class_confs: tuple[float, ...] = ()
) -> NmsSettings:
    """Return the NMS settings of a model: multi-label as in a validation, unless there is one class."""
    one_class = len(model.names) == 1
    rules = NmsSettings(
        conf, iou, max_det, multi_label=not one_class, agnostic=agnostic or one_class, class_confs=class_confs
    )
    return network_nms(rules, model) if isinstance(model, Backend) else rules


def letterbox_image(
    image: NDArray[np.uint8], imgsz: int, stride: int, size_hw: tuple[int, int] | None = None
) -> tuple[NDArray[np.uint8], Placement]:
    """Resize uint8 (H, W, 3) RGB to a long side of `imgsz` and letterbox it to multiples of `stride`, or to `size_hw`.

    Returns:
        uint8 (h, w, 3), and the placement scale_x, scale_y, left, top: x = x_image · scale_x + left.
    """
    height, width = image_hw(image)
    original_hw = np.array((height, width))
    loaded_h, loaded_w = resized_sizes(original_hw, imgsz).tolist()
    small = resized(image, (loaded_h, loaded_w), area=max(height, width) > imgsz)
    shape_h, shape_w = size_hw or rect_val_shapes(original_hw[None], imgsz, stride)[0].tolist()
    placed, (scale_x, scale_y, left, top) = letterbox(Sample(small, _NO_BOXES, _NO_CLASSES), (shape_h, shape_w))
    return placed.image, (scale_x * (loaded_w / width), scale_y * (loaded_h / height), left, top)


def network_input(canvas: NDArray[np.uint8], device: torch.device) -> Tensor:
    """Convert uint8 (H, W, 3) to float32 (1, 3, H, W) in 0 … 1 on `device`, as `Batch.images_on`."""
    return torch.from_numpy(canvas[None]).to(device).permute(0, 3, 1, 2).float().div_(255)


def image_hw(image: NDArray[np.uint8]) -> tuple[int, int]:
    return image.shape[0], image.shape[1]
