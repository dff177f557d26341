"""A store that counts."""

from __future__ import annotations

import multiprocessing
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera.data.feed.image_store import ImageStore


class CountedStore(ImageStore):
    """Counts the images that this process and those forked from it decode."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._decoded = multiprocessing.get_context("fork").Value("q", 0)

    @property
    def decoded(self) -> int:
        """How many so far."""
        return self._decoded.value

    def load(self, index: int) -> NDArray[np.uint8]:
        with self._decoded.get_lock():
            self._decoded.value += 1
        return super().load(index)
