"""The pictures that show a quantiser which values occur."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tessera.data.source.decode import UndecodableImage, read_image
from tessera.models.layers.blocks import Conv
from tessera.utils.errors import UserError
from tessera.utils.pixels import Pixels
from tessera.utils.runtime.pipeline import fit_picture, network_input

if TYPE_CHECKING:
    from tessera.utils.exporting.job import ExportJob  # which asks here what stays in float

PICTURES = 128  # spread evenly over the training pictures


def calibration_pictures(job: ExportJob, count: int = PICTURES) -> Iterator[Pixels]:
    """At most so many training pictures, one after the other, uint8 (H, W, 3) RGB."""
    index = job.training
    assert index is not None, "of --int8"
    chosen = np.unique(np.linspace(0, len(index) - 1, min(count, len(index))).round().astype(int))
    for image in chosen.tolist():
        with suppress(UndecodableImage):  # the check of the data names it
            yield read_image(index.path(image), rule=index.pixels)


def calibration_images(job: ExportJob, count: int = PICTURES) -> Iterator[Tensor]:
    """The same as the bare network takes them: float32 (1, 3, h, w)."""
    for picture in calibration_pictures(job, count):
        canvas, _ = fit_picture(picture, job.imgsz, job.model.stride, job.size_hw)
        yield network_input(canvas, torch.device("cpu")).contiguous()


def body_weights(job: ExportJob) -> frozenset[str]:
    """Names, as in the graph, of the weights of all convolutions but the head's last ones, which give the predictions.

    Those write logits of boxes and of classes, whose ranges have nothing in common, and decoding follows: in 8 bits the
    scores would vanish.
    """
    return frozenset(
        f"model.{name}.conv.weight" for name, module in job.model.named_modules() if isinstance(module, Conv)
    )


def quantized_weights(job: ExportJob) -> frozenset[str]:
    """Those of them that are brought to 8 bits.

    Raises:
        UserError: there are none.
    """
    kept = tuple(f"model.model.{layer}." for layer in job.float_layers)
    weights = frozenset(name for name in body_weights(job) if not name.startswith(kept))
    if not weights:
        raise UserError(
            f"--int8: {job.weights.source}: 8 bits change the scores too much in every layer, so that none is left for "
            "them. Export without --int8, or train longer."
        )
    return weights
