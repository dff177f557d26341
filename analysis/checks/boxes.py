"""Box checks of `--check-data`: boxes outside their image, without area, rotated, or in another format; box sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera.analysis.checks.results import DatasetCheck, SplitData, fraction_text
from tessera.data.labels.coco import category_of, is_crowd, numbers
from tessera.data.labels.label_files import UNBOUNDED, parse_any_labels
from tessera.data.source.messages import has_no_area
from tessera.utils.boxes import cxcywh_to_xyxy
from tessera.utils.text import first_of, plural

_SLACK, _SLACK_PX = 0.02, 2.0  # fraction of a side, and pixels, by which rounding may exceed the image
_MOST_SHOWN = 10.0  # largest fraction of a side in messages
_FAR = 0.05  # fraction of a side that rounding does not explain
_LEAST, _USUAL = 5, 0.25  # minimum number and fraction of boxes far outside the image that indicate corners


class UnclippedBoxes(NamedTuple):
    """Boxes of a split as written, before clipping; k boxes."""

    owners: NDArray[np.int64]  # (k,), index of each box's image in the listing
    excess: NDArray[np.float64]  # (k,), largest overshoot as a fraction of the side
    excess_px: NDArray[np.float64]  # the same in pixels
    as_corners: NDArray[np.bool_]  # (k,), third and fourth number exceed the first two, as in x1 y1 x2 y2


def check_boxes(check: DatasetCheck, part: SplitData) -> None:
    """Report boxes without area, boxes that exceed their image, and x1 y1 x2 y2 read as x y w h."""
    for place, count in zip(
        *np.unique(part.owners[has_no_area(part.scanned.boxes_xyxy)], return_counts=True), strict=True
    ):
        where = part.listing.label_location(int(place))(None)
        check.problems.append(f"{where}: {plural(int(count), 'box')} without width or height")
    rotated = [
        place for place, (_, image, _) in part.listing.coco.items() for _, row in image.annotations if _turn(row)
    ]
    if rotated:
        places = [part.listing.label_location(place)(None) for place in dict.fromkeys(rotated)]
        check.problems.append(
            f"{part.split}: {plural(len(rotated), 'rotated box')} (attributes.rotation), used without rotation: "
            f"{first_of(places, 3)}. Export polygons instead"
        )
    written = _written(part)
    corners = _corners(written)
    if corners.any():
        read = "x y width height" if part.listing.coco else "centre x, centre y, width, height"
        number = fraction_text(int(corners.sum()), len(corners), "box")
        check.errors.append(
            f"{part.split}: {number} seem to be written as x1 y1 x2 y2, expected {read}: "
            f"{_places(part, written, corners)}. Convert these labels."
        )
    beyond = (written.excess > _SLACK) & (written.excess_px > _SLACK_PX) & ~corners
    if beyond.any():
        number, most = fraction_text(int(beyond.sum()), len(beyond), "box"), float(written.excess[beyond].max())
        exceed, their = ("exceeds", "its") if beyond.sum() == 1 else ("exceed", "their")
        by = f"up to {100 * most:.0f} %" if most <= _MOST_SHOWN else f"more than {100 * _MOST_SHOWN:,.0f} %"
        check.problems.append(
            f"{part.split}: {number} {exceed} {their} image by {by} of its side: {_places(part, written, beyond)}"
        )


def _places(part: SplitData, written: UnclippedBoxes, boxes: NDArray[np.bool_]) -> str:
    places = [part.listing.label_location(place)(None) for place in np.unique(written.owners[boxes]).tolist()]
    return first_of(places, 3)


def _turn(record: Mapping[str, Any]) -> float:
    """Return the degrees by which CVAT states that a box is rotated."""
    attributes = record.get("attributes")
    rotated = numbers([attributes.get("rotation")]) if isinstance(attributes, dict) else None
    return rotated[0] % 180 if rotated else 0.0


def _corners(written: UnclippedBoxes) -> NDArray[np.bool_]:
    """Return which boxes, (k,), seem to be corners where centre and size are expected.

    Corners ascend within a row. Read as centre and size, 60 to 97 % of the boxes in files of ascending rows leave
    the image (cards, raccoon, coco128). Correct boxes hardly ever leave it far.
    """
    if not len(written.owners):
        return np.zeros(0, np.bool_)
    _, of = np.unique(written.owners, return_inverse=True)
    ordered = np.bincount(of, weights=~written.as_corners)[of] == 0  # all boxes of the file
    far = int((ordered & (written.excess > _FAR)).sum())
    return ordered if far >= max(_LEAST, _USUAL * int(ordered.sum())) else np.zeros(len(of), np.bool_)


def _written(part: SplitData) -> UnclippedBoxes:
    """Return the boxes of all usable images as written."""
    listing, scanned = part.listing, part.scanned
    is_text = np.array(
        [place not in listing.coco and not label.endswith(".xml") for place, label in enumerate(listing.labels)]
    )
    mine = is_text[part.owners]  # boxes of label files are not clipped when they are read
    boxes = scanned.boxes_xyxy[mine].astype(np.float64)
    centres, sizes = (boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]
    as_corners = np.all(sizes > centres, axis=1) & (scanned.point_counts[mine] == 0)
    rows = [(part.owners[mine], boxes, as_corners)]
    for place in part.places[~is_text[part.places]].tolist():
        own, own_ordered = _of_records(part, place)
        rows.append((np.full(len(own), place), own, own_ordered))
    places, boxes, ordered = map(np.concatenate, zip(*rows, strict=True))
    image_sizes = np.zeros((len(listing.images), 2))
    image_sizes[part.places] = scanned.sizes_hw[:, ::-1]
    sides = image_sizes[places]
    out = np.maximum(np.maximum(-boxes[:, :2], boxes[:, 2:] - sides), 0)
    excess = (out / np.maximum(sides, 1)).max(1, initial=0)
    return UnclippedBoxes(places, excess, out.max(1, initial=0), ordered)


def _of_records(part: SplitData, place: int) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return corners in pixels, (n, 4), and `as_corners`, (n,), of an image's objects in a COCO or XML file."""
    untrained = part.spec.ignore + part.spec.excluded_names
    if place not in part.listing.coco:
        fractions = np.array(parse_any_labels(part.listing.labels[place], untrained).boxes).reshape(-1, 4)
        corners = cxcywh_to_xyxy(fractions) * UNBOUNDED
        return corners, np.zeros(len(corners), np.bool_)
    _, image, categories = part.listing.coco[place]
    records = [
        numbers(record.get("bbox"))
        for _, record in image.annotations
        if not is_crowd(record) and category_of(record, categories) not in untrained
    ]
    rows = np.array([row for row in records if row is not None and len(row) == 4], np.float64).reshape(-1, 4)
    return np.hstack((rows[:, :2], rows[:, :2] + rows[:, 2:])), np.all(rows[:, 2:] > rows[:, :2], axis=1)


def box_size_summary(part: SplitData, imgsz: int) -> str:
    """Return a summary of box sizes in images with a long side of `imgsz`."""
    boxes = part.scanned.boxes_xyxy
    if not len(boxes):
        return f"{part.split}: no box"
    scale = imgsz / np.repeat(part.scanned.sizes_hw.max(1), part.scanned.counts)
    low, middle, high = np.quantile((boxes[:, 2:] - boxes[:, :2]) * scale[:, None], (0.05, 0.5, 0.95), axis=0)
    shown = [f"{width:.0f} x {height:.0f}" for width, height in (low, middle, high)]
    return f"{part.split}: boxes at {imgsz} px: 5 % are below {shown[0]}, half below {shown[1]}, 95 % below {shown[2]}"
