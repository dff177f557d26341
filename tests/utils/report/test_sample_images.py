"""Sample images of a validation: selection, and positions of their boxes."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from tessera.utils.bit_depth import Pixels
from tessera.utils.report import sample_images
from tessera.utils.report.image_grid import Annotations, SampleImageCollector
from tessera.utils.report.palette import class_colour
from tessera.utils.types import Batch, Detections
from tests.utils.report.made_charts import index

NOTHING = Detections(torch.zeros((0, 4)), torch.zeros(0), torch.zeros(0, dtype=torch.int64))


def batch(first: int, count: int, size_hw: tuple[int, int], padding: int = 0) -> Batch:
    """Grey images with black padding all around, each with an object of class 1 over the whole image."""
    height, width = size_hw
    images = np.zeros((count, height + 2 * padding, width + 2 * padding, 3), np.uint8)
    images[:, padding : padding + height, padding : padding + width] = 128
    box = [padding, padding, padding + width, padding + height]
    return Batch(
        torch.from_numpy(images),
        torch.tensor([[i, 1, *box] for i in range(count)], dtype=torch.float32),
        torch.arange(first, first + count),
        torch.tensor([size_hw] * count),
        torch.tensor([[1.0, 1.0, padding, padding]] * count, dtype=torch.float64),
    )


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[list[Pixels], list[Annotations]]]:
    """Images and boxes of each grid, by its name."""
    found = {}
    monkeypatch.setattr(
        sample_images, "save_grid", lambda i, a, names, captions, target: found.update({target.name: (i, a)})
    )
    return found


def test_a_grid_shows_images_of_all_shapes(
    tmp_path: Path, written: dict[str, tuple[list[Pixels], list[Annotations]]]
) -> None:
    """Spread over the share of a rank, which comes sorted by shape; two images in the last batch are enough."""
    sink = SampleImageCollector(index(["a", "b"], 5 * 192), ranks=2)  # of 96 images every other one is shown
    for first, count, size_hw in ((0, 40, (64, 64)), (40, 40, (48, 64)), (80, 16, (64, 32))):
        shown = batch(first, count, size_hw, padding=8)
        sink.add(shown, [NOTHING] * count)
    sink.write(tmp_path, 0.25)
    assert sorted(written) == [f"val_batch{i}_{what}.jpg" for i in range(3) for what in ("labels", "pred")]
    for images, _ in written.values():
        assert len(images) == 16
        assert {image.shape for image in images} == {(64, 64, 3), (48, 64, 3), (64, 32, 3)}
        assert all((image == 128).all() for image in images), "without padding"
    boxes = np.concatenate([mark.boxes_xyxy for mark in written["val_batch0_labels.jpg"][1]])
    assert boxes[0].tolist() == [0, 0, 64, 64]


def test_few_images_fill_one_grid_and_large_ones_stay_small(
    tmp_path: Path, written: dict[str, tuple[list[Pixels], list[Annotations]]]
) -> None:
    sink = SampleImageCollector(index(["a", "b"], 25), ranks=1)
    sink.add(batch(0, 5, (960, 1280)), [NOTHING] * 5)
    sink.write(tmp_path, 0.25)
    assert sorted(written) == ["val_batch0_labels.jpg", "val_batch0_pred.jpg"]
    images, labelled = written["val_batch0_labels.jpg"]
    assert [image.shape for image in images] == [(360, 480, 3)] * 5
    assert labelled[0].boxes_xyxy.tolist() == [[0, 0, 480, 360]]


def test_a_sink_that_shows_nothing_keeps_nothing(tmp_path: Path) -> None:
    sink = SampleImageCollector(index(["a", "b"], 25), ranks=1, images=0)
    sink.add(batch(0, 5, (64, 64)), [NOTHING] * 5)
    sink.write(tmp_path, 0.25)
    assert len(sink) == 0 and not list(tmp_path.iterdir())


def test_detections_below_the_confidence_are_left_out(tmp_path: Path) -> None:
    boxes = torch.tensor([[20, 100, 200, 200], [20, 220, 200, 300]], dtype=torch.float32)
    found = Detections(boxes, torch.tensor([0.9, 0.1]), torch.tensor([0, 1]))
    sink = SampleImageCollector(index(["a", "b"], 10), ranks=1)
    sink.add(batch(0, 2, (320, 320), padding=8), [found, NOTHING])
    sink.write_predictions(tmp_path / "p.png", 0.5)
    picture = cv2.imread(str(tmp_path / "p.png"))
    assert picture is not None and picture.shape == (320, 640, 3)
    red, green = (np.abs(picture[:, :, ::-1].astype(int) - class_colour(i)).max(-1) < 60 for i in (0, 1))
    assert red.sum() > 500 and green.sum() == 0
    assert np.argwhere(red)[:, 1].min() == pytest.approx(19, abs=2), "without the padding at the left"
