"""Key-value store of the job: layout of its keys, polling, and texts that survive a restart of the ranks.

Rank 0 or torchrun serves it (rendezvous.py). torchrun's store outlives the ranks that it restarts. Keys:

    rendezvous/…            rendezvous.py; overwritten by the next start of the ranks
    default/SESSION/…       torch's process groups of one start of the ranks
    tessera/SESSION/…       of one start: heartbeat/RANK (liveness.py), failure (failures.py), device/RANK
                            (rendezvous.py), zero_first/… (world.py)
    tessera/call/…          RestartMemory: id of a call of `open_world`
    tessera/kept/ID/…       RestartMemory: texts of that call
"""

from __future__ import annotations

import hashlib
import math
import time
import uuid
from collections import Counter
from collections.abc import Callable

from torch._C._distributed_c10d import Store

# Calls of `open_world` in this process, by description. A restarted process counts from 0.
_calls: Counter[str] = Counter()


def read(store: Store, key: str) -> str | None:
    """Return the text of `key`; None without one."""
    return store.get(key).decode() if store.check([key]) else None


class Backoff:
    """Growing pauses between two polls of the store, which serves hundreds of ranks."""

    _SHORTEST_S, _LONGEST_S, _GROWTH = 0.01, 1.0, 1.25

    def __init__(self) -> None:
        self._seconds = self._SHORTEST_S

    def reset(self) -> None:
        """Poll quickly again."""
        self._seconds = self._SHORTEST_S

    def wait(self, most_s: float = math.inf) -> None:
        """Sleep, at most `most_s` seconds."""
        time.sleep(min(self._seconds, most_s))
        self._seconds = min(self._seconds * self._GROWTH, self._LONGEST_S)


class RestartMemory:
    """Texts that rank 0 stores for a restart of the ranks by torchrun, such as the run directory of a call.

    The scope is one call of `open_world`, identified by its description and its number among equal calls, which a
    restarted process makes in the same order. Descriptions may differ between ranks, since hosts may have other paths,
    and another rank may become rank 0. So each rank stores the id of the call under its own description.
    """

    def __init__(self, store: Store, call: str) -> None:
        number = _calls[call]
        _calls[call] += 1
        self._store = store
        self._id_key = f"tessera/call/{hashlib.blake2b(call.encode(), digest_size=8).hexdigest()}/{number}"
        self._id = ""

    def agree(self, broadcast: Callable[[str], str]) -> None:
        """Take the id that rank 0 has stored for this call, or a new one, and store it; every rank calls this."""
        self._id = broadcast(read(self._store, self._id_key) or uuid.uuid4().hex)
        self._store.set(self._id_key, self._id)

    def keep(self, key: str, text: str) -> None:
        """Store a text until the server of the store ends."""
        self._store.set(f"tessera/kept/{self._id}/{key}", text)

    def find(self, key: str) -> str | None:
        """Return a text that was stored before or after a restart; None without one."""
        return read(self._store, f"tessera/kept/{self._id}/{key}")
