"""A split as the checks see it: what is listed, and what was read of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tessera.data.source.annotations.labels import ANY_CLASS, ParsedLabels, parse_labels
from tessera.data.source.annotations.voc import parse_voc
from tessera.data.source.listing import Listing
from tessera.data.source.scan import ENDLESS, NO_CLASS_LIMIT, AnyName, Scan
from tessera.utils.files import open_plain
from tessera.utils.types import DatasetSpec


def any_labels(path: str, ignore: Sequence[str] = ()) -> ParsedLabels:
    """What a label file holds whatever the classes are, and as if the image had no end: nothing is cut off.

    Empty where the file cannot be read. Boxes of VOC are fractions of ENDLESS, and there the objects of classes with a
    name in `ignore` are ignored regions.
    """
    try:
        with open_plain(path) as file:
            raw = file.read()
    except OSError:
        return ParsedLabels([], [])
    if path.endswith(".xml"):
        return parse_voc(raw, (ENDLESS, ENDLESS), AnyName(dict.fromkeys(ignore, ANY_CLASS)))
    return parse_labels(raw, NO_CLASS_LIMIT)


@dataclass(frozen=True, eq=False)
class Part:
    """One split; N images listed, n of them kept, m objects.

    Attributes:
        split: "train", "val" or "test".
        single_cls: all classes are one.
    """

    spec: DatasetSpec
    split: str
    listing: Listing
    scanned: Scan
    single_cls: bool

    @cached_property
    def places(self) -> NDArray[np.int64]:
        """The place in the listing of each image that is kept, int64 (n,)."""
        return np.flatnonzero(self.scanned.kept)

    @cached_property
    def owners(self) -> NDArray[np.int64]:
        """The place in the listing of each object's image, int64 (m,)."""
        return np.repeat(self.places, self.scanned.counts)
