"""`Detect`, the anchor-based head of YOLOv5, as a model YAML names it: layers, loss and AutoAnchor together."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tessera.models.heads.anchor.layers import AnchorLayers
from tessera.models.heads.anchor.loss import DetectionLoss
from tessera.models.heads.anchor.priors import check_anchors, set_anchors
from tessera.models.heads.head import HeadSpec
from tessera.models.layers.arguments import count, one_of, positive, read_arguments
from tessera.utils.config import Hyp, TrainConfig
from tessera.utils.errors import ConfigError
from tessera.utils.ranks.world import World
from tessera.utils.seeding import sample_rng
from tessera.utils.text import counted

log = logging.getLogger(__name__)

MAX_ANCHORS = 64  # a level


def read_anchors(value: object) -> list[list[float]] | int:
    """Anchors in pixels, a row of w, h, w, h … (or of [w, h] pairs) a level, all of one length; or a number of them."""
    if isinstance(value, int):
        if count(value) > MAX_ANCHORS:
            raise ValueError(f"at most {MAX_ANCHORS} anchors a level")
        return value
    expected = "one row of width, height, width, height … a detection level, all of one length, or a number of anchors"
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ValueError(expected)
    rows: list[list[float]] = []
    for row in value:
        if not isinstance(row, Sequence) or isinstance(row, str):
            raise ValueError(expected)
        flat = itertools.chain.from_iterable(side if isinstance(side, Sequence) else (side,) for side in row)
        rows.append([positive(side) for side in flat])
    if len({len(row) for row in rows}) != 1 or len(rows[0]) % 2 or not rows[0]:
        raise ValueError(expected)
    return rows


class Detect(AnchorLayers):
    """`[[…], 1, Detect, [nc, anchors]]` with the key `anchors`: sizes in pixels a level, or how many a level."""

    yaml_keys = MappingProxyType({"anchors": read_anchors})

    @classmethod
    def from_spec(cls, spec: HeadSpec) -> Detect:
        """The head that a model YAML describes.

        Raises:
            ConfigError: other arguments than nc and anchors, or not one row of anchors a level.
        """
        read_arguments(spec.where, spec.arguments, (("nc", one_of("nc")), ("anchors", one_of("anchors"))))
        anchors = spec.keys["anchors"]
        if not isinstance(anchors, int) and len(anchors) != len(spec.channels):
            raise ConfigError(
                f"{spec.where}: reads {counted(len(spec.channels), 'layer')}, but `anchors` has "
                f"{counted(len(anchors), 'row')}. One row a layer."
            )
        return cls(spec.nc, anchors, spec.channels, spec.strides)

    def criterion(
        self, hyp: Hyp, *, imgsz: int, label_smoothing: float = 0.0, class_weights: Tensor | None = None
    ) -> DetectionLoss:
        """Box, objectness and class loss."""
        return DetectionLoss(self, hyp, imgsz=imgsz, label_smoothing=label_smoothing, class_weights=class_weights)

    def prepare(self, labels_wh: NDArray[np.floating], config: TrainConfig, hyp: Hyp, world: World) -> None:
        """AutoAnchor: anchors that fit the labels, (M, 2) in pixels at the training size; rank 0 decides."""
        if config.noautoanchor:
            return
        rng = sample_rng(config.seed, 0, 0, "anchors")
        anchors_px, message = world.from_main(lambda: check_anchors(self, labels_wh, hyp.anchor_t, rng))
        log.info(message)
        set_anchors(self, anchors_px)

    @property
    def priors(self) -> Tensor:
        """Anchors, float32 (nl, na, 2) in grid units on the CPU: a copy."""
        return self.anchors.detach().float().cpu().clone()
