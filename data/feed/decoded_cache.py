"""Cache of recently decoded images, shared by all workers and ranks of a node.

A mosaic loads four images, so about four samples need each image. The images of the last batches have slots in an
unnamed memory file. The first process that needs an image decodes it into its slot, under a record lock on the byte of
the slot's number; the kernel releases the lock when a process dies. An image without a free slot is decoded for one
use. Hence the cache changes loading time, never a sample. Tiles of one image are decoded into their slots together.
"""

from __future__ import annotations

import fcntl
import logging
import math
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from tessera.data.feed.image_store import ImageStore
from tessera.data.source.decode import UndecodableImage
from tessera.utils.files import SharedFile
from tessera.utils.image_size import size_hw_of
from tessera.utils.machine.host import available_memory
from tessera.utils.ranks.world import World
from tessera.utils.types import Draw

log = logging.getLogger(__name__)

_MEMORY_PARTS = 8  # the cache takes at most one such part of the available memory
_SMALL = 1 << 30  # bytes of slots up to which a dataset is cached whole
_PAGE = mmap.PAGESIZE


class DecodedCache:
    """The images near a `Draw`, decoded once for all samples that need them.

    With as many slots as images, each image has its own slot. Otherwise a slot belongs to a position of the epoch's
    order, modulo `slots`. Unused slots take no memory. `shared` is the file of another process of this node, see
    `share`; None creates one.
    """

    def __init__(self, store: ImageStore, slots: int, shared: SharedFile | None = None) -> None:
        self._store, self.slots = store, slots
        header, slot = _whole_pages(slots * 8), _slot_bytes(store)
        if shared is None:
            # A file in memory, independent of the size of /dev/shm, whose pages are allocated on the first write.
            descriptor = os.memfd_create("tessera-recent", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            self._file: IO[bytes] = os.fdopen(descriptor, "r+b", buffering=0)
            self._file.truncate(header + slots * slot)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)  # else reading it could be a bus error
        else:
            self._file = shared.open("r+b")
        memory = mmap.mmap(self._file.fileno(), header + slots * slot)
        self._owners = np.frombuffer(memory, np.int64, slots)  # image in each slot, + 1; 0 = empty
        self._pixels = np.frombuffer(memory, np.uint8, slots * slot, header).reshape(slots, slot)
        self._draw: Draw | None = None
        self._held: set[int] = set()

    def size(self, index: int) -> tuple[int, int]:
        """Return height and width of image `index` as loaded."""
        return self._store.size(index)

    @property
    def files(self) -> int:
        """Number of files that the images come from."""
        return self._store.files

    def of_file(self, index: int) -> range:
        """Return the images of the file that image `index` comes from."""
        return self._store.of_file(index)

    def share(self) -> SharedFile:
        """Return the cache's file, for another process of the same user and node."""
        return SharedFile.of(self._file)

    @contextmanager
    def near(self, draw: Draw) -> Iterator[None]:
        """Load the neighbours of `draw` through the cache; loaded images do not change until this context ends."""
        self._draw = draw
        try:
            yield
        finally:
            self._draw = None
            self._held.clear()
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    def load(self, index: int) -> NDArray[np.uint8]:
        """Return image `index`, as ImageStore.load; from the cache it is read-only, and valid until `near` ends."""
        slot = self._slot(index)
        if slot is None:
            return self._store.load(index)
        if slot not in self._held:
            self._hold(slot, index)
        if self._owners[slot] != index + 1 or slot not in self._held:
            return self._store.load(index)
        image = self._image(slot, index)
        image.flags.writeable = False
        return image

    def _slot(self, index: int) -> int | None:
        """Return the slot of an image; None outside of a draw, and for distant images of a large dataset."""
        if self._draw is None:
            return None
        if len(self._store) == self.slots:  # each image has its own
            return index
        position = self._draw.mosaic_candidates.get(index)
        return None if position is None else position % self.slots

    def _hold(self, slot: int, index: int) -> None:
        """Take a shared lock on `slot` if image `index` is in it, or can be decoded into it now."""
        if self._owners[slot] != index + 1:
            self._fill(slot, index)
        # This waits only for a process that decodes into the slot. That process never waits.
        fcntl.lockf(self._file, fcntl.LOCK_SH, 1, slot)
        if self._owners[slot] == index + 1:
            self._held.add(slot)
        else:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, slot)

    def _fill(self, slot: int, index: int) -> None:
        """Decode image `index` into `slot`, unless another process uses it; also cache near images of the same file."""
        if not self._lock(slot) or self._owners[slot] == index + 1:
            return
        other_slots = {}  # of images of the same file that may be cached and are not
        for other in self._store.of_file(index):
            other_slot = self._slot(other)
            if other_slot is None or other_slot in (slot, *self._held):
                continue
            if self._owners[other_slot] != other + 1:
                other_slots[other] = other_slot
        images = self._store.load_together([index, *other_slots])
        try:
            self._write(slot, index, images)
        except UndecodableImage:  # an exclusive lock must not be held while this process waits for other slots
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, slot)
            raise
        for other, other_slot in other_slots.items():
            if self._lock(other_slot):
                self._write(other_slot, other, images)
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, other_slot)
            else:
                next(images)

    def _write(self, slot: int, index: int, images: Iterator[NDArray[np.uint8]]) -> None:
        self._owners[slot] = 0  # if this process ends in between, the slot is empty
        self._image(slot, index)[:] = next(images)
        self._owners[slot] = index + 1

    def _lock(self, slot: int) -> bool:
        """Lock `slot` for writing; return False if another process reads or writes it."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, slot)
        except BlockingIOError:
            return False
        return True

    def _image(self, slot: int, index: int) -> NDArray[np.uint8]:
        height, width = self._store.size(index)
        return self._pixels[slot, : height * width * 3].reshape(height, width, 3)

    def __getstate__(self) -> dict[str, Any]:
        return {"store": self._store, "slots": self.slots, "shared": self.share()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def share_decoded_cache(
    store: ImageStore, world: World, *, batch_size: int = 1, node_images: int = 1, batches: int = 0
) -> DecodedCache | ImageStore:
    """Return a decoded-image cache shared by the node, or the store if impossible. All ranks call this together.

    A small dataset is cached whole, for the run. Of a larger one, the last `batches` batches of `batch_size` images are
    cached, of each of which this node decodes at most `node_images`; by default none.
    """
    most = min(batches * node_images, _affordable_slots(store))
    is_small = len(store) <= max(most, min(_SMALL // _slot_bytes(store), _affordable_slots(store)))
    return _shared(store, world, len(store) if is_small else most // node_images * batch_size)


def _affordable_slots(store: ImageStore) -> int:
    """Return the number of slots that memory allows."""
    memory = available_memory() if hasattr(os, "memfd_create") else 0  # not Linux
    return (memory or 0) // _MEMORY_PARTS // _slot_bytes(store)


def _shared(store: ImageStore, world: World, slots: int) -> DecodedCache | ImageStore:
    """Open the first rank's cache, of its number of slots; a rank that cannot open it creates its own."""
    own = _open(store, slots, None) if world.local_rank == 0 else None
    slots, shared = world.node_first((slots, None if own is None else own.share()))
    if own is None and shared is not None:
        own = _open(store, slots, shared) or _open(store, slots, None)
    return own or store


def _open(store: ImageStore, slots: int, shared: SharedFile | None) -> DecodedCache | None:
    if slots == 0:
        return None
    try:
        return DecodedCache(store, slots, shared)
    except OSError as error:  # another container, or a limit on address space or files
        what = "allocate memory for" if shared is None else "open the node's cache of"
        log.warning(f"Cannot {what} decoded images ({error}): loading is slower. Use --cache disk to decode only once.")
        return None


def _slot_bytes(store: ImageStore) -> int:
    """Return the bytes of the largest possible image, in whole pages."""
    return _whole_pages(math.prod(size_hw_of(store.imgsz)) * 3)


def _whole_pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
