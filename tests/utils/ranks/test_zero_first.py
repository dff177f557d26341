"""torch_distributed_zero_first: order of ranks, values for the other ranks of a node, failures, store calls."""

from __future__ import annotations

import threading
import time
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from tessera.utils.errors import UserError
from tessera.utils.ranks import liveness as store_module
from tessera.utils.ranks.world import torch_distributed_zero_first
from tests.at_once import at_once
from tests.utils.ranks.conftest import CountedStore

NODES = (3, 2, 1)  # ranks of each
FIRSTS = [sum(NODES[:node]) for node, ranks in enumerate(NODES) for _ in range(ranks)]


def world(rank: int, store: CountedStore) -> Any:
    return SimpleNamespace(rank=rank, size=len(FIRSTS), first_of_node=FIRSTS[rank], store=store)


def test_ranks_find_what_the_first_one_of_their_own_node_has_left() -> None:
    store = CountedStore()
    done: list[int] = []

    def one(rank: int, turn: int) -> dict[str, str]:
        with torch_distributed_zero_first(rank - FIRSTS[rank], world(rank, store)) as found:
            if rank == FIRSTS[rank]:
                time.sleep(0.1 * rank)
                found["index\udcff"] = f"{rank} in turn {turn}"
                done.append(rank)
            else:
                assert set(done) >= set(FIRSTS), "the first ranks of all nodes are through"
        return found

    for turn in range(2):
        left = at_once([partial(one, rank, turn) for rank in range(len(FIRSTS))])
        assert left == [{"index\udcff": f"{first} in turn {turn}"} for first in FIRSTS]
        done.clear()


def test_a_mistake_on_the_first_rank_of_any_node_is_that_of_all_others() -> None:
    store = CountedStore()

    def one(rank: int) -> str:
        try:
            with torch_distributed_zero_first(rank - FIRSTS[rank], world(rank, store)):
                if rank == FIRSTS[-1]:
                    raise UserError("no such image")
        except UserError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    found = at_once([partial(one, rank) for rank in range(len(FIRSTS))])
    assert found == ["", *["PeerError: no such image"] * 2, "", "PeerError: no such image", "UserError: no such image"]


@pytest.mark.parametrize("ranks", [4, 24])
def test_questions_grow_neither_with_the_ranks_nor_with_the_time(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank waits 1.5 seconds of a clock that only its own sleep moves on, and then until all have."""
    all_waited, over, slept = threading.Barrier(ranks), threading.Event(), Counter[int]()

    class NotifyingStore(HashStore):
        def set(self, key: str, value: str) -> None:
            super().set(key, value)
            if key.endswith("/over"):
                over.set()

    def sleep(seconds: float) -> None:
        slept[threading.get_ident()] += round(seconds * 1e6)
        if slept[threading.get_ident()] >= 1.5e6:
            all_waited.wait(60)
            assert over.wait(60)

    def one(rank: int) -> None:
        with torch_distributed_zero_first(rank, SimpleNamespace(rank=rank, size=ranks, first_of_node=0, store=store)):
            if rank == 0:
                all_waited.wait(60)

    store = CountedStore(NotifyingStore())
    monkeypatch.setattr(store_module, "time", SimpleNamespace(sleep=sleep))
    at_once([partial(one, rank) for rank in range(ranks)])
    assert store.calls.total() < ranks * 25, store.calls


@pytest.mark.parametrize("local_rank", [-1, 0, 3])
def test_without_a_group_there_is_nothing_to_wait_for(local_rank: int) -> None:
    with torch_distributed_zero_first(local_rank) as found:
        assert found == {}


def test_a_node_without_a_first_rank_does_not_wait_for_one() -> None:
    ranks = [SimpleNamespace(rank=rank, size=2, first_of_node=rank, store=CountedStore()) for rank in range(2)]
    ranks[1].store = ranks[0].store

    def one(place: Any) -> dict[str, str]:
        with torch_distributed_zero_first(place.rank, place) as found:
            return found

    assert at_once([partial(one, rank) for rank in ranks]) == [{}, {}]
