"""Opening of the image stores of a run, and building of the image cache of each node (`--cache ram` or `disk`)."""

from __future__ import annotations

import errno
import logging
import shutil
import tempfile
from pathlib import Path
from typing import IO

from tessera.data.feed.image_store import FORMAT, ImageStore, Interpolation, image_store
from tessera.utils.config import CacheMode
from tessera.utils.environment import cache_dir
from tessera.utils.errors import UserError
from tessera.utils.files import SHARED_MEMORY, SharedFile, atomic_write, remove_leftovers
from tessera.utils.image_size import ImageSize
from tessera.utils.machine.host import available_memory
from tessera.utils.ranks.world import World, torch_distributed_zero_first
from tessera.utils.text import gib
from tessera.utils.types import DatasetIndex

log = logging.getLogger(__name__)


def open_images(
    index: DatasetIndex,
    imgsz: ImageSize,
    cache: CacheMode,
    interpolation: Interpolation,
    world: World,
    memory: ShmBudget | None = None,
) -> ImageStore:
    """Open the images of `index`; with a cache, the first rank of each node builds it. All ranks call this together.

    "ram" is an unnamed file in /dev/shm, which vanishes with the last process that holds it. "disk" is a file in
    TESSERA_CACHE that later runs reuse. `memory` is the node's shared-memory budget; None creates one.

    Raises:
        UserError: the file of an image cannot be read, or there is too little memory or disk space.
    """
    store = image_store(index, imgsz, interpolation)
    if cache == "none":
        return store
    memory = memory or ShmBudget(world)
    file: IO[bytes] | None = None
    with torch_distributed_zero_first(world.local_rank, world):
        if world.local_rank == 0:
            file = (
                _build_in_memory(store, memory, world.is_main)
                if cache == "ram"
                else _open_on_disk(store, world.is_main)
            )
    if cache == "ram":
        memory.reserved += store.nbytes
    shared = world.node_first(None if file is None else SharedFile.of(file))
    assert shared is not None
    where = f"memory ({memory.folder}), until the run ends" if cache == "ram" else f"{shared.path}, for later runs too"
    log.info(f"--cache {cache}: {len(store):,} {index.split} {store.noun} take {gib(store.nbytes)} in {where}.")
    try:
        opened = file or shared.open("rb")
    except OSError as error:
        raise UserError(
            f"--cache: cannot open {shared.path}, the cache built by the node's first rank ({error.strerror}). Run all "
            "ranks of a node as one user in one container, or omit --cache."
        ) from error
    return image_store(index, imgsz, interpolation, opened)


def _build_in_memory(store: ImageStore, memory: ShmBudget, show_progress: bool) -> IO[bytes]:
    """Write the cache to an unnamed file in shared memory."""
    folder = memory.folder
    if not memory.exists:
        raise UserError(f"--cache ram: {folder} does not exist on this system. Use --cache disk.")
    available = available_memory()
    space = memory.available if available is None else min(memory.available, available)
    others = f" beside the {gib(memory.reserved)} of loader workers and other caches" if memory.reserved else ""
    remedy = f"Use --cache disk or a smaller --imgsz, or give the container more memory and {folder} (--shm-size)."
    _require_space(store, "ram", space, f"{folder} (memory) has {gib(space)} free{others}", remedy)
    # An unnamed file cannot be left behind, however this process ends.
    try:
        file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - lives as long as the store
    except OSError as error:
        raise UserError(f"--cache ram: cannot write to {folder} ({error.strerror}). Use --cache disk.") from error
    try:
        _fill(store, "ram", file, folder, show_progress, remedy)
    except BaseException:
        file.close()
        raise
    return file


def _open_on_disk(store: ImageStore, show_progress: bool) -> IO[bytes]:
    """Open the cache file of these images and settings, and write it if it does not exist."""
    folder = cache_dir() / "images"
    rule = f"-{store.index.pixels}" if store.index.pixels else ""
    path = folder / f"{store.index.digest[:32]}-{store.imgsz}-{store.interpolation}{rule}-v{FORMAT}.bin"
    if not (path.is_file() and path.stat().st_size == store.nbytes):
        remedy = "Free some space, or set TESSERA_CACHE to a folder on a larger disk."
        try:
            folder.mkdir(parents=True, exist_ok=True)
            remove_leftovers(folder)
            space = shutil.disk_usage(folder).free
            _require_space(store, "disk", space, f"{folder} has {gib(space)} free", remedy)
            with atomic_write(path) as file:
                _fill(store, "disk", file, folder, show_progress, remedy)
        except OSError as error:
            raise UserError(
                f"--cache disk: cannot write {path} ({error.strerror}). Set TESSERA_CACHE to a writable folder."
            ) from error
    return path.open("rb")


def _require_space(store: ImageStore, mode: CacheMode, space: int, state: str, remedy: str) -> None:
    if store.nbytes > space:
        raise UserError(
            f"--cache {mode}: the {len(store)} {store.index.split} {store.noun} take {gib(store.nbytes)} at "
            f"{store.imgsz} pixels, but {state}. {remedy}"
        )


def _fill(store: ImageStore, mode: CacheMode, file: IO[bytes], folder: Path, show_progress: bool, remedy: str) -> None:
    """Write the cache; a full disk gives the same message as too little space at the start."""
    try:
        store.write_cache(file, show_progress)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(
            f"--cache {mode}: {folder} filled up while writing {gib(store.nbytes)} of {store.index.split} "
            f"{store.noun}. {remedy}"
        ) from error


class ShmBudget:
    """The budget of one run; all ranks open it together, and make the same reservations."""

    def __init__(self, world: World) -> None:
        self.folder = SHARED_MEMORY
        self.reserved = 0  # bytes reserved so far on this node
        self._world = world
        # Measured before anything is used: reservations in use reduce the free space.
        self._free_at_start = world.node_first(self._free())

    @property
    def exists(self) -> bool:
        """Whether this system has /dev/shm."""
        return self.folder.is_dir()

    @property
    def available(self) -> int:
        """Bytes of this node that can still be reserved."""
        return max(min(self._free_at_start - self.reserved, self._free()), 0)

    @property
    def available_per_rank(self) -> int:
        """Equal part of `available` for each rank of the node."""
        return self.available // self._world.local_size

    def reserve_for_ranks(self, size: int) -> None:
        """Reserve `size` bytes for this rank, and what the node's other ranks request; all ranks call this together."""
        self.reserved += sum(self._world.node_gather(size))

    def _free(self) -> int:
        return shutil.disk_usage(self.folder).free if self.folder.is_dir() else 0
