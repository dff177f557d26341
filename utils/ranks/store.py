"""The job's store: the keys of the ranks, what waiting for one costs, and what outlives the ranks.

One rank, or torchrun, serves it (rendezvous.py); hundreds of ranks ask it. Its keys, by owner and end:

    rendezvous/…            rendezvous.py; the next start of the ranks overwrites it
    default/SESSION/…       torch, for the process groups of one start of the ranks
    tessera/SESSION/…       one start of the ranks: heartbeat/RANK (liveness.py), failure (failures.py), device/RANK
                            (rendezvous.py), zero_first/… (world.py)
    tessera/call/…          Memory: which id a call of `open_world` has; until the server ends
    tessera/kept/ID/…       Memory: the texts of that call; until the server ends

Where torchrun is the server, it outlives the ranks that it restarts; a session is a name that no other start has.
"""

from __future__ import annotations

import hashlib
import math
import time
import uuid
from collections import Counter
from collections.abc import Callable

from torch._C._distributed_c10d import Store

# How often this process has joined its job, by what for. A process that the launcher restarts counts anew.
_calls: Counter[str] = Counter()


def read(store: Store, key: str) -> str | None:
    """The text of `key`; None where there is none."""
    return store.get(key).decode() if store.check([key]) else None


class Backoff:
    """Pauses between two questions to the store: short at first, longer the longer nothing new is found.

    Without them hundreds of ranks that wait for one would ask thousands of times a second.
    """

    _SHORTEST_S, _LONGEST_S, _GROWTH = 0.01, 1.0, 1.25

    def __init__(self) -> None:
        self._seconds = self._SHORTEST_S

    def reset(self) -> None:
        """Something new was found: more may follow at once."""
        self._seconds = self._SHORTEST_S

    def wait(self, most_s: float = math.inf) -> None:
        """Sleep, at most `most_s` seconds."""
        time.sleep(min(self._seconds, most_s))
        self._seconds = min(self._seconds * self._GROWTH, self._LONGEST_S)


class Memory:
    """Texts that rank 0 keeps for its own restart: a job that torchrun restarts finds what it had begun.

    Its scope is one call of `open_world` by all ranks. Restarted, a process makes the same calls in the same order; so
    a call is known by what it is asked for, and by its number among the calls for the same. Ranks may be asked in
    different words (their hosts may have the data in other folders), and another rank may be rank 0 after a restart; so
    each of them notes under its own words the one id under which the texts lie. The store outlives the ranks where
    torchrun is its server, else nothing is ever found.
    """

    def __init__(self, store: Store, call: str) -> None:
        number = _calls[call]
        _calls[call] += 1
        self._store = store
        self._words = f"tessera/call/{hashlib.blake2b(call.encode(), digest_size=8).hexdigest()}/{number}"
        self._id = ""

    def agree(self, broadcast: Callable[[str], str]) -> None:
        """Take the id that rank 0 has noted for this call, or a new one, and note it; every rank calls this."""
        self._id = broadcast(read(self._store, self._words) or uuid.uuid4().hex)
        self._store.set(self._words, self._id)

    def keep(self, key: str, text: str) -> None:
        """Keep a text until the server of the store ends."""
        self._store.set(f"tessera/kept/{self._id}/{key}", text)

    def find(self, key: str) -> str | None:
        """What was kept, before a restart or since; None where nothing was."""
        return read(self._store, f"tessera/kept/{self._id}/{key}")
