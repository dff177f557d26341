"""Images of a dataset at training size: decoded when asked for, or held once a node in one memory-mapped file.

The file is the resized pixels of all images, end to end, and a byte for each that says whether it decodes; where each
begins follows from the sizes in the index, so nothing but bytes is stored. Its pages are shared by every rank and
worker of the node: memory does not grow with them.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import IO, Any, Literal

import numpy as np
from tqdm import tqdm

from tessera.data.feed.image_sizes import loaded_sizes, resized
from tessera.data.feed.tiles import ViewIndex
from tessera.data.source.decode import REDUCTIONS, UndecodableImage, read_image
from tessera.utils.bit_depth import Pixels
from tessera.utils.files import SharedFile
from tessera.utils.machine.resource_limits import usable_cpus
from tessera.utils.text import gib
from tessera.utils.types import DatasetIndex, Draw

Interpolation = Literal["linear", "area"]

FORMAT = 4  # of the pixels in a cache file: raise it when loading gives other pixels
# A JPEG that is far larger than wanted is decoded at a fraction of its size: the decoder skips what would be
# thrown away. A factor of 1.5 or more is left to the resize, so that what comes out hardly changes.
_REDUCED_ABOVE = 1.5  # times the wanted size, after the reduction


class ImageStore:
    """The images of an index, long side `imgsz`; may be pickled, forked and shared by worker processes.

    Args:
        index: the images.
        imgsz: long side in pixels.
        interpolation: "area" averages pixels when shrinking (validation), "linear" does not; both enlarge linearly.
        cache: open file of all resized images, see `open_images`; None decodes at each call. The store owns it.
    """

    noun = "images"  # what its images are called

    def __init__(
        self, index: DatasetIndex, imgsz: int, interpolation: Interpolation, cache: IO[bytes] | None = None
    ) -> None:
        self.index, self.imgsz, self.interpolation = index, imgsz, interpolation
        self._sizes_hw = loaded_sizes(index.sizes_hw, imgsz)
        self._offsets = np.concatenate(([0], np.cumsum(self._sizes_hw.prod(axis=1) * 3)))
        self._cache = cache
        self._pixels = None if cache is None else self._map(cache)

    def __len__(self) -> int:
        return len(self.index)

    @property
    def nbytes(self) -> int:
        """Size of all resized images together with the marks of those that decode, in bytes."""
        return int(self._offsets[-1]) + len(self)

    @property
    def is_cached(self) -> bool:
        """Whether `load` decodes nothing."""
        return self._pixels is not None

    @property
    def files(self) -> int:
        """How many files the images come from."""
        return len(self)

    def of_file(self, index: int) -> range:
        """The images of the file that image `index` comes from."""
        return range(index, index + 1)

    def size(self, index: int) -> tuple[int, int]:
        """Height and width of image `index` as loaded."""
        height, width = self._sizes_hw[index].tolist()
        return height, width

    def load(self, index: int) -> Pixels:
        """Image `index`, uint8 (h, w, 3) RGB with max(h, w) = imgsz. Read-only where it comes from a cache.

        Raises:
            UserError: the file cannot be read.
            UndecodableImage: the file does not decode, or has another size than when it was indexed.
        """
        if self._pixels is None:
            return next(self._decode([index]))
        if not self._pixels[self._offsets[-1] + index]:
            raise UndecodableImage(
                f"{self.index.path(index)}: did not decode when the cache was built. Replace the file or remove it."
            )
        height, width = self.size(index)
        return self._pixels[self._offsets[index] : self._offsets[index + 1]].reshape(height, width, 3)

    def load_together(self, images: Sequence[int]) -> Iterator[Pixels]:
        """Images of one file, as `load` gives them: it is decoded once for all of them."""
        return map(self.load, images)

    def near(self, draw: Draw) -> AbstractContextManager[None]:
        """Images are the caller's own, or never change."""
        return nullcontext()

    def write_cache(self, file: IO[bytes], show_progress: bool) -> None:
        """Decode all images in parallel into `file`, from its start; those that do not decode are marked."""

        def write(images: range) -> int:
            with suppress(UndecodableImage):  # `load` says so when the image is asked for
                for index, pixels in zip(images, self._decode(images), strict=True):
                    put(pixels.data.cast("B"), int(self._offsets[index]))
                    put(memoryview(b"\1"), int(self._offsets[-1]) + index)
            return len(images)

        def put(pixels: memoryview, offset: int) -> None:
            # Positioned writes need no lock, and a full file system is an OSError; in a memory map it is a bus error.
            while pixels:
                written = os.pwrite(file.fileno(), pixels, offset)
                pixels, offset = pixels[written:], offset + written

        file.truncate(self.nbytes)  # as long as promised, whatever the last images are
        title = f"Caching {self.index.split} {self.noun} ({gib(self.nbytes)})"
        with (
            ThreadPoolExecutor(min(usable_cpus(), 32)) as pool,
            tqdm(total=len(self), desc=title, unit="image", disable=not show_progress) as bar,
        ):
            try:
                for written in pool.map(write, self._all_files()):
                    bar.update(written)
            except BaseException:
                pool.shutdown(cancel_futures=True)  # do not decode the rest of the dataset before reporting
                raise

    def close(self) -> None:
        """Close the cache; the store cannot load from it afterwards."""
        if self._cache is not None:
            self._cache.close()
            self._cache, self._pixels = None, np.empty(0, np.uint8)

    def __enter__(self) -> ImageStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """A new process opens the cache file again, through this one's descriptor where the file has no name."""
        return {
            "index": self.index,
            "imgsz": self.imgsz,
            "interpolation": self.interpolation,
            "cache": None if self._cache is None else SharedFile.of(self._cache),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        cache: SharedFile | None = state.pop("cache")
        self.__init__(**state, cache=None if cache is None else cache.open("rb"))  # type: ignore[misc]

    def _all_files(self) -> Iterator[range]:
        start = 0
        while start < len(self):
            yield (images := self.of_file(start))
            start = images.stop

    def _decode(self, images: Sequence[int]) -> Iterator[Pixels]:
        """Images of one file, decoded and resized."""
        whole = self._decode_file(images[0])
        for index in images:
            part = self._part(whole, index)
            area = self.interpolation == "area" and max(part.shape) > self.imgsz
            yield resized(part, self.size(index), area=area)

    def _decode_file(self, index: int) -> Pixels:
        path = self.index.path(index)
        expected_hw = self._file_size(index)
        reduction = self._reduction(max(expected_hw))
        image = read_image(path, reduction, self.index.pixels)
        if image.shape[:2] not in (expected_hw, tuple(-(-side // reduction) for side in expected_hw)):
            raise UndecodableImage(
                f"{path}: found {image.shape[0]}x{image.shape[1]} pixels, expected {expected_hw[0]}x{expected_hw[1]} "
                "as when the dataset was scanned. The file changed since; start again, and it is scanned anew."
            )
        return image

    def _file_size(self, index: int) -> tuple[int, int]:
        """Height and width of the file that image `index` comes from."""
        height, width = self.index.sizes_hw[index].tolist()
        return height, width

    def _part(self, whole: Pixels, index: int) -> Pixels:
        """What image `index` shows of its decoded file."""
        return whole

    def _reduction(self, side: int) -> int:
        """How far the decoder may reduce an image whose long side is `side`; 1 where every pixel counts."""
        if self.interpolation == "area":
            return 1
        return next((by for by in REDUCTIONS if side >= _REDUCED_ABOVE * by * self.imgsz), 1)

    def _map(self, cache: IO[bytes]) -> Pixels:
        found = os.fstat(cache.fileno()).st_size
        assert found == self.nbytes, (found, self.nbytes)
        return np.frombuffer(mmap.mmap(cache.fileno(), self.nbytes, access=mmap.ACCESS_READ), np.uint8)


class ViewStore(ImageStore):
    """Views of pictures, cut from the pixels of the whole file."""

    index: ViewIndex
    noun = "views"

    @property
    def files(self) -> int:
        """As ImageStore."""
        return len(self.index.whole_images)

    def of_file(self, index: int) -> range:
        """As ImageStore."""
        return self.index.of_picture(index)

    def load_together(self, images: Sequence[int]) -> Iterator[Pixels]:
        """As ImageStore; of one without a cache."""
        return self._decode(images)

    def _file_size(self, index: int) -> tuple[int, int]:
        height, width = self.index.whole_images.sizes_hw[self.index.owners[index]].tolist()
        return height, width

    def _part(self, whole: Pixels, index: int) -> Pixels:
        left, top, right, bottom = self.index.windows[index].tolist()
        return np.ascontiguousarray(whole[top:bottom, left:right])

    def _reduction(self, side: int) -> int:
        """As ImageStore; of a window every pixel counts."""
        return 1


def image_store(
    index: DatasetIndex, imgsz: int, interpolation: Interpolation, cache: IO[bytes] | None = None
) -> ImageStore:
    """The images of an index, or its views; arguments as of ImageStore."""
    kind = ViewStore if isinstance(index, ViewIndex) else ImageStore
    return kind(index, imgsz, interpolation, cache)
