"""A picture's way through a network: shape, resize, letterbox, network, suppression, boxes in the picture's pixels.

Every step is the function that validation uses, in its order and precision, so that what is measured is what is found.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tessera.data.augment.scene import Placement, letterbox
from tessera.data.feed.shapes import loaded_sizes, resized, validation_shapes
from tessera.models.suppression import (
    Suppression,
    non_max_suppression,
    strongest_candidates,
    suppress_candidates,
    undo_letterbox,
)
from tessera.utils.inference.backend import Backend, PictureBackend
from tessera.utils.types import Detections, Sample

_NO_BOXES, _NO_CLASSES = np.zeros((0, 4), np.float32), np.zeros(0, np.int32)


class Found(NamedTuple):
    """What was found on a picture.

    Attributes:
        detections: on the host, in pixels of the picture.
        speed_ms: milliseconds: preparation, inference, suppression.
    """

    detections: Detections
    speed_ms: tuple[float, float, float]


class Pipeline:
    """A network with all that lies around it; threads may share it.

    Args:
        backend: what computes.
        rules: which predictions become detections; those of `suppression_of`.
        imgsz: the long side of a picture becomes this many pixels, a multiple of the backend's stride; a file with the
            whole pipeline has its own.
    """

    def __init__(self, backend: Backend | PictureBackend, rules: Suppression, imgsz: int) -> None:
        self.backend, self.rules, self.imgsz = backend, rules, imgsz

    def __call__(self, picture: NDArray[np.uint8]) -> Found:
        """Find objects.

        Args:
            picture: uint8 (H, W, 3) RGB.
        """
        started = time.perf_counter()
        if isinstance(self.backend, PictureBackend):
            detections = self.backend.detect(picture, self.rules)
            return Found(detections, (0.0, 1000 * (time.perf_counter() - started), 0.0))
        canvas, placement = fit_picture(picture, self.imgsz, self.backend.stride, self.backend.size_hw)
        with torch.no_grad():  # of this thread, and not while a caller has the result
            images = network_input(canvas, self.backend.accelerator.device)
            prepared = time.perf_counter()
            decoded = self.backend(images)
            predicted = time.perf_counter()
            in_batch = self._suppress(decoded)
            placed = undo_letterbox(in_batch, torch.tensor(placement, dtype=torch.float64), picture_size(picture))
        times = (started, prepared, predicted, time.perf_counter())
        preparation, inference, suppression = (1000 * (b - a) for a, b in pairwise(times))
        return Found(placed, (preparation, inference, suppression))

    def _suppress(self, decoded: Tensor) -> Detections:
        assert isinstance(self.backend, Backend)
        accelerator = self.backend.accelerator
        if accelerator.queue_depth:  # as in a validation: the host waits for one copy
            return suppress_candidates(strongest_candidates(decoded, self.rules).cpu()[0], self.rules)
        (found,) = non_max_suppression(decoded, self.rules, accelerator.widest)
        return Detections(found.boxes_xyxy.cpu(), found.scores.cpu(), found.classes.cpu())


def suppression_of(
    backend: Backend | PictureBackend,
    *,
    conf: float,
    iou: float,
    max_det: int,
    agnostic: bool = False,
    class_confs: tuple[float, ...] = (),
) -> Suppression:
    """The rules of a validation for a network: several labels a box, but where there is one class alone.

    Args:
        backend: the network.
        conf, iou, max_det, agnostic, class_confs: as in `Suppression`.
    """
    one_class = len(backend.names) == 1
    return Suppression(
        conf,
        iou if isinstance(backend, PictureBackend) or backend.needs_suppression else 1.0,
        max_det,
        multi_label=not one_class,
        agnostic=agnostic or one_class,
        has_objectness=isinstance(backend, Backend) and backend.has_objectness,
        class_confs=class_confs,
    )


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
