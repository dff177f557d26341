"""Torch backends: the network of a checkpoint or of a running training."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from tessera.models.detector import DetectionModel, count_parameters, predict_augmented, round_imgsz, summary
from tessera.utils.checkpoints.weights import Weights
from tessera.utils.engine.precision import Precision, half_precision
from tessera.utils.evaluation.backend import Backend
from tessera.utils.machine.accelerator import Accelerator, explain_out_of_memory_loading
from tessera.utils.machine.host import at_once


class TrainedNetwork(Backend):
    """The network of a running training, from `fused_copy`; a `precision` of None is float32."""

    source = "the model of the training"
    _augment = False

    def __init__(
        self, fused: DetectionModel, imgsz: int, accelerator: Accelerator, precision: Precision | None = None
    ) -> None:
        self.names, self.stride, self.imgsz = fused.names, fused.stride, imgsz
        self.accelerator = accelerator
        self.parameters = count_parameters(fused)
        self.has_objectness, self.needs_nms = fused.head.has_objectness, fused.head.needs_nms
        self._model, self._precision = fused, precision or Precision(accelerator, torch.float32)

    def __call__(self, images: Tensor) -> Tensor:
        with torch.no_grad(), self._precision.autocast():
            if self._augment:
                return predict_augmented(self._model, images)
            decoded: Tensor = self._model(images)[0]
            return decoded

    def describe(self, imgsz: int) -> str:
        with self._precision.autocast():
            return summary(self._model, imgsz)


class TorchNetwork(TrainedNetwork):
    """The unfused model of a checkpoint; `augment` is test-time augmentation, `half` the accelerator's 16-bit type."""

    def __init__(
        self,
        model: DetectionModel,
        weights: Weights,
        accelerator: Accelerator,
        augment: bool = False,
        half: bool = False,
    ) -> None:
        with explain_out_of_memory_loading(weights.source, accelerator):
            fused = fused_copy(model, accelerator)
        precision = half_precision(accelerator) if half else Precision(accelerator, torch.float32)
        for layer in fused.modules():
            if isinstance(layer, nn.Conv2d):  # once: autocast would in each forward
                layer.to(precision.dtype)
        super().__init__(fused, round_imgsz(weights.default_imgsz, model.stride), accelerator, precision)
        trained = f"was trained at {weights.imgsz}" if weights.imgsz else "does not say at which size it was trained"
        self.source, self.imgsz_origin, self.data = weights.source, trained, weights.data
        self.confidence, self.class_confidences = weights.confidence, weights.class_confidences
        self.pixels, self._augment = weights.pixels, augment

    def enable_concurrency(self) -> int:
        return at_once() if self.accelerator.is_host else 1


def fused_copy(model: DetectionModel, accelerator: Accelerator) -> DetectionModel:
    """Return a copy in evaluation mode with BatchNorm folded into the convolutions."""
    fused = copy.deepcopy(model).eval().fuse(accelerator.widest)
    return fused.to(accelerator.device).to(memory_format=accelerator.memory_format)
