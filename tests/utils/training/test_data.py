"""Data of a training: missing dataset, tiles, box sizes, slow loader, class weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.utils.config import Hyp, TrainConfig, load_hyp
from tessera.utils.errors import ConfigError, UserError
from tessera.utils.image_size import ImageSize, SizeHw, size_hw_of
from tessera.utils.ranks.world import World
from tessera.utils.report.observers import EpochResult
from tessera.utils.training import data
from tessera.utils.training.data import by_effective_number, class_weights
from tests.data.made_index import make_index


@pytest.mark.parametrize("resume", ["", "runs/train/exp/weights/last.pt"])
def test_a_moved_dataset(tmp_path: Path, resume: str) -> None:
    with pytest.raises(ConfigError, match="no such dataset YAML") as caught:
        data.load_splits(TrainConfig(data=str(tmp_path / "shape.yaml"), resume=resume), World())
    assert "Did you mean" not in str(caught.value), "the repository's datasets are not meant by a path"
    assert ("If it was moved, give --data" in str(caught.value)) == bool(resume)


def test_labels_are_filtered_at_the_training_size() -> None:
    """Boxes of 4 pixels in tiles of 64: 2 pixels at 32, 4 at 64."""
    pictures = make_index([(100, 100)], classes=[[0]])
    pictures.boxes_xyxy[:] = [10, 10, 14, 14]
    splits = data.Splits(None, pictures, pictures)  # type: ignore[arg-type]
    assert len(data.training_data(splits, TrainConfig(tile=64), 64, World()).train.boxes_xyxy)
    with pytest.raises(UserError, match=r"at --imgsz 32 each is 2 pixels or less"):
        data.training_data(splits, TrainConfig(tile=64), 32, World())


@pytest.mark.parametrize("imgsz", [640, SizeHw(480, 640)])
def test_box_sizes_are_all_or_a_sample_that_is_always_the_same(
    imgsz: ImageSize, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    labels = [[0] * int(count) for count in rng.integers(0, 4, 300)]  # some images without any
    index = make_index([tuple(size) for size in rng.integers(20, 900, (300, 2)).tolist()], classes=labels)
    scale = (np.array(size_hw_of(imgsz)) / index.sizes_hw).min(1).repeat(np.diff(index.box_offsets))
    every = (index.boxes_xyxy[:, 2:] - index.boxes_xyxy[:, :2]) * scale[:, None]
    np.testing.assert_array_equal(data.box_sizes(index, imgsz), every)
    monkeypatch.setattr(data, "MOST_SIZES", len(every))
    np.testing.assert_array_equal(data.box_sizes(index, imgsz), every)
    monkeypatch.setattr(data, "MOST_SIZES", 100)
    sample = data.box_sizes(index, imgsz)
    assert sample.shape == (100, 2) and {*map(tuple, sample)} <= {*map(tuple, every)}
    np.testing.assert_array_equal(sample, data.box_sizes(index, imgsz))
    assert abs(sample.mean() / every.mean() - 1) < 0.2


@pytest.mark.parametrize(
    ("wait", "images", "flags", "expected"),
    [
        (0.6, 16, {}, None),  # an epoch of few seconds says little
        (0.19, 6400, {}, None),
        (0.6, 6400, {}, "could take 160. Give --workers 8 (now 2) or --cache ram, or disk."),
        (0.6, 6400, {"workers": 8, "cache": "disk"}, "Give more processors, or a smaller --imgsz."),
    ],
)
def test_a_loader_that_cannot_keep_up_is_named_once_with_its_speed(
    caplog: pytest.LogCaptureFixture, wait: float, images: int, flags: dict[str, Any], expected: str | None
) -> None:
    context = SimpleNamespace(config=TrainConfig(**{"workers": 2, **flags}), world=SimpleNamespace(cpus=8))
    warning, epoch = data.SlowLoaderWarning(), EpochResult(3, (), None, (), 120.0, wait, images_per_s=64.0)
    state, part = SimpleNamespace(progress=SimpleNamespace(batch_in_epoch=5)), SimpleNamespace(images_per_epoch=images)
    warning.begin(cast(Any, SimpleNamespace(context=context, data=part, state=state)))
    warning.epoch(EpochResult(2, (), None, (), 120.0, 1.0, images_per_s=10.0))  # the rest of a resumed epoch
    warning.epoch(epoch)
    warning.epoch(epoch)
    start = "The loader cannot keep up: 60% of epoch 3 was spent waiting for batches. It gives 64 images/s, "
    messages = [record.message for record in caplog.records]
    assert len(messages) == (expected is not None)
    assert all(text.startswith(start) and text.endswith(str(expected)) for text in messages)


PLAIN = load_hyp("hyp.scratch-low.yaml")  # classes are circle, square, star
AUTO = dataclasses.replace(PLAIN, class_weights="auto")
NAMED = dataclasses.replace(PLAIN, class_weights='{"star": 4.0, "circle": 0.5}')
INDEX = make_index([(10, 10)] * 3, classes=[[0, 0, 0, 0], [0, 0, 1, 1], [2, 2]])


def test_by_hand() -> None:
    assert class_weights(PLAIN, INDEX) is None
    named = class_weights(NAMED, INDEX)
    assert named is not None and named.dtype.is_floating_point
    mean = (6 * 0.5 + 2 * 1 + 2 * 4) / 10
    np.testing.assert_allclose(named, np.array([0.5, 1, 4]) / mean, rtol=1e-6)
    auto = class_weights(AUTO, INDEX)
    assert auto is not None
    np.testing.assert_allclose(auto, np.array([1 / 6, 1 / 2, 1 / 2]) / 0.3, rtol=0.005)  # so few: one over the number


def test_the_effective_number_is_the_number_of_a_few_and_a_thousand_of_many() -> None:
    numbers = 1 / by_effective_number(np.array([0, 1, 2, 1000, 10**6, 10**9]))
    np.testing.assert_allclose(numbers, [1, 1, 1.999, 1000 * (1 - 0.999**1000), 1000, 1000])


@given(st.lists(st.lists(st.integers(0, 2), max_size=8), min_size=1, max_size=8), st.sampled_from([AUTO, NAMED]))
def test_their_mean_over_the_objects_is_1(classes: list[list[int]], hyp: Hyp) -> None:
    index = make_index([(10, 10)] * len(classes), classes=classes)
    found = class_weights(hyp, index)
    assert found is not None and (found > 0).all() and found.isfinite().all()
    if len(index.classes):
        assert found[index.classes].mean().item() == pytest.approx(1, rel=1e-5)


def test_an_unknown_class() -> None:
    hyp = dataclasses.replace(PLAIN, class_weights='{"stars": 4.0}')
    with pytest.raises(ConfigError, match=r"no class 'stars'\. Did you mean 'star'\? Its classes: 'circle', 'squ"):
        class_weights(hyp, INDEX)
