"""Data of a training: missing dataset, tiles, box sizes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tessera.utils.config import TrainConfig
from tessera.utils.errors import ConfigError
from tessera.utils.ranks.world import World
from tessera.utils.training import data
from tests.data.made_index import make_index


@pytest.mark.parametrize("resume", ["", "runs/train/exp/weights/last.pt"])
def test_a_moved_dataset(tmp_path: Path, resume: str) -> None:
    with pytest.raises(ConfigError, match="no such dataset YAML") as caught:
        data.load_data(TrainConfig(data=str(tmp_path / "shape.yaml"), resume=resume), World())
    assert "Did you mean" not in str(caught.value), "the repository's datasets are not meant by a path"
    assert ("If it was moved, give --data" in str(caught.value)) == bool(resume)


def test_labels_are_filtered_at_the_training_size() -> None:
    """Boxes of 4 pixels in images of 100: 1.3 at 33 pixels, 2.6 at 64."""
    pictures = make_index([(100, 100)], classes=[[0]])
    pictures.boxes_xyxy[:] = [10, 10, 14, 14]
    rounded, exact = (data.training_samples(pictures, TrainConfig(tile=64, imgsz=imgsz)) for imgsz in (33, 64))
    assert rounded.content_hash() == exact.content_hash()


def test_box_sizes_are_all_or_a_sample_that_is_always_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    labels = [[0] * int(count) for count in rng.integers(0, 4, 300)]  # some images without any
    index = make_index([tuple(size) for size in rng.integers(20, 900, (300, 2)).tolist()], classes=labels)
    scale = (640 / index.sizes_hw.max(1)).repeat(np.diff(index.box_offsets))
    every = (index.boxes_xyxy[:, 2:] - index.boxes_xyxy[:, :2]) * scale[:, None]
    np.testing.assert_array_equal(data.box_sizes(index, 640), every)
    monkeypatch.setattr(data, "MOST_SIZES", len(every))
    np.testing.assert_array_equal(data.box_sizes(index, 640), every)
    monkeypatch.setattr(data, "MOST_SIZES", 100)
    sample = data.box_sizes(index, 640)
    assert sample.shape == (100, 2) and {*map(tuple, sample)} <= {*map(tuple, every)}
    np.testing.assert_array_equal(sample, data.box_sizes(index, 640))
    assert abs(sample.mean() / every.mean() - 1) < 0.2
