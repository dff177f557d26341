"""Images decoded recently, kept once a node: what one worker decodes for a mosaic serves the others.

About four samples need an image, and the workers of all the node's ranks build them. Each place of the last batches has
a slot in a file without a name; the first process that needs an image decodes it into its slot, guarded by a record
lock on the byte of its number, which the kernel releases when a process dies. An image that finds no free slot is
decoded for one use: the slots change the time that a sample takes, never the sample. Where a file holds several images
(views), the others that are near come into their slots with the one that is asked for.
"""

from __future__ import annotations

import fcntl
import logging
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
from tessera.utils.machine.resource_limits import available_memory
from tessera.utils.ranks.world import World
from tessera.utils.types import Draw

log = logging.getLogger(__name__)

_MEMORY_SHARE = 8  # of the memory that is available, slots take at most this part
_SMALL = 1 << 30  # bytes of slots for a set that is kept whole, however few of its images are near
_PAGE = mmap.PAGESIZE


class RecentImages:
    """The images near a `Draw`, decoded once for all samples that need them.

    Args:
        store: where images come from; it decodes at each call.
        slots: images to keep. With as many slots as images, each image has its own slot; with fewer, each place of the
            order has. Only slots that are used take memory.
        shared: file of another rank or process of this node, see `share`; a new one where it is None.
    """

    def __init__(self, store: ImageStore, slots: int, shared: SharedFile | None = None) -> None:
        self._store, self.slots = store, slots
        header, slot = _whole_pages(slots * 8), _slot_bytes(store)
        self._file = _new_file(header + slots * slot) if shared is None else shared.open("r+b")
        memory = mmap.mmap(self._file.fileno(), header + slots * slot)
        self._owners = np.frombuffer(memory, np.int64, slots)  # the image in each slot, + 1; 0 where there is none
        self._pixels = np.frombuffer(memory, np.uint8, slots * slot, header).reshape(slots, slot)
        self._draw: Draw | None = None
        self._held: set[int] = set()

    def size(self, index: int) -> tuple[int, int]:
        """Height and width of image `index` as loaded."""
        return self._store.size(index)

    @property
    def files(self) -> int:
        """As ImageStore."""
        return self._store.files

    def of_file(self, index: int) -> range:
        """As ImageStore."""
        return self._store.of_file(index)

    def share(self) -> SharedFile:
        """The slots, for another process of this user and node."""
        return SharedFile.of(self._file)

    @contextmanager
    def near(self, draw: Draw) -> Iterator[None]:
        """Inside, the neighbours of `draw` are loaded through the slots, and what was loaded does not change."""
        self._draw = draw
        try:
            yield
        finally:
            self._draw = None
            self._held.clear()
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    def load(self, index: int) -> NDArray[np.uint8]:
        """Image `index`, as ImageStore.load; read-only, and only until the end of `near`, where it is in a slot."""
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
        """The slot of an image; None outside of a draw, and where it is not near and not all are kept."""
        if self._draw is None:
            return None
        if len(self._store) == self.slots:  # each image has its own
            return index
        place = self._draw.neighbours.get(index)
        return None if place is None else place % self.slots

    def _hold(self, slot: int, index: int) -> None:
        """Lock `slot` for reading if image `index` is there, or can be decoded into it now."""
        if self._owners[slot] != index + 1:
            self._fill(slot, index)
        # Waits only while another process decodes into the slot; that one holds it exclusively and waits for nobody.
        fcntl.lockf(self._file, fcntl.LOCK_SH, 1, slot)
        if self._owners[slot] == index + 1:
            self._held.add(slot)
        else:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, slot)

    def _fill(self, slot: int, index: int) -> None:
        """Decode image `index` into `slot`, unless another process reads or writes it now; and others of its file."""
        if not self._lock(slot) or self._owners[slot] == index + 1:
            return
        others = {}  # of the same file, that may be kept and are not there: their slots
        for other in self._store.of_file(index):
            place = self._slot(other)
            if place is not None and place not in (slot, *self._held) and self._owners[place] != other + 1:
                others[other] = place
        images = self._store.load_together([index, *others])
        self._owners[slot] = 0  # if this process ends in between, there is no image here
        try:
            self._image(slot, index)[:] = next(images)
        except UndecodableImage:  # an exclusive lock must not be held while this process waits for other slots
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, slot)
            raise
        self._owners[slot] = index + 1
        for (other, place), image in zip(others.items(), images, strict=True):
            if self._lock(place):
                self._owners[place] = 0
                self._image(place, other)[:] = image
                self._owners[place] = other + 1
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, place)

    def _lock(self, slot: int) -> bool:
        """Lock `slot` for writing; False where another process reads or writes it."""
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


def share_recent(
    store: ImageStore, world: World, *, batch_size: int, share: int, batches: int
) -> RecentImages | ImageStore:
    """Keep recent images of `store` once a node; the store itself where that is impossible. All ranks call it together.

    A small set is kept whole, for the run. Of a larger one the last `batches` are kept, of whose `batch_size` images
    this node decodes `share` at most: a node of many uses the slots of its own share only.
    """
    most = min(batches * share, _room(store))
    is_small = len(store) <= max(most, min(_SMALL // _slot_bytes(store), _room(store)))
    return _shared(store, world, len(store) if is_small else most // share * batch_size)


def share_small(store: ImageStore, world: World) -> RecentImages | ImageStore:
    """Keep all images of a small set once a node, as they are decoded; of a larger one none. As `share_recent`."""
    most = min(_SMALL // _slot_bytes(store), _room(store))
    return _shared(store, world, len(store) if len(store) <= most else 0)


def _room(store: ImageStore) -> int:
    """Slots that there is memory for."""
    memory = available_memory() if hasattr(os, "memfd_create") else 0  # not Linux
    return (memory or 0) // _MEMORY_SHARE // _slot_bytes(store)


def _shared(store: ImageStore, world: World, slots: int) -> RecentImages | ImageStore:
    """As many slots as the node's first rank says; a rank that cannot open that one's has its own."""
    own = _open(store, slots, None) if world.local_rank == 0 else None
    slots, shared = world.node_first((slots, None if own is None else own.share()))
    if own is None and shared is not None:
        own = _open(store, slots, shared) or _open(store, slots, None)
    return own or store


def _open(store: ImageStore, slots: int, shared: SharedFile | None) -> RecentImages | None:
    if slots == 0:
        return None
    try:
        return RecentImages(store, slots, shared)
    except OSError as error:  # another container's, a limit on address space or files
        what = "make room for" if shared is None else "share the node's"
        log.warning(f"Cannot {what} decoded images ({error}): loading is slower. --cache disk decodes nothing.")
        return None


def _new_file(size: int) -> IO[bytes]:
    """A file in memory, whatever the size of /dev/shm, whose pages come as they are written to."""
    file: IO[bytes] = os.fdopen(os.memfd_create("tessera-recent"), "r+b", buffering=0)
    file.truncate(size)
    return file


def _slot_bytes(store: ImageStore) -> int:
    """Memory of a slot: the largest image there may be, in whole pages."""
    return _whole_pages(store.imgsz**2 * 3)


def _whole_pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
