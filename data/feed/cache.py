"""Images of a dataset opened for a run: decoded each time, or kept once a node in memory or on disk."""

from __future__ import annotations

import errno
import logging
import shutil
import tempfile
from pathlib import Path
from typing import IO

from tessera.data.feed.image_store import FORMAT, ImageStore, Interpolation, image_store
from tessera.data.feed.shared_memory import SharedMemory
from tessera.utils.config import CacheMode
from tessera.utils.environment import cache_dir
from tessera.utils.errors import UserError
from tessera.utils.files import SharedFile, atomic_write, remove_leftovers
from tessera.utils.machine.resource_limits import available_memory
from tessera.utils.ranks.world import World, torch_distributed_zero_first
from tessera.utils.text import gib
from tessera.utils.types import DatasetIndex

log = logging.getLogger(__name__)


def open_images(
    index: DatasetIndex,
    imgsz: int,
    cache: CacheMode,
    interpolation: Interpolation,
    world: World,
    memory: SharedMemory | None = None,
) -> ImageStore:
    """Open the images of `index`, building the node's cache where one is asked for. All ranks call it together.

    "ram" is a file without a name in /dev/shm: it is gone with the last process that holds it, however that ends.
    "disk" is a file in TESSERA_CACHE that later runs use again. The first rank of each node builds it, the others wait.
    `memory` is the node's account of shared memory; a new one where None.

    Raises:
        UserError: the file of an image cannot be read, or there is too little memory or disk.
    """
    store = image_store(index, imgsz, interpolation)
    if cache == "none":
        return store
    memory = SharedMemory(world) if memory is None else memory
    file: IO[bytes] | None = None
    with torch_distributed_zero_first(world.local_rank, world):
        if world.local_rank == 0:
            builder = _CacheBuilder(store, cache, world.is_main)
            file = builder.in_memory(memory) if cache == "ram" else builder.on_disk()
    if cache == "ram":
        memory.promise(store.nbytes)
    shared = world.node_first(None if file is None else SharedFile.of(file))
    assert shared is not None
    place = f"memory ({memory.folder}), until the run ends" if cache == "ram" else f"{shared.path}, for later runs too"
    log.info(f"--cache {cache}: {len(store):,} {index.split} {store.noun} take {gib(store.nbytes)} in {place}.")
    return image_store(index, imgsz, interpolation, file or _open_shared(shared))


class _CacheBuilder:
    """Writes the cache of a node, of a store without one."""

    def __init__(self, store: ImageStore, mode: CacheMode, show_progress: bool) -> None:
        self._store, self._mode, self._show_progress = store, mode, show_progress

    def in_memory(self, memory: SharedMemory) -> IO[bytes]:
        """The cache, in a file without a name."""
        folder = memory.folder
        if not memory.exists:
            raise UserError(
                f"--cache ram: found no {folder} on this system, where the cache would be. Use --cache disk."
            )
        available = available_memory()
        room = memory.room if available is None else min(memory.room, available)
        others = f" beside the {gib(memory.promised)} of loader workers and other caches" if memory.promised else ""
        remedy = f"Use --cache disk or a smaller --imgsz, or give the container more memory and {folder} (--shm-size)."
        self._require_room(room, f"{folder} (memory) has {gib(room)} free{others}", remedy)
        # Without a name from the start: nothing can be left behind, whatever becomes of this process.
        try:
            file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - lives as long as the store
        except OSError as error:
            raise UserError(f"--cache ram: cannot write to {folder} ({error.strerror}). Use --cache disk.") from error
        try:
            self._fill(file, folder, remedy)
        except BaseException:
            file.close()
            raise
        return file

    def on_disk(self) -> IO[bytes]:
        """The cache, in a file that later runs find; a new one only where there is none."""
        store, folder = self._store, cache_dir() / "images"
        rule = f"-{store.index.pixels}" if store.index.pixels else ""
        path = folder / f"{store.index.digest[:32]}-{store.imgsz}-{store.interpolation}{rule}-v{FORMAT}.bin"
        if not (path.is_file() and path.stat().st_size == store.nbytes):
            remedy = "Free some space, or set TESSERA_CACHE to a folder on a larger disk."
            try:
                folder.mkdir(parents=True, exist_ok=True)
                remove_leftovers(folder)
                room = shutil.disk_usage(folder).free
                self._require_room(room, f"{folder} has {gib(room)} free", remedy)
                with atomic_write(path) as file:
                    self._fill(file, folder, remedy)
            except OSError as error:
                raise UserError(
                    f"--cache disk: cannot write {path} ({error.strerror}). Set TESSERA_CACHE to a folder you may "
                    "write to."
                ) from error
        return path.open("rb")

    def _require_room(self, room: int, found: str, remedy: str) -> None:
        store = self._store
        if store.nbytes > room:
            raise UserError(
                f"--cache {self._mode}: the {len(store)} {store.index.split} {store.noun} take {gib(store.nbytes)} at "
                f"{store.imgsz} pixels, but {found}. {remedy}"
            )

    def _fill(self, file: IO[bytes], folder: Path, remedy: str) -> None:
        """Write the cache; a file system that fills up meanwhile gives the same message as one too small at first."""
        try:
            self._store.write_cache(file, self._show_progress)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise UserError(
                f"--cache {self._mode}: {folder} filled up while {gib(self._store.nbytes)} of "
                f"{self._store.index.split} {self._store.noun} were written. {remedy}"
            ) from error


def _open_shared(shared: SharedFile) -> IO[bytes]:
    try:
        return shared.open("rb")
    except OSError as error:
        raise UserError(
            f"--cache: cannot open the cache that the node's first rank built, {shared.path} ({error.strerror}). The "
            "ranks of a node must run as one user and see each other's processes (one container). Leave --cache out "
            "otherwise."
        ) from error
