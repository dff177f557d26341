"""Pictures that exports are compared on: real ones of many aspects, drawn ones where none are at hand."""

from __future__ import annotations

import logging
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera.data.source.decode import UndecodableImage, read_image
from tessera.data.source.index import build_index
from tessera.data.source.shapes import render_image
from tessera.data.source.spec import load_spec
from tessera.utils.errors import UserError
from tessera.utils.types import DatasetIndex

log = logging.getLogger(__name__)

Picture = NDArray[np.uint8]

ASPECTS = (0.4, 0.67, 0.85, 1.0, 1.25, 1.6, 2.4)  # width over height of the crops
WHOLE = 6  # pictures as they are


class Pictures(NamedTuple):
    """What exports are compared on.

    Attributes:
        pictures: uint8 (H, W, 3) RGB.
        origin: where they come from, for the report.
    """

    pictures: tuple[Picture, ...]
    origin: str


def find_index(data: str, trained_on: str, split: str = "val") -> DatasetIndex | None:
    """A split of the dataset that was asked for, or else of the one that was trained on, where it is there.

    Args:
        data: `--data`; "" where none was given.
        trained_on: as the checkpoint says; it is not downloaded.
        split: "val" or "train".

    Raises:
        UserError: of `data` alone: it is not there, or has a mistake.
    """
    if data:
        return build_index(load_spec(data), split)
    if not trained_on:
        return None
    try:
        return build_index(load_spec(trained_on, obtain=False), split)
    except UserError as error:
        log.warning(f"{error} It is what the weights were trained on; give another with --data.")
        return None


def gather(index: DatasetIndex | None, size: int) -> Pictures:
    """Pictures of at least six aspects.

    Args:
        index: whose images are taken; None = drawn shapes.
        size: long side of drawn ones, in pixels.
    """
    found = [] if index is None else _decoded(index)
    if not found:
        drawn = [render_image("val", number, size=size)[0] for number in range(WHOLE)]
        return Pictures((*drawn, *_crops(drawn)), "drawn shapes: no dataset is at hand (--data)")
    assert index is not None
    origin = f"{len(found)} pictures of {index.split}, and {len(ASPECTS)} crops of them"
    return Pictures((*found, *_crops(found)), origin)


def _decoded(index: DatasetIndex) -> list[Picture]:
    """Images spread evenly over the aspects of a split."""
    aspects = index.sizes_hw[:, 1] / index.sizes_hw[:, 0]
    order = np.argsort(aspects, kind="stable")
    chosen = order[np.unique(np.linspace(0, len(order) - 1, WHOLE).round().astype(int))]
    found = []
    for image in chosen.tolist():
        try:
            found.append(read_image(index.path(image), rule=index.pixels))
        except UndecodableImage as error:
            log.warning(f"{error} It is left out.")
    return found


def _crops(pictures: list[Picture]) -> list[Picture]:
    """The middle of a picture in each of `ASPECTS`."""
    return [_crop(pictures[number % len(pictures)], aspect) for number, aspect in enumerate(ASPECTS)]


def _crop(picture: Picture, aspect: float) -> Picture:
    height, width = picture.shape[:2]
    new_h = max(min(height, round(width / aspect)), 1)
    new_w = max(min(width, round(height * aspect)), 1)
    top, left = (height - new_h) // 2, (width - new_w) // 2
    return np.ascontiguousarray(picture[top : top + new_h, left : left + new_w])
