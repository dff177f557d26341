"""What computes: a bare network of any format, or a file that holds the whole pipeline.

Legend: B images, A predictions of an image, C classes.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tessera.models.detector import usable_imgsz
from tessera.models.nms import Suppression
from tessera.utils.bit_depth import PixelRule
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.types import Detections

log = logging.getLogger(__name__)

DEFAULT_CONF, DEFAULT_IOU = 0.25, 0.45  # YOLOv5's, to detect with where the weights do not say which is best


class Model(ABC):
    """What every file of a detector says of itself.

    Attributes:
        source: names the file, for messages.
        names: class names by index.
        imgsz: the size in pixels that it was trained at, a multiple of `stride`.
        imgsz_origin: why that size, such as "was trained at 640".
        stride: the sides of its input are multiples of it.
        size_hw: the one height and width that it takes; None where any multiples of the stride will do.
        confidence: where the mean F1 of its validation is best; None where it is not known.
        class_confidences: where the F1 of each class is best; () where it is not known.
        pixels: how levels of more than 8 bits became 8 in its training.
        data: the dataset YAML that it was trained on; "" where it is not known.
        parameters: how many numbers it learnt, BatchNorm folded in; None where it is not known.
    """

    source: str
    names: tuple[str, ...]
    imgsz: int
    imgsz_origin: str = ""
    stride: int
    size_hw: tuple[int, int] | None = None
    confidence: float | None = None
    class_confidences: tuple[float, ...] = ()
    pixels: PixelRule | None = None
    data: str = ""
    parameters: int | None = None

    @property
    def nc(self) -> int:
        """Number of classes."""
        return len(self.names)

    @property
    def fixed_imgsz(self) -> int:
        """The only long side in pixels that it takes; 0 where it takes others."""
        return max(self.size_hw or (0,))

    def usable_imgsz(self, asked: int) -> int:
        """The long side in pixels that it takes, as asked for, or nearly so with a warning; 0 = its own `imgsz`."""
        if not self.fixed_imgsz:
            return usable_imgsz(asked or self.imgsz, self.stride)
        if asked not in (0, self.fixed_imgsz):
            log.warning(f"--imgsz {asked}: {self.source} was made for another size; using {self.fixed_imgsz}.")
        return self.fixed_imgsz

    def compute_apart(self) -> int:
        """Compute several pictures at once from now on, a thread each, where that takes less than all threads on one.

        Returns:
            How many at once; 1 where all threads compute one.
        """
        return 1

    def describe(self, imgsz: int) -> str:
        """One line: what computes images of `imgsz` pixels."""
        return f"{self.source}, {imgsz} px"


class Backend(Model):
    """A bare network.

    Attributes:
        accelerator: where it computes.
        has_objectness: rows have an objectness between box and classes, not yet multiplied in.
        needs_suppression: several rows may predict an object.
        divides_batches: once it computes pictures apart, it divides a batch among its own threads.
    """

    accelerator: Accelerator
    has_objectness: bool = False
    needs_suppression: bool = True
    divides_batches: bool = False

    @abstractmethod
    def __call__(self, images: Tensor) -> Tensor:
        """Predict; may be called by several threads at once.

        Args:
            images: float32 (B, 3, H, W) in 0 … 1, RGB, on `accelerator.device`; sides are multiples of `stride`.

        Returns:
            float32 (B, A, 4 + C) on the same device, which may still compute it: centre x, centre y, width, height in
            pixels of the input, class scores; or (B, A, 5 + C) with objectness.
        """


class PictureBackend(Model):
    """A file that holds the whole pipeline, from a picture's pixels to boxes in them."""

    @property
    def fixed_imgsz(self) -> int:
        """As Model."""
        return self.imgsz

    @abstractmethod
    def detect(self, picture: NDArray[np.uint8], rules: Suppression) -> Detections:
        """Find objects; may be called by several threads at once.

        Args:
            picture: uint8 (H, W, 3) RGB.
            rules: which predictions become detections; `class_confs` among them.

        Returns:
            On the host, boxes in pixels of the picture, descending by score.
        """
