"""Images for the verification of exports: of the dataset, or synthetic where there is none."""

from __future__ import annotations

import logging

import numpy as np

from tessera.data.source.decode import UndecodableImage, read_image
from tessera.data.source.synthetic_shapes import render_image
from tessera.utils.bit_depth import Pixels
from tessera.utils.text import plural
from tessera.utils.types import DatasetIndex

log = logging.getLogger(__name__)

ASPECTS = (0.4, 0.67, 0.85, 1.0, 1.25, 1.6, 2.4)  # width over height of the crops
WHOLE = 6  # images that are not cropped


def sample_images(index: DatasetIndex | None, size: int) -> tuple[tuple[Pixels, ...], str]:
    """Return images of at least six aspect ratios, uint8 (H, W, 3) RGB, and a description of their origin.

    They are spread evenly over the aspect ratios of `index`; None = synthetic shapes with a long side of `size` pixels.
    """
    found = [] if index is None else _decoded(index)
    if index is not None and found:
        origin = f"{plural(len(found), 'image')} of {index.split} and {len(ASPECTS)} crops of them"
    else:
        found = [render_image("val", number, size=size)[0] for number in range(WHOLE)]
        origin = "synthetic shapes, as no dataset is available (--data)"
    crops = (_crop(found[number % len(found)], aspect) for number, aspect in enumerate(ASPECTS))
    return (*found, *crops), origin


def _decoded(index: DatasetIndex) -> list[Pixels]:
    order = np.argsort(index.sizes_hw[:, 1] / index.sizes_hw[:, 0], kind="stable")
    chosen = order[np.unique(np.linspace(0, len(order) - 1, WHOLE).round().astype(int))]
    found = []
    for image in chosen.tolist():
        try:
            found.append(read_image(index.path(image), rule=index.pixels))
        except UndecodableImage as error:
            log.warning(f"{error} It is skipped.")
    return found


def _crop(image: Pixels, aspect: float) -> Pixels:
    height, width = image.shape[:2]
    new_h = max(min(height, round(width / aspect)), 1)
    new_w = max(min(width, round(height * aspect)), 1)
    top, left = (height - new_h) // 2, (width - new_w) // 2
    return np.ascontiguousarray(image[top : top + new_h, left : left + new_w])
