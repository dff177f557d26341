"""Shared-memory budget of a node: /dev/shm space reserved for image caches and for batches in transit.

Free space alone is not enough to know. Workers use their reservation only once they run, and are killed if the file
system is full by then.
"""

from __future__ import annotations

import shutil

from tessera.utils.files import SHARED_MEMORY
from tessera.utils.ranks.world import World


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
