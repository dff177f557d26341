"""label_next.html: the pictures to label next, with labels to begin with, as one page that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera.utils.pixels import PixelRule
from tessera.utils.report.albums.thumbnails import SIDE, Thumbnails
from tessera.utils.report.page.classes import MOST_ROWS
from tessera.utils.report.page.facts import readable
from tessera.utils.report.page.shell import own_file, rendered

MOST_PICTURES = 200
_MOST_MARKS = 40  # boxes of a picture


class Queued(NamedTuple):
    """A picture to label.

    Attributes:
        path: of it.
        score: that it was chosen by.
        says: why, in words.
        boxes_xyxy: float32 (n, 4), labels to begin with, in pixels of the picture.
        size_hw: of the picture.
    """

    path: str
    score: float
    says: str
    boxes_xyxy: NDArray[np.float32]
    size_hw: tuple[int, int]


class _Shown(NamedTuple):
    name: str
    score: str
    says: str
    uri: str
    width: int
    height: int
    marks: list[tuple[float, float, float, float]]


def queue_page(
    queued: Sequence[Queued],
    *,
    weights: str,
    pictures: int,
    class_weights: Sequence[tuple[str, float]],
    rule: PixelRule | None,
) -> str:
    """The page: the same text for the same choice.

    Args:
        queued: the pictures that are chosen, the best first.
        weights: of the model, as they were given.
        pictures: how many there were to choose from.
        class_weights: what doubts of each class count, by its name.
        rule: for levels of more than 8 bits.
    """
    copies = Thumbnails(rule)
    return rendered(
        own_file(__package__, "label_next.html"),
        title="What to label next",
        weights=readable(weights, 200),
        chosen=len(queued),
        pictures=pictures,
        labels=sum(len(one.boxes_xyxy) for one in queued),
        shown=[_shown(one, copies) for one in queued[:MOST_PICTURES]],
        weights_of_classes=[(readable(name), f"{weight:.2f}") for name, weight in class_weights[:MOST_ROWS]],
    )


def _shown(one: Queued, copies: Thumbnails) -> _Shown:
    height, width = one.size_hw
    scale = SIDE / max(width, height)
    corners = one.boxes_xyxy[:_MOST_MARKS].astype(np.float64) * scale
    marks = [(round(x1, 1), round(y1, 1), round(x2 - x1, 1), round(y2 - y1, 1)) for x1, y1, x2, y2 in corners.tolist()]
    size = max(round(width * scale), 1), max(round(height * scale), 1)
    return _Shown(
        readable(one.path, 200), f"{one.score:.3f}", readable(one.says, 300), copies.of(one.path), *size, marks
    )
