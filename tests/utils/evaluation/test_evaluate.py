"""Distributed evaluation: votes on stopping, and a device with a queue."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import pytest
from torch import Tensor

from tessera.data.feed.loader import ValLoader
from tessera.models.detector import DetectionModel
from tessera.utils.config import load_hyp
from tessera.utils.evaluation.evaluate import Evaluation, EvaluationStopped, _voting, evaluate
from tessera.utils.evaluation.evaluate import Settings
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.ranks.world import World
from tessera.utils.types import Batch
from tests.utils.evaluation.made_images import assert_same_bits, matrix_of
from tests.utils.machine.stand_in import StandIn

BATCHES = 4  # of two images
VOTE_S = 0.02


class Queued(StandIn):
    """The stand-in, which also counts copies to the host and tunes kernels to shapes."""

    tuned = True

    def __init__(self) -> None:
        super().__init__()
        self.copies = 0

    def read_back(self, tensor: Tensor) -> Callable[[], Tensor]:
        self.copies += 1
        return super().read_back(tensor)

    @contextmanager
    def without_kernel_benchmark(self) -> Iterator[None]:
        self.tuned = False
        yield
        self.tuned = True


def on(accelerator: Accelerator) -> World:
    world = World()
    world.accelerator = accelerator
    return world


def measured(model: DetectionModel, loader: ValLoader, accelerator: Accelerator, **settings: object) -> Evaluation:
    criterion = model.head.criterion(load_hyp("hyp.scratch-low.yaml"), imgsz=64)
    return evaluate(model, loader, on(accelerator), Settings(conf=0.0, **settings), criterion=criterion)  # type: ignore[arg-type]


def assert_same(a: Evaluation, b: Evaluation) -> None:
    assert_same_bits(a.ranking, b.ranking)
    np.testing.assert_array_equal(matrix_of(a.errors), matrix_of(b.errors))
    assert matrix_of(a.errors)[:-1].any() and matrix_of(a.errors)[-1].any()
    assert a.metrics.losses == b.metrics.losses and a.ranking.above[:, 0].sum() >= 40


class Meeting(World):
    """One of several ranks, each in a thread; counts what they exchange."""

    def __init__(self, size: int, rank: int, barrier: threading.Barrier, values: dict[int, object]) -> None:
        super().__init__()
        self.size, self.rank, self.exchanges = size, rank, 0
        self._barrier, self._values = barrier, values

    def all_gather(self, value: Any) -> list[Any]:
        if not hasattr(self, "exchanges"):
            return [value]
        self.exchanges += 1
        self._values[self.rank] = value
        self._barrier.wait(60)
        everyone = [self._values[rank] for rank in range(self.size)]
        self._barrier.wait(60)
        return everyone


@pytest.mark.parametrize("stops_at", [None, (0, 3), (2, 1)])
def test_ranks_with_more_or_fewer_batches_vote_equally_often(
    monkeypatch: pytest.MonkeyPatch, stops_at: tuple[int, int] | None
) -> None:
    """One that has none votes too, and where one is asked to stop all give up."""
    monkeypatch.setattr("tessera.utils.evaluation.evaluate.VOTE_S", VOTE_S)
    batches, barrier, values = (5, 2, 0), threading.Barrier(3), dict[int, object]()
    worlds = [Meeting(3, rank, barrier, values) for rank in range(3)]
    taken, gave_up = [0, 0, 0], [False, False, False]

    def work(rank: int) -> None:
        def asked() -> bool:
            return stops_at is not None and stops_at[0] == rank and worlds[rank].exchanges >= stops_at[1]

        try:
            for _ in _voting(iter([cast(Batch, None)] * batches[rank]), asked, worlds[rank]):
                time.sleep(VOTE_S / 2)  # slow enough for a vote every other batch
                taken[rank] += 1
        except EvaluationStopped:
            gave_up[rank] = True

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))
    assert len({world.exchanges for world in worlds}) == 1
    assert gave_up == [stops_at is not None] * 3
    if stops_at is None:
        assert taken == [5, 2, 0]


def test_a_stop_gives_the_validation_up_after_a_batch(model: DetectionModel, loader: ValLoader) -> None:
    seen: list[Tensor] = []
    hook = model.head.register_forward_hook(lambda _, __, output: seen.append(output))
    with pytest.raises(EvaluationStopped):
        measured(model, loader, Accelerator(), stop_requested=lambda: True)
    hook.remove()
    assert len(seen) == 1


@pytest.mark.parametrize("max_det", [5, 300])
def test_a_queue_changes_no_figure_and_is_waited_for_once_a_batch(
    model: DetectionModel, loader: ValLoader, max_det: int
) -> None:
    with Queued() as queued:
        found = measured(model, loader, queued, max_det=max_det)
    assert_same(found, measured(model, loader, Accelerator(), max_det=max_det))
    assert queued.copies == BATCHES
    assert queued.waits == 1, "in the end, for the times of all batches"
    ours = [thread.name for thread in threading.enumerate() if thread.name.startswith("evaluation")]
    assert not ours, "the next fork must find no thread of ours"
    assert all(stage > 0 for stage in found.metrics.speed_ms)


def test_the_next_batch_is_launched_before_this_one_is_waited_for(model: DetectionModel, loader: ValLoader) -> None:
    """And kernels are not tuned to each shape."""
    order: list[str] = []

    class Logged(Queued):
        def read_back(self, tensor: Tensor) -> Callable[[], Tensor]:
            order.append(f"launched, tuned: {self.tuned}")
            arrived = super().read_back(tensor)
            return lambda: order.append("read") or arrived()

    queued, launched = Logged(), "launched, tuned: False"
    measured(model, loader, queued)
    assert order == [launched, *[launched, "read"] * (BATCHES - 1), "read"] and queued.tuned
