"""/dev/shm of this node as one account: no byte is promised twice.

Caches of images are kept there, and batches travel through it from workers to their rank. Free space is not what is
left: workers use what they were promised only once they run, and are killed if the file system is full by then.
"""

from __future__ import annotations

import shutil

from tessera.utils.files import SHARED_MEMORY
from tessera.utils.ranks.world import World


class SharedMemory:
    """The account of one run; all ranks open it together, and make the same promises.

    Args:
        world: this rank.

    Attributes:
        promised: bytes promised so far on this node.
    """

    def __init__(self, world: World) -> None:
        self.folder = SHARED_MEMORY
        self.promised = 0
        self._world = world
        # Measured once, before anything is used: later, free space is smaller by the promises that are in use.
        self._free_at_start = world.node_first(self._free())

    @property
    def exists(self) -> bool:
        """Whether this system has such a file system."""
        return self.folder.is_dir()

    @property
    def room(self) -> int:
        """Bytes of this node that may still be promised; 0 where there is no such file system."""
        return max(min(self._free_at_start - self.promised, self._free()), 0)

    @property
    def room_of_a_rank(self) -> int:
        """The equal share of each of the node's ranks in `room`."""
        return self.room // self._world.local_size

    def promise(self, size: int) -> None:
        """Set `size` bytes of this node aside."""
        self.promised += size

    def promise_ranks(self, size: int) -> None:
        """Set `size` bytes aside for this rank, and for the others of its node what they ask for; all ranks call it."""
        self.promised += sum(self._world.node_gather(size))

    def _free(self) -> int:
        return shutil.disk_usage(self.folder).free if self.folder.is_dir() else 0
