"""Nodes and processors of ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tessera.utils.environment import Launch
from tessera.utils.evaluation.evaluate import Settings, ShardEvaluation
from tessera.utils.ranks import world as world_module
from tessera.utils.ranks.world import World

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
    model: Any = SimpleNamespace(splits_batches=False)
    index: Any = SimpleNamespace(names=["a", "b"])
    assert ShardEvaluation(model, index, world, Settings(), None)._threads == min(cpus, 4)


@pytest.mark.usefixtures("quota")
def test_only_the_ranks_of_the_node_share_its_processors_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = frozenset(range(12))
    world = open_rank(monkeypatch, 3, [[everything] * 2, [everything] * 3])
    assert world.cpus == 4 and world.node == 1
    assert world.node_gather("mine") == [(2, "mine"), (3, "mine"), (4, "mine")]
    assert world.node_first("mine") == (2, "mine")
