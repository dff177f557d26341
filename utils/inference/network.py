"""A checkpoint's network, computed by torch."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from tessera.models.detector import DetectionModel, round_imgsz
from tessera.models.tta import predict_augmented
from tessera.utils.checkpoints.weights import Weights, load_weights, model_of_weights
from tessera.utils.engine.precision import Precision, half_precision
from tessera.utils.errors import UserError
from tessera.utils.evaluation.evaluate import fused_copy
from tessera.utils.inference.backend import Backend
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.machine.out_of_memory import explain_out_of_memory_of


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
        self.confidence, self.class_confidences = weights.confidence, weights.class_confidences
        self.pixels = weights.pixels
        self.accelerator = accelerator
        self.has_objectness, self.needs_suppression = model.head.has_objectness, model.head.needs_suppression
        with explain_out_of_memory_of(weights.source, accelerator):
            self._model, self._augment = fused_copy(model, accelerator), augment
        self._precision = half_precision(accelerator) if half else Precision(accelerator, torch.float32)

    @classmethod
    def open(
        cls, path: Path, accelerator: Accelerator, *, augment: bool = False, half: bool = False, end2end: bool = False
    ) -> TorchNetwork:
        """Read a checkpoint; nothing in it is run.

        Raises:
            UserError: it cannot be read, or has no branch for `end2end`.
        """
        weights = load_weights(path)
        model = model_of_weights(weights, str(path))
        if model.channels != 3:
            raise UserError(
                f"--weights {path}: reads images of {model.channels} channels, expected 3: pictures are RGB."
            )
        model.head.keep_inference(end2end=end2end)
        return cls(model, weights, accelerator, augment=augment, half=half)

    def __call__(self, images: Tensor) -> Tensor:
        """As Backend."""
        with torch.no_grad(), self._precision.autocast():
            decoded = predict_augmented(self._model, images) if self._augment else self._model(images)[0]
        self.accelerator.synchronize()
        return cast(Tensor, decoded)
