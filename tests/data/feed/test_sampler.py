"""Properties of the training order for all sizes, and of validation shards."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tessera.data.feed.image_sizes import rect_train_shapes, rect_val_shapes, resized_sizes
from tessera.data.feed.sampler import (
    MOSAIC_POOL,
    EpochOrder,
    TrainSampler,
    ValSampler,
    image_weights,
    mosaic_batches,
    mosaic_block,
    repeat_factors,
)
from tessera.utils.errors import ConfigError
from tessera.utils.image_size import ImageSize, SizeHw
from tessera.utils.types import Draw
from tests.data.made_index import make_index

lengths = st.integers(1, 60)
ranks = st.sampled_from([1, 2, 3, 4])
shares = st.integers(1, 5)  # images of one rank's batch
epochs = st.integers(0, 1000)
seeds = st.integers(0, 2**63 - 1)


def make_sizes(length: int) -> np.ndarray:
    """Sizes of all aspects, wide, tall and square."""
    rng = np.random.default_rng(length)
    return rng.integers(20, 400, (length, 2)).astype(np.int32)


def epoch_order(length: int, batch: int, seed: int, epoch: int, repeats: np.ndarray | None = None) -> np.ndarray:
    return EpochOrder(length, batch, seed, 64, repeats=repeats).plan(epoch)[0]


def epoch_of(sampler: TrainSampler, epoch: int) -> list[list[Draw]]:
    sampler.seek(epoch)
    return list(sampler)


@given(lengths, ranks, shares, epochs, seeds, st.booleans())
@example(8, 2, 2, 0, 0, False)
@example(5, 2, 2, 0, 0, False)
@example(1, 4, 5, 3, 0, True)
def test_laws_of_an_epoch(length: int, ranks: int, share: int, epoch: int, seed: int, rect: bool) -> None:
    batch = ranks * share

    def sampler(rank: int, size: int) -> TrainSampler:
        shapes_hw = rect_train_shapes(make_sizes(length), 64, 32) if rect else None
        return TrainSampler(EpochOrder(length, batch, seed, 64, shapes_hw), rank, size)

    whole = epoch_of(sampler(0, 1), epoch)
    parts = [epoch_of(sampler(rank, ranks), epoch) for rank in range(ranks)]

    # The number of batches, whole ones only, the same on every rank.
    steps = -(-length // batch)
    assert [len(part) for part in parts] == [steps] * ranks == [len(sampler(0, ranks))] * ranks
    assert all(len(mine) == share for part in parts for mine in part)

    # The ranks' slices, end to end, are the global batch of a single rank; positions count through the epoch.
    assert [list(itertools.chain(*slices)) for slices in zip(*parts, strict=True)] == whole
    assert [draw.position for draws in whole for draw in draws] == list(range(steps * batch))
    assert {draw.epoch for draws in whole for draw in draws} == {epoch}
    assert all(len({draw.size_hw for draw in draws}) == 1 for draws in whole)

    # Every image once; padding repeats images of the epoch's own start, evenly.
    counts = Counter(draw.index for draws in whole for draw in draws)
    times, extra = divmod(steps * batch, length)
    assert Counter(counts[i] for i in range(length)) == Counter({times: length - extra, times + 1: extra}) - Counter()
    order = epoch_order(length, batch, seed, epoch)
    assert {i for i in counts if counts[i] == times + 1} == set(order[:extra].tolist())
    if not rect:
        assert [draw.index for draws in whole for draw in draws] == order.tolist()


@given(lengths, epochs, seeds, shares, st.data())
def test_entered_anywhere_the_stream_continues_alike(
    length: int, epoch: int, seed: int, batch: int, data: st.DataObject
) -> None:
    uninterrupted, resumed = (TrainSampler(EpochOrder(length, batch, seed, 64)) for _ in range(2))
    step = data.draw(st.integers(0, len(resumed)))
    uninterrupted.seek(epoch)
    resumed.seek(epoch, step)
    assert list(uninterrupted)[step:] == list(resumed)
    assert list(uninterrupted) == list(resumed)  # and both have gone to the next epoch by themselves


def test_epochs_and_seeds_differ_and_so_does_the_padding() -> None:
    orders = [epoch_order(10, 4, seed, epoch).tolist() for seed in (0, 1) for epoch in range(4)]
    assert len({tuple(order) for order in orders}) == 8
    assert len({tuple(order[10:]) for order in orders}) > 1


def test_a_batch_that_ranks_do_not_divide() -> None:
    with pytest.raises(ConfigError, match=r"--batch-size 10 .* 4 ranks .* 8 or 12"):
        TrainSampler(EpochOrder(100, 10, 0, 64), 0, 4)


def test_rect_batches_are_as_tight_as_their_images_and_shuffled() -> None:
    sizes_hw = np.array([(100, 200)] * 40 + [(200, 100)] * 40 + [(150, 150)] * 40, np.int32)
    sampler = TrainSampler(EpochOrder(120, 8, 0, 128, rect_train_shapes(sizes_hw, 128, 32)))
    epochs_seen = [epoch_of(sampler, epoch) for epoch in range(2)]
    for batches in epochs_seen:
        for draws in batches:
            loaded = resized_sizes(sizes_hw[[draw.index for draw in draws]], 128)
            assert draws[0].size_hw == tuple((-(-loaded.max(0) // 32) * 32).tolist())
        # 40 images of a shape fill 5 batches: no batch mixes shapes, and shapes come in random order.
        shapes = [draws[0].size_hw for draws in batches]
        assert Counter(shapes) == {(64, 128): 5, (128, 64): 5, (128, 128): 5}
        assert shapes != sorted(shapes, key=lambda s: s[0] - s[1])
    sets = [{frozenset(draw.index for draw in draws) for draws in batches} for batches in epochs_seen]
    assert not sets[0] & sets[1]  # other companions in the next epoch


def test_image_weights_decide_the_order_until_changed() -> None:
    sampler = TrainSampler(EpochOrder(50, 8, 0, 64))
    plain = epoch_of(sampler, 2)
    weights = np.zeros(50)
    weights[[3, 4]] = 1, 3
    sampler.order.reweight(weights)
    drawn = [draw.index for draws in epoch_of(sampler, 2) for draw in draws]
    assert len(drawn) == 56 and set(drawn) == {3, 4} and drawn.count(4) > drawn.count(3)
    assert drawn == [draw.index for draws in epoch_of(sampler, 2) for draw in draws]
    sampler.order.reweight(np.ones(50))
    assert epoch_of(sampler, 2) != plain  # with replacement


@given(st.lists(st.sampled_from([(64, 96), (96, 64), (96, 96)]), min_size=1, max_size=40), st.integers(1, 8), shares)
@example([(64, 96)] * 3, 8, 4)
def test_validation_shards(shapes: list[tuple[int, int]], ranks: int, batch: int) -> None:
    table = np.array(shapes)
    shards = [ValSampler(rank, ranks, batch, table) for rank in range(ranks)]
    counts = [sum(map(len, shard)) for shard in shards]
    assert sorted(draw.index for shard in shards for draws in shard for draw in draws) == list(range(len(table)))
    assert max(counts) - min(counts) <= 1
    for shard in shards:
        batches = list(shard)
        assert batches == list(shard) and len(batches) == len(shard)
        assert all(0 < len(draws) <= batch for draws in batches)
        assert all(draw.size_hw == draws[0].size_hw == shapes[draw.index] for draws in batches for draw in draws)
        # No batch could have been merged into another.
        partial = [draws[0].size_hw for draws in batches if len(draws) < batch]
        assert len(partial) == len(set(partial))


@pytest.mark.parametrize(
    ("size_hw", "imgsz", "shape_hw"),
    [
        ((640, 640), 640, (672, 672)),
        ((480, 640), 640, (512, 672)),
        ((427, 640), 640, (448, 672)),
        ((1, 1000), 640, (32, 672)),
        ((360, 640), SizeHw(192, 320), (224, 352)),
        ((480, 640), SizeHw(192, 320), (224, 288)),
    ],
)
def test_validation_shape_by_hand(size_hw: tuple[int, int], imgsz: ImageSize, shape_hw: tuple[int, int]) -> None:
    assert rect_val_shapes(np.array([size_hw], np.int32), imgsz, 32).tolist() == [list(shape_hw)]


IMAGE_SIZES: list[ImageSize] = [64, 640, SizeHw(192, 320), SizeHw(1280, 64)]


@given(st.integers(1, 5000), st.integers(1, 5000), st.sampled_from(IMAGE_SIZES), st.sampled_from([8, 32, 64]))
def test_a_loaded_image_fits_into_its_validation_shape(height: int, width: int, imgsz: ImageSize, stride: int) -> None:
    sizes_hw = np.array([[height, width]], np.int32)
    shape = rect_val_shapes(sizes_hw, imgsz, stride)
    assert (shape % stride == 0).all() and (shape >= resized_sizes(sizes_hw, imgsz)).all()


def test_image_weights_by_hand() -> None:
    # Objects: class 0 four times, class 1 once, class 2 never; mAP 0.5, 0, 1.
    index = make_index([(10, 10)] * 4, classes=[[0, 0, 0], [0, 1], [], []])
    weights = image_weights(index, [0.5, 0.0, 1.0])
    rare, common = 1.0, 0.5**2 / 4
    expected = np.array([3 * common, common + rare, 3 * common, 3 * common])
    np.testing.assert_allclose(weights, expected / expected.sum())
    np.testing.assert_allclose(image_weights(make_index([(10, 10)] * 4), [1.0, 1.0, 1.0]), 0.25)


@given(st.lists(st.floats(1, 50), min_size=1, max_size=60), ranks, shares, epochs, seeds)
def test_repeats_keep_the_epoch_and_give_each_image_its_share(
    repeats: list[float], size: int, share: int, epoch: int, seed: int
) -> None:
    """The global order is that of one rank, and each image comes as often as its share says, rounded up or down."""
    length, batch = len(repeats), size * share
    plan = EpochOrder(length, batch, seed, 64, repeats=np.array(repeats))
    parts = [epoch_of(TrainSampler(plan, rank, size), epoch) for rank in range(size)]
    order = [draw.index for slices in zip(*parts, strict=True) for draw in itertools.chain(*slices)]
    assert order == plan.plan(epoch)[0].tolist()
    assert len(order) == -(-length // batch) * batch and order[length:] == order[: len(order) - length][:batch]
    counts = np.bincount(order[:length], minlength=length)
    assert (abs(counts - length * np.array(repeats) / sum(repeats)) < 1 + 1e-9).all()


def test_repeat_factors_by_hand() -> None:
    # Class 0 is in 4 of 5 images, class 1 in 1, class 2 in none: their mean is 1/2.
    index = make_index([(10, 10)] * 5, classes=[[0, 0, 0], [0, 1], [0], [0], []])
    np.testing.assert_allclose(repeat_factors(index), [1, np.sqrt(0.5 / 0.2), 1, 1, 1])
    np.testing.assert_array_equal(repeat_factors(make_index([(10, 10)] * 2, classes=[[], []])), 1)
    np.testing.assert_array_equal(repeat_factors(make_index([(10, 10)] * 2, classes=[[0, 2], [1, 1]])), 1)


@given(st.integers(1, 100), ranks, shares, epochs)
def test_neighbours_are_a_matter_of_the_order_alone(length: int, size: int, share: int, epoch: int) -> None:
    batch_size = size * share
    order = epoch_order(length, batch_size, 3, epoch)
    batches = len(order) // batch_size
    for rank in range(size):
        sampler = TrainSampler(EpochOrder(length, batch_size, 3, 64), rank, size)
        for draw in itertools.chain(*epoch_of(sampler, epoch)):
            batch = draw.position // batch_size
            block = mosaic_block(draw.position, batch_size)
            near = {
                int(order[place])
                for back in range(min(mosaic_batches(batch_size), batches))
                for place in range((batch - back) % batches * batch_size, ((batch - back) % batches + 1) * batch_size)
                if mosaic_block(place, batch_size) == block
            }
            assert set(draw.mosaic_candidates) == near and draw.index in near
            assert all(order[place] == image for image, place in draw.mosaic_candidates.items())


@pytest.mark.parametrize(("batch_size", "size"), [(16, 1), (64, 2), (1024, 32), (96, 3)])
def test_a_rank_with_whole_blocks_needs_no_image_of_another(batch_size: int, size: int) -> None:
    share = batch_size // size
    for rank in range(size):
        sampler = TrainSampler(EpochOrder(batch_size * 12, batch_size, 3, 64), rank, size)
        draws = list(itertools.chain(*epoch_of(sampler, 0)))
        own = {draw.index for draw in draws}
        assert len(own) == share * 12 and all(set(draw.mosaic_candidates) <= own for draw in draws)
        assert {len(draw.mosaic_candidates) for draw in draws} == {MOSAIC_POOL}
