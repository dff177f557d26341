"""Nodes and processors of ranks; torch_distributed_zero_first: order of ranks, values for a node, failures."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from tessera.utils.environment import Launch
from tessera.utils.errors import UserError
from tessera.utils.evaluation.predictors import Settings, ShardEvaluation
from tessera.utils.ranks import world as world_module
from tessera.utils.ranks.world import World, torch_distributed_zero_first
from tests.at_once import at_once
from tests.utils.ranks.conftest import CountedStore

Nodes = Sequence[Sequence[frozenset[int]]]  # affinities of the ranks of each node, in the order of ranks


class OfSeveral(World):
    """A rank of several nodes that runs alone; of the others it knows the host and the processors."""

    def __init__(self, rank: int, nodes: Nodes) -> None:
        self.ranks = [
            (f"node{node}", local, cpus) for node, ranks in enumerate(nodes) for local, cpus in enumerate(ranks)
        ]
        super().__init__(Launch(rank=rank, local_rank=self.ranks[rank][1], size=len(self.ranks)))

    def all_gather(self, value: Any) -> list[Any]:
        if isinstance(value, tuple) and len(value) == 3:
            return list(self.ranks)
        return [(number, value) for number in range(self.size)]


@pytest.fixture
def quota(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> float:
    found = getattr(request, "param", math.inf)
    monkeypatch.setattr(world_module, "cpu_quota", lambda: found)
    return float(found)


def open_rank(monkeypatch: pytest.MonkeyPatch, rank: int, nodes: Nodes) -> OfSeveral:
    own = [cpus for ranks in nodes for cpus in ranks][rank]
    monkeypatch.setattr(world_module, "affinity", lambda: own)
    return OfSeveral(rank, nodes)


TASKS = [frozenset(range(8 * task, 8 * task + 8)) for task in range(8)]


@pytest.mark.parametrize(("quota", "cpus"), [(math.inf, 8), (64, 8), (32, 4), (8, 1)], indirect=["quota"])
def test_workers_of_a_rank_with_processors_of_its_own(monkeypatch: pytest.MonkeyPatch, quota: float, cpus: int) -> None:
    world = open_rank(monkeypatch, 3, [TASKS])
    assert world.cpus == cpus
    model: Any = SimpleNamespace(has_objectness=True, needs_nms=True)
    index: Any = SimpleNamespace(names=["a", "b"])
    assert ShardEvaluation(model, index, world, Settings(), None)._threads == min(cpus, 4)


@pytest.mark.usefixtures("quota")
def test_only_the_ranks_of_the_node_share_its_processors_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = frozenset(range(12))
    world = open_rank(monkeypatch, 3, [[everything] * 2, [everything] * 3])
    assert world.cpus == 4 and world.node == 1
    assert world.node_gather("mine") == [(2, "mine"), (3, "mine"), (4, "mine")]
    assert world.node_first("mine") == (2, "mine")


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
