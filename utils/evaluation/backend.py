"""Interfaces of opened models: networks that need letterbox and NMS, or files that map an image to its boxes.

Legend: B images, A predictions of an image, C classes.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tessera.models.detector import check_imgsz
from tessera.models.nms import NmsSettings
from tessera.utils.bit_depth import PixelRule
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.thresholds import detection_threshold
from tessera.utils.types import Detections

log = logging.getLogger(__name__)

DEFAULT_IOU = 0.45  # as YOLOv5's


class Model(ABC):
    """A detector."""

    source: str  # name of the file in messages
    names: tuple[str, ...]  # class names by index
    imgsz: int  # training size in pixels, a multiple of `stride`
    imgsz_origin: str = ""  # origin of that size, such as "was trained at 640"
    stride: int  # the sides of its input are multiples of it
    size_hw: tuple[int, int] | None = None  # fixed height and width; None = any multiples of the stride
    confidence: float | None = None  # confidence with the best mean F1 in validation; None = unknown
    class_confidences: tuple[float, ...] = ()  # confidence with the best F1 of each class; () = unknown
    pixels: PixelRule | None = None  # conversion of images with more than 8 bits in its training
    data: str = ""  # dataset YAML of its training; "" = unknown
    parameters: int | None = None  # number of parameters, BatchNorm folded; None = unknown

    @property
    def nc(self) -> int:
        return len(self.names)

    @property
    def threshold(self) -> float:
        """Confidence threshold for detection."""
        return detection_threshold(self.confidence)

    @property
    def fixed_imgsz(self) -> int:
        """Fixed long side in pixels; 0 = any."""
        return max(self.size_hw or (0,))

    def check_imgsz(self, imgsz: int) -> int:
        """Return the supported long side nearest to `imgsz`, with a warning if that differs; 0 = its own."""
        if not self.fixed_imgsz:
            return check_imgsz(imgsz or self.imgsz, self.stride)
        if imgsz not in (0, self.fixed_imgsz):
            log.warning(f"--imgsz {imgsz}: {self.source} was exported for another size; using {self.fixed_imgsz}.")
        return self.fixed_imgsz

    def enable_concurrency(self) -> int:
        """Compute several images concurrently from now on, one thread each, where that is faster; return how many."""
        return 1

    def describe(self, imgsz: int) -> str:
        """Return a line on the model and its runtime at `imgsz` pixels."""
        return f"{self.source}, {imgsz} px"


class Backend(Model):
    """A bare network."""

    accelerator: Accelerator  # computes the network
    has_objectness: bool = False  # rows have an objectness between box and classes that scores do not include
    needs_nms: bool = True  # several rows may predict an object
    splits_batches: bool = False  # after `enable_concurrency` it divides a batch among its own threads

    @abstractmethod
    def __call__(self, images: Tensor) -> Tensor:
        """Predict; thread-safe.

        Args:
            images: float32 (B, 3, H, W) RGB in 0 … 1 on `accelerator.device`; sides are multiples of `stride`.

        Returns:
            float32 (B, A, 4 + C), cx, cy, w, h in pixels of the input and class scores; or (B, A, 5 + C) with
            objectness. The device may still compute it.
        """


class ImageBackend(Model):
    """A file with the whole pipeline, from an image to boxes in its pixels."""

    @property
    def fixed_imgsz(self) -> int:
        return self.imgsz

    @abstractmethod
    def detect(self, image: NDArray[np.uint8], rules: NmsSettings) -> Detections:
        """Detect objects in uint8 (H, W, 3) RGB; thread-safe. Detections are on the host, descending by score."""
