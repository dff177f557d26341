"""A checkpoint's network, computed by torch."""

from __future__ import annotations

import copy
from typing import cast

import torch
from torch import Tensor

from tessera.models.detector import DetectionModel, round_imgsz
from tessera.models.summary import summary
from tessera.models.tta import predict_augmented
from tessera.utils.checkpoints.weights import Weights
from tessera.utils.engine.precision import Precision, half_precision
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.machine.out_of_memory import explain_out_of_memory_of
from tessera.utils.runtime.model import Backend


class TorchNetwork(Backend):
    """A checkpoint: ours or a YOLOv5 .pt.

    Args:
        model: the raw model.
        weights: what else its file says.
        accelerator: where it computes.
        augment: test-time augmentation.
        half: the accelerator's 16 bits.
    """

    def __init__(
        self,
        model: DetectionModel,
        weights: Weights,
        accelerator: Accelerator,
        *,
        augment: bool = False,
        half: bool = False,
    ) -> None:
        self.source, self.names, self.stride = weights.source, model.names, model.stride
        self.imgsz = round_imgsz(weights.usual_imgsz, model.stride)
        trained = f"was trained at {weights.imgsz}" if weights.imgsz else "does not say at which size it was trained"
        self.imgsz_origin, self.data = trained, weights.data
        self.confidence, self.class_confidences = weights.confidence, weights.class_confidences
        self.pixels = weights.pixels
        self.accelerator = accelerator
        self.has_objectness, self.needs_suppression = model.head.has_objectness, model.head.needs_suppression
        with explain_out_of_memory_of(weights.source, accelerator):
            self._model, self._augment = fused_copy(model, accelerator), augment
        self._precision = half_precision(accelerator) if half else Precision(accelerator, torch.float32)

    def __call__(self, images: Tensor) -> Tensor:
        """As Backend."""
        with torch.no_grad(), self._precision.autocast():
            decoded = predict_augmented(self._model, images) if self._augment else self._model(images)[0]
        return cast(Tensor, decoded)

    def describe(self, imgsz: int) -> str:
        """As Model."""
        return summary(self._model, imgsz)


def fused_copy(model: DetectionModel, accelerator: Accelerator) -> DetectionModel:
    """A copy for evaluation, with BatchNorm folded into the convolutions."""
    fused = copy.deepcopy(model).eval().fuse(accelerator.widest)
    return fused.to(accelerator.device).to(memory_format=accelerator.memory_format)
