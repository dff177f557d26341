"""`DetectYOLOX`, the head of YOLOX, as a model YAML names it."""

from __future__ import annotations

from torch import Tensor

from tessera.models.heads.free.head import DetectFree
from tessera.models.heads.head import HeadSpec
from tessera.models.heads.yolox.layers import YoloxLayers
from tessera.models.heads.yolox.loss import YoloxLoss
from tessera.models.layers.arguments import one_of, read_arguments
from tessera.utils.config import Hyp


class DetectYOLOX(YoloxLayers):
    """`[[…], 1, DetectYOLOX, [nc]]`."""

    recipes = DetectFree.recipes

    @classmethod
    def from_spec(cls, spec: HeadSpec) -> DetectYOLOX:
        """The head that a model YAML describes.

        Raises:
            ConfigError: other arguments than nc.
        """
        read_arguments(spec.where, spec.arguments, (("nc", one_of("nc")),), required=1)
        return cls(spec.nc, spec.channels, spec.strides)

    def criterion(
        self, hyp: Hyp, *, imgsz: int, label_smoothing: float = 0.0, class_weights: Tensor | None = None
    ) -> YoloxLoss:
        """Box, objectness and class loss."""
        return YoloxLoss(self, hyp, label_smoothing=label_smoothing, class_weights=class_weights)
