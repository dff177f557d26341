"""How the ranks of a job find each other in the launcher's store, at every start anew."""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

from utils.errors import UserError
from utils.ranks.heartbeat import KeyStore

JOINING_TIMEOUT = timedelta(minutes=10)  # for all ranks to start


def meet(store: KeyStore, rank: int, size: int, timeout_s: float = JOINING_TIMEOUT.total_seconds()) -> str:
    """Name of this start of the ranks, the same on all of them and never used before: a prefix for its keys.

    A launcher that restarts ranks may keep its store, where the addresses of dead ranks still lie, and how often it has
    restarted them may differ between nodes. So every rank says a word of its own; rank 0 offers a name together with
    the words it has heard; whoever finds its word in the offer says so; when all have, the name stands.

    Raises:
        UserError: ranks are missing when the time is up.
    """
    word, end = uuid.uuid4().hex, time.monotonic() + timeout_s
    if rank:
        store.set(f"meet/word/{rank}", word)
        taken = ""
        while time.monotonic() < end:
            offer = _peek(store, "meet/offer").split(" ")
            name = offer[0] if len(offer) == size and offer[rank] == word else ""
            if name and name != taken:
                store.set(f"meet/{name}/{rank}", "taken")
                taken = name
            if taken and store.check([f"meet/{taken}/all"]):
                return taken
            time.sleep(0.02)
        raise UserError(f"rank {rank} has waited {timeout_s:.0f} s for rank 0 and the others to start.")
    heard: list[str] = []
    others = range(1, size)
    while time.monotonic() < end:
        words = [_peek(store, f"meet/word/{other}") for other in others]
        if words != heard:  # of those that died, words may be left; the living ones' take their places
            heard, word = words, uuid.uuid4().hex
            if all(heard):
                store.set("meet/offer", " ".join((word, *heard)))
        if all(heard) and store.check([f"meet/{word}/{other}" for other in others]):
            store.set(f"meet/{word}/all", "")
            return word
        time.sleep(0.02)
    missing = ", ".join(str(other) for other in others if not store.check([f"meet/{word}/{other}"]))
    raise UserError(f"of {size} ranks {missing} did not start within {timeout_s:.0f} s. Look at what they print.")


def _peek(store: KeyStore, key: str) -> str:
    """Value of `key`; "" where there is none."""
    return store.get(key).decode() if store.check([key]) else ""
