"""Where the label of an object is: file and line, or the annotation's id in a COCO file.

The index knows objects, not lines: the labels of the images that are asked for are read once more, as the scan reads
them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tessera.data.source.listing import Listing, list_images
from tessera.data.source.scan import ClassNames, pixels, read_objects
from tessera.utils.types import CocoId, DatasetIndex, DatasetSpec


class ImageLabels(NamedTuple):
    """The labels of an image.

    Attributes:
        file: text, XML or JSON file, whether it exists or not.
        lines: of each object of the index, from 1; () where the file has changed since, and in a COCO file.
        ids: of the annotation of each object, None without one; () where it does not come from a COCO file.
    """

    file: str
    lines: Sequence[int] = ()
    ids: Sequence[CocoId | None] = ()

    def place(self, row: int) -> tuple[int | None, CocoId | None]:
        """Line and id of an object; None for what is not known, and of row -1."""
        line = self.lines[row] if 0 <= row < len(self.lines) else None
        return line, self.ids[row] if 0 <= row < len(self.ids) else None


def label_lines(
    spec: DatasetSpec, index: DatasetIndex, images: Iterable[int], *, single_cls: bool = False
) -> dict[int, ImageLabels]:
    """The labels of some images.

    Args:
        spec: the dataset.
        index: of its split.
        images: indices.
        single_cls: as in `build_index`.

    Raises:
        UserError: the images are not there any more.
    """
    listing, names = list_images(spec, index.split), ClassNames.of(spec, single_cls)
    found = {}
    for image in images:
        path = str(index.path(image))
        place = bisect_left(listing.images, path)
        if place < len(listing.images) and listing.images[place] == path:
            found[image] = _labels_of(listing, place, names, index, image)
    return found


def _labels_of(listing: Listing, place: int, names: ClassNames, index: DatasetIndex, image: int) -> ImageLabels:
    """The labels of image `image` of the index, `place` of the listing."""
    height, width = index.sizes_hw[image].tolist()
    parsed = read_objects(listing, place, (height, width), names)
    classes, boxes_xyxy = index.labels(image)
    boxes = pixels(np.array(parsed.boxes).reshape(-1, 4), np.tile(index.sizes_hw[image], (len(parsed.classes), 1)))
    is_same = len(boxes) == len(classes) and np.array_equal(boxes, boxes_xyxy)
    lines = parsed.lines if is_same else ()
    if place not in listing.coco:
        return ImageLabels(listing.labels[place], lines)
    file, coco_image, _ = listing.coco[place]
    records = dict(coco_image.annotations)
    return ImageLabels(str(file), ids=[_id(records[number]) for number in lines])


def _id(record: dict[str, Any]) -> CocoId | None:
    """An annotation's id, which COCO demands and no reader needs."""
    own = record.get("id")
    return own if isinstance(own, (int, str)) and not isinstance(own, bool) else None
