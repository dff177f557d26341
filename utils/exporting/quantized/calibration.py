"""The pictures that show a quantiser which values occur."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from tessera.data.source.decode import UndecodableImage, read_image
from tessera.models.layers.blocks import Conv
from tessera.utils.errors import UserError
from tessera.utils.exporting.parity.pictures import find_index
from tessera.utils.exporting.subject import Subject
from tessera.utils.runtime.pipeline import fit_picture, network_input
from tessera.utils.types import DatasetIndex

PICTURES = 128  # spread evenly over the training pictures


def calibration_index(subject: Subject) -> DatasetIndex:
    """The training pictures of `--data`, else of the dataset that the weights were trained on.

    Raises:
        UserError: they are not there.
    """
    index = find_index(subject.config.data, subject.weights.data, "train")
    if index is None:
        raise UserError(
            f"--int8: the dataset that {subject.path.name} was trained on is not here, and quantisation is calibrated "
            "on its pictures. Give its YAML with --data."
        )
    return index


def calibration_inputs(subject: Subject, index: DatasetIndex, *, whole: bool = False) -> Iterator[NDArray[np.generic]]:
    """What a file takes, picture after picture: uint8 (H, W, 3), or float32 (1, 3, h, w) of a bare network.

    Args:
        subject: what is exported.
        index: the pictures.
        whole: the file takes pictures.
    """
    chosen = np.unique(np.linspace(0, len(index) - 1, min(PICTURES, len(index))).round().astype(int))
    for image in chosen.tolist():
        try:
            picture = read_image(index.path(image), rule=index.pixels)
        except UndecodableImage:
            continue  # the check of the data names it
        if whole:
            yield picture
        else:
            imgsz = subject.imgsz if subject.size_hw is None else max(subject.size_hw)
            canvas, _ = fit_picture(picture, imgsz, subject.model.stride, subject.size_hw)
            yield np.ascontiguousarray(network_input(canvas, torch.device("cpu")).numpy())


def quantized_weights(subject: Subject) -> frozenset[str]:
    """Names, as in the graph, of the weights of all convolutions but the head's last ones, which give the predictions.

    Those write logits of boxes and of classes, whose ranges have nothing in common, and decoding follows: in 8 bits the
    scores would vanish.
    """
    return frozenset(
        f"model.{name}.conv.weight" for name, module in subject.model.named_modules() if isinstance(module, Conv)
    )
