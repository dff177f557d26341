"""A split as the checks see it: what is listed, and what was read of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tessera.data.source.listing import Listing
from tessera.data.source.scan import Scan
from tessera.utils.types import DatasetSpec


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
