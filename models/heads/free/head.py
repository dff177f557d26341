"""`DetectFree`, the anchor-free head of the tessera models, as a model YAML names it."""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tessera.models.heads.free.layers import FreeLayers, light_branches
from tessera.models.heads.free.loss import FreeLoss
from tessera.models.heads.head import HeadSpec, Recipes
from tessera.models.layers.arguments import flag, one_of, read_arguments, up_to
from tessera.utils.config import Hyp, TrainConfig
from tessera.utils.ranks.world import World

log = logging.getLogger(__name__)

MAX_BINS, MAX_DEPTH = 64, 8  # bins of a distance, 1 = a plain number; 3×3 convolutions of a branch
DEFAULTS = [16, 1, False]  # reg_max, depth, end2end


class DetectFree(FreeLayers):
    """`[[…], 1, DetectFree, [nc, reg_max, depth, end2end]]`; 16, 1 and false where they are left out."""

    recipes = Recipes(
        "hyp.tessera-long.yaml", "hyp.tessera-short.yaml", "hyp.tessera-known.yaml", "hyp.tessera-body.yaml"
    )

    @classmethod
    def from_spec(cls, spec: HeadSpec) -> DetectFree:
        """The head that a model YAML describes.

        Raises:
            ConfigError: other arguments.
        """
        readers = (("nc", one_of("nc")), ("reg_max", up_to(MAX_BINS)), ("depth", up_to(MAX_DEPTH)), ("end2end", flag))
        given = read_arguments(spec.where, spec.arguments, readers, required=1)[1:]
        reg_max, deep, end2end = given + DEFAULTS[len(given) :]
        sets = [light_branches(spec.nc, spec.channels, spec.strides, reg_max, deep) for _ in range(2 if end2end else 1)]
        return cls(spec.nc, spec.strides, reg_max, *sets)

    def criterion(
        self, hyp: Hyp, *, imgsz: int, label_smoothing: float = 0.0, class_weights: Tensor | None = None
    ) -> FreeLoss:
        """Box, class and distance loss."""
        return FreeLoss(self, hyp, label_smoothing=label_smoothing, class_weights=class_weights)

    def prepare(self, labels_wh: NDArray[np.floating], config: TrainConfig, hyp: Hyp, world: World) -> None:
        """Warn of objects, (M, 2) in pixels at the training size, that are larger than any box of this head."""
        if self.reg_max == 1 or not len(labels_wh):
            return
        largest = 2 * (self.reg_max - 1) * max(self.strides)
        share = float((labels_wh.max(1) > largest).mean())
        if share:
            needed = int(np.ceil(labels_wh.max() / 2 / max(self.strides))) + 1
            larger = f"Give it a reg_max of {needed}, or" if needed <= MAX_BINS else "Give"
            log.warning(
                f"reg_max {self.reg_max}: {share:.1%} of the objects are larger than {largest:g} px, the largest box "
                f"that {type(self).__name__} can draw; theirs will be cut. {larger} a smaller --imgsz."
            )
