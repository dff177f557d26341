"""Tests of evaluation: votes on stopping, a device with a queue, threads, exported files with and without NMS."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tessera.analysis.comparison.comparison import ImageResult, detections_above
from tessera.data.feed.cache import open_images
from tessera.data.feed.loader import ValLoader, build_val_loader
from tessera.deploy.runtime.pipeline import image_detector
from tessera.models.detector import DetectionModel
from tessera.models.heads.criterion import LossSettings
from tessera.models.nms import NmsSettings
from tessera.utils.config import load_hyp
from tessera.utils.evaluation.evaluate import Evaluation, EvaluationStopped, Settings, _voting, evaluate
from tessera.utils.evaluation.network import ImageDetector, Network, TimedDetections, network_of, single_threaded_pool
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.ranks.world import World
from tessera.utils.types import Batch
from tests.utils.evaluation.made_images import assert_same_bits
from tests.utils.machine.stand_in import StandIn

IMGSZ, BATCHES = 64, 4  # of two images
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


def measured(model: DetectionModel, loader: ValLoader, accelerator: Accelerator, **settings: object) -> Evaluation:
    criterion = model.head.criterion(LossSettings.of(load_hyp("hyp.scratch-low.yaml"), imgsz=IMGSZ))
    network, world = network_of(model, IMGSZ, accelerator), World(accelerator=accelerator)
    return evaluate(network, loader, world, Settings(conf=0.0, **settings), criterion=criterion)  # type: ignore[arg-type]


def assert_same(a: Evaluation, b: Evaluation) -> None:
    assert_same_bits(a.ranking, b.ranking)
    assert_same_bits(a.matches, b.matches)
    assert len(np.unique(a.matches.kinds)) > 1
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


def without_objectness(model: DetectionModel) -> Network:
    """The model as an exported file has it: objectness multiplied in."""
    network = network_of(model, IMGSZ, Accelerator())

    def predict(images: Tensor) -> tuple[Tensor, None]:
        decoded = network(images)
        return torch.cat((decoded[..., :4], decoded[..., 5:] * decoded[..., 4:5]), -1), None

    return replace(network, predict=predict, has_objectness=False)


def whole(model: DetectionModel, seen: list[tuple[int, ...]]) -> ImageDetector:
    detector = image_detector(without_objectness(model), IMGSZ)

    def detect(image: NDArray[np.uint8], rules: NmsSettings) -> TimedDetections:
        seen.append(image.shape[:2])
        return detector(image, rules)

    return replace(detector, detect=detect)


def share_found(expected: ImageResult, found: ImageResult) -> float:
    """Return the fraction of detections that have an equal among `found`, but for rounding."""
    boxes = np.abs(expected.boxes_xyxy[:, None] - found.boxes_xyxy).max(2) < 1e-2
    scores = np.abs(expected.scores[:, None] - found.scores) < 1e-5
    same = boxes & scores & (expected.classes[:, None] == found.classes)
    return float(same.any(1).mean())


@pytest.mark.parametrize("with_nms", [False, True])
def test_an_exported_file_has_the_metrics_of_its_model(
    model: DetectionModel, loader: ValLoader, with_nms: bool
) -> None:
    seen: list[tuple[int, ...]] = []
    exported = whole(model, seen) if with_nms else without_objectness(model)
    expected, found = (
        evaluate(one, loader, World(), Settings(conf=0.02))
        for one in (network_of(model, IMGSZ, Accelerator()), exported)
    )
    assert expected.metrics.objects == found.metrics.objects > 0
    assert found.metrics.map50 == pytest.approx(expected.metrics.map50, abs=1e-4)
    assert found.metrics.speed_ms[1] > 0
    assert len(expected.matches.scores) > 100
    ours, theirs = (detections_above(one.matches, 0.0) for one in (found, expected))
    for image, detections in theirs.items():
        assert len(ours[image].scores) == len(detections.scores)
        assert share_found(detections, ours[image]) > 0.97, "but for scores that nearly tie"
    if with_nms:
        assert set(seen) == {tuple(size) for size in loader.index.sizes_hw.tolist()}, "images in no other size"


def test_every_image_is_padded_to_the_one_size_that_a_file_takes(loader: ValLoader) -> None:
    with (
        open_images(loader.index, IMGSZ, "none", "area", World()) as store,
        build_val_loader(store, World(), batch_size=4, stride=32, workers=0, size_hw=(64, 96)) as padded,
    ):
        assert [batch.images.shape for batch in padded] == [(4, 64, 96, 3)] * 2


def test_each_of_the_threads_apart_computes_alone_and_those_after_them_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, real = torch.get_num_threads(), torch.set_num_threads

    def late(count: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.1)
        real(count)

    real(3)
    try:
        with single_threaded_pool(2, "apart") as pool:
            assert pool.submit(torch.get_num_threads).result() == 1 and torch.get_num_threads() == 3
        monkeypatch.setattr(torch, "set_num_threads", late)
        with single_threaded_pool(2, "apart") as pool:
            pool.submit(int)
        with ThreadPoolExecutor(1) as later:
            assert later.submit(torch.get_num_threads).result() == 3
    finally:
        real(before)
