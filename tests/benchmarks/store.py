"""What the ranks of a large job ask of its store, each rank a thread with a connection of its own to a real TCP store.

    uv run python -m tests.benchmarks.store --ranks 512

While all wait for the last rank; in a running job; and when a collective breaks and everybody asks who is lost.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore

from tessera.utils.machine.limits import open_files_left
from tessera.utils.ranks.liveness import Heartbeat
from tessera.utils.ranks.rendezvous import agree_on_session
from tests.at_once import at_once
from tests.benchmarks.rounds import machine, parser
from tests.system.launch import free_port
from tests.utils.ranks.counted_store import CountedStore

_LATE_S, _SETTLED_S = 20.0, 10.0  # when the straggler comes; from when on questions are counted


def rendezvous(stores: list[CountedStore], asked: Counter[str]) -> None:
    """All but the last rank start; that one comes late."""
    size, done = len(stores), []

    def one(rank: int) -> None:
        agree_on_session(stores[rank], rank, size, 600)
        done.append(time.perf_counter())

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads[:-1]:
        thread.start()
    time.sleep(_SETTLED_S)
    before = asked.total()
    time.sleep(_LATE_S - _SETTLED_S)
    rate = (asked.total() - before) / (_LATE_S - _SETTLED_S)
    came = time.perf_counter()
    threads[-1].start()
    for thread in threads:
        thread.join()
    print(f"  waiting for one rank: {rate:,.0f} questions a second; all met {max(done) - came:.1f} s after it came")


def run(stores: list[CountedStore], asked: Counter[str]) -> None:
    """All have a heartbeat; then one dies, and the others ask who it was."""
    size, one_store = len(stores), PrefixStore
    beats = [
        Heartbeat(CountedStore(one_store("run", store._store), asked), rank, size) for rank, store in enumerate(stores)
    ]
    time.sleep(2)
    before = asked.total()
    time.sleep(5)
    steady = (asked.total() - before) / 5
    print(f"  a running job: {steady:,.0f} questions a second")
    beats[-1]._closed.set()
    before, started = asked.total(), time.perf_counter()
    lost = at_once([beat.silent for beat in beats[:-1]])
    took = time.perf_counter() - started
    named = sum([rank for rank, _ in found] == [size - 1] for found in lost)
    asking = asked.total() - before - steady * took
    print(
        f"  a broken collective: {max(asking, 0):,.0f} questions, {took:.1f} s; {named} of {size - 1} name the lost one"
    )
    at_once([beat.close for beat in beats])


def main() -> None:
    given = parser(__doc__, ranks=512).parse_args()
    print(machine())
    open_files_left(4 * given.ranks)
    os.environ["TESSERA_PEER_TIMEOUT"] = "600"
    port, asked = free_port(), Counter[str]()
    server = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    stores = [
        CountedStore(TCPStore("127.0.0.1", port, wait_for_workers=False, timeout=timedelta(seconds=600)), asked)
        for _ in range(given.ranks)
    ]
    rendezvous(stores, asked)
    run(stores, asked)
    del server


if __name__ == "__main__":
    main()
