"""Images of a dataset at training size: decoded on request, or read from the node's memory-mapped cache.

A cache file holds the resized pixels of all images, concatenated, then a byte for each image that says whether it
decodes. Offsets follow from the sizes in the index. All ranks and workers of the node share its pages.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import IO, Any, Literal

import numpy as np
from tqdm import tqdm

from tessera.data.feed.image_sizes import fit_ratios, resized, resized_sizes
from tessera.data.feed.tiles import TileIndex
from tessera.data.source.decode import REDUCTIONS, UndecodableImage, read_image
from tessera.utils.bit_depth import Pixels
from tessera.utils.files import SharedFile
from tessera.utils.image_size import ImageSize
from tessera.utils.machine.host import usable_cpus
from tessera.utils.text import gib
from tessera.utils.types import DatasetIndex, Draw

log = logging.getLogger(__name__)

Interpolation = Literal["linear", "area"]

FORMAT = 4  # of cache files; increment it when loading yields other pixels
# A JPEG far larger than needed is decoded at a fraction of its size. At least this factor is left to the resize, so
# that the result hardly changes.
_REDUCED_ABOVE = 1.5


class ImageStore(AbstractContextManager["ImageStore"]):
    """Images of an index at the size `imgsz`; picklable, and safe to fork and share between worker processes.

    `interpolation` "area" averages pixels when shrinking (validation), "linear" does not; both enlarge linearly. The
    store owns `cache`, an open file of all resized images, see `open_images`; without, it decodes at each call.
    """

    noun = "images"  # in messages

    def __init__(
        self, index: DatasetIndex, imgsz: ImageSize, interpolation: Interpolation, cache: IO[bytes] | None = None
    ) -> None:
        self.index, self.imgsz, self.interpolation = index, imgsz, interpolation
        self._sizes_hw = resized_sizes(index.sizes_hw, imgsz)
        self._offsets = np.concatenate(([0], np.cumsum(self._sizes_hw.prod(axis=1) * 3)))
        self._cache = cache
        self._pixels: Pixels | None = None
        if cache is not None and not self._is_cut():
            self._pixels = np.frombuffer(mmap.mmap(cache.fileno(), self.nbytes, access=mmap.ACCESS_READ), np.uint8)

    def __len__(self) -> int:
        return len(self.index)

    @property
    def nbytes(self) -> int:
        """Size of a cache of all images, in bytes."""
        return int(self._offsets[-1]) + len(self)

    @property
    def is_cached(self) -> bool:
        """Whether `load` reads from a cache."""
        return self._cache is not None

    @property
    def files(self) -> int:
        """Number of files that the images come from."""
        return len(self)

    def of_file(self, index: int) -> range:
        """Return the images of the file that image `index` comes from."""
        return range(index, index + 1)

    def size(self, index: int) -> tuple[int, int]:
        """Return height and width of image `index` as loaded."""
        height, width = self._sizes_hw[index].tolist()
        return height, width

    def load(self, index: int) -> Pixels:
        """Return image `index`, uint8 (*size(index), 3) RGB; read-only if it comes from a cache.

        Raises:
            UserError: the file cannot be read.
            UndecodableImage: the file does not decode, or its size changed since it was indexed.
        """
        if self._cache and self._pixels is not None and self._is_cut():  # reading would be a bus error
            self._pixels = None
            log.warning(f"{self._cache.name}: cut while it was in use: images are decoded from their files instead.")
        if self._pixels is None:
            return next(self._decode([index]))
        if not self._pixels[self._offsets[-1] + index]:
            raise UndecodableImage(
                f"{self.index.path(index)}: did not decode when the cache was built. Replace the file or remove it."
            )
        height, width = self.size(index)
        return self._pixels[self._offsets[index] : self._offsets[index + 1]].reshape(height, width, 3)

    def load_together(self, images: Sequence[int]) -> Iterator[Pixels]:
        """Yield images of one file, as `load` returns them; without a cache, the file is decoded once."""
        return map(self.load, images)

    def near(self, draw: Draw) -> AbstractContextManager[None]:
        """Do nothing: images belong to the caller, or never change."""
        return nullcontext()

    def write_cache(self, file: IO[bytes], show_progress: bool) -> None:
        """Decode all images in parallel into `file`; those that do not decode are marked."""

        def write(images: range) -> int:
            with suppress(UndecodableImage):  # `load` raises it
                for index, pixels in zip(images, self._decode(images), strict=True):
                    put(pixels.data.cast("B"), int(self._offsets[index]))
                    put(memoryview(b"\1"), int(self._offsets[-1]) + index)
            return len(images)

        def put(pixels: memoryview, offset: int) -> None:
            # Positioned writes need no lock. On a full disk they raise OSError; a memory map would cause a bus error.
            while pixels:
                written = os.pwrite(file.fileno(), pixels, offset)
                pixels, offset = pixels[written:], offset + written

        file.truncate(self.nbytes)  # full length, even if the last images do not decode
        title = f"Caching {self.index.split} {self.noun} ({gib(self.nbytes)})"
        with (
            ThreadPoolExecutor(min(usable_cpus(), 32)) as pool,
            tqdm(total=len(self), desc=title, unit="image", disable=not show_progress or None) as bar,
        ):
            try:
                for written in pool.map(write, self._all_files()):
                    bar.update(written)
            except BaseException:
                pool.shutdown(cancel_futures=True)  # do not decode the rest before raising
                raise

    def close(self) -> None:
        """Close the cache, after which the store cannot load from it."""
        if self._cache is not None:
            self._cache.close()
            self._cache, self._pixels = None, np.empty(0, np.uint8)

    def _is_cut(self) -> bool:
        return self._cache is not None and os.fstat(self._cache.fileno()).st_size != self.nbytes

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """Refer to the cache file, through this process's descriptor if the file has no name."""
        return {
            "index": self.index,
            "imgsz": self.imgsz,
            "interpolation": self.interpolation,
            "cache": None if self._cache is None else SharedFile.of(self._cache),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        cache: SharedFile | None = state.pop("cache")
        file: IO[bytes] | None = None
        with suppress(OSError):  # deleted
            file = None if cache is None else cache.open("rb")
        self.__init__(**state, cache=file)  # type: ignore[misc]

    def _all_files(self) -> Iterator[range]:
        start = 0
        while start < len(self):
            yield (images := self.of_file(start))
            start = images.stop

    def _decode(self, images: Sequence[int]) -> Iterator[Pixels]:
        """Decode one file and yield the given images of it, resized."""
        whole = self._decode_file(images[0])
        for index in images:
            part = self._part(whole, index)
            area = self.interpolation == "area" and max(part.shape[:2]) > max(self.size(index))
            yield resized(part, self.size(index), area=area)

    def _decode_file(self, index: int) -> Pixels:
        path = self.index.path(index)
        expected_hw = self._file_size(index)
        reduction = self._reduction(expected_hw)
        image = read_image(path, reduction, self.index.pixels)
        if image.shape[:2] not in (expected_hw, tuple(-(-side // reduction) for side in expected_hw)):
            raise UndecodableImage(
                f"{path}: found {image.shape[0]}x{image.shape[1]} pixels, expected {expected_hw[0]}x{expected_hw[1]} "
                "as when the dataset was indexed. The file has changed. Restart to index it again."
            )
        return image

    def _file_size(self, index: int) -> tuple[int, int]:
        height, width = self.index.sizes_hw[index].tolist()
        return height, width

    def _part(self, whole: Pixels, index: int) -> Pixels:
        """Return the pixels of image `index` in its decoded file."""
        return whole

    def _reduction(self, size_hw: tuple[int, int]) -> int:
        """Return the factor by which the decoder may shrink an image."""
        if self.interpolation == "area":
            return 1
        to, of = fit_ratios(np.array(size_hw), self.imgsz)
        return next((by for by in REDUCTIONS if of >= _REDUCED_ABOVE * by * to), 1)


class TileStore(ImageStore):
    """Tiles of images (see tiles.py), cropped from the pixels of the whole file."""

    index: TileIndex
    noun = "tiles"

    @property
    def files(self) -> int:
        """Number of files that the tiles come from."""
        return len(self.index.whole_images)

    def of_file(self, index: int) -> range:
        """Return the tiles of the image that tile `index` belongs to."""
        return self.index.tiles_of_image(index)

    def load_together(self, images: Sequence[int]) -> Iterator[Pixels]:
        """Yield tiles of one image, decoded once; for a store without a cache."""
        return self._decode(images)

    def _file_size(self, index: int) -> tuple[int, int]:
        height, width = self.index.whole_images.sizes_hw[self.index.owners[index]].tolist()
        return height, width

    def _part(self, whole: Pixels, index: int) -> Pixels:
        left, top, right, bottom = self.index.bounds[index].tolist()
        return np.ascontiguousarray(whole[top:bottom, left:right])

    def _reduction(self, size_hw: tuple[int, int]) -> int:
        """Return 1: a tile may need every pixel."""
        return 1


def image_store(
    index: DatasetIndex, imgsz: ImageSize, interpolation: Interpolation, cache: IO[bytes] | None = None
) -> ImageStore:
    """Return the store of an index, or of its tiles; arguments as of ImageStore."""
    kind = TileStore if isinstance(index, TileIndex) else ImageStore
    return kind(index, imgsz, interpolation, cache)
