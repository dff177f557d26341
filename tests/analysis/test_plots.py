"""Plots of a training: when they are made, and sample images of its batches and validations."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tessera.analysis import plots
from tessera.analysis.plots import Plots, SampleImageCollector, render_targets
from tessera.analysis.trackers import Loggers, Trackers
from tessera.deploy.inference.drawing import Annotations, class_colour
from tessera.utils.bit_depth import Pixels
from tessera.utils.evaluation.curves import summarize
from tessera.utils.ranks.world import World
from tessera.utils.report.observers import Observers
from tessera.utils.types import Batch, Detections
from tests.analysis.made_charts import index
from tests.utils.evaluation.made_images import accumulate
from tests.utils.report.test_observers import epoch, made_training


def test_predictions_are_rendered_in_ten_epochs_of_a_run(tmp_path: Path) -> None:
    """The last epoch may be the best, of which all images are."""
    plots = Plots()
    plots.begin(made_training(tmp_path, 1, epochs=95))
    assert [number for number in range(95) if plots.collectors(number)] == [*range(0, 95, 10), 94]
    assert plots.collectors(None)


def test_trackers_get_the_images_of_the_start_once_and_the_predictions_of_each_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late they read them; images of an earlier run in the same folder are not sent."""
    handed = list[Path]()
    metrics, _ = summarize(accumulate([]), 1)
    monkeypatch.setattr(Loggers, "image", lambda self, tag, path, number: handed.append(path))
    monkeypatch.setattr(SampleImageCollector, "__len__", lambda self: 1)
    monkeypatch.setattr(SampleImageCollector, "write_predictions", lambda self, path, conf: path.write_text(f"{conf}"))
    (tmp_path / "train_batch0.jpg").touch()
    for first, start in ((0, ["labels.jpg", "train_batch0.jpg"]), (1, [])):
        handed.clear()
        with Observers([Plots(), Trackers()], World()).of(made_training(tmp_path, first, epochs=2)) as observers:
            assert [path.name for path in handed] == start[:1]
            for number in range(first, 2):
                assert observers.collectors(number)
                observers.epoch(epoch(number, metrics=metrics))
        predictions = [f"predictions_epoch{number}.jpg" for number in range(first, 2)]
        assert sorted(path.name for path in handed) == sorted([*start, *predictions])


def batch(images: NDArray[np.uint8], targets: torch.Tensor) -> Batch:
    count = len(images)
    return Batch(
        torch.from_numpy(images),
        targets,
        torch.arange(count),
        torch.zeros((count, 2), dtype=torch.int64),
        torch.zeros((count, 4), dtype=torch.float64),
    )


def test_targets_become_a_jpeg_of_sixteen_images(tmp_path: Path) -> None:
    targets = torch.tensor([[0, 0, 10, 10, 60, 60], [1, 1, 5, 6, 30, 31]], dtype=torch.float32)
    path = tmp_path / "deep" / "train_batch0.jpg"
    render_targets(batch(np.full((20, 64, 96, 3), 128, np.uint8), targets), ["person", "car"], ["a.jpg"] * 20, path)
    drawn = cv2.imread(str(path))
    assert drawn is not None and drawn.shape == (4 * 213, 4 * 320, 3)
    assert np.abs(drawn[200, 100].astype(int)[::-1] - class_colour(0)).max() < 60
    assert [file.name for file in path.parent.iterdir()] == [path.name]


NOTHING = Detections(torch.zeros((0, 4)), torch.zeros(0), torch.zeros(0, dtype=torch.int64))


def letterboxed(first: int, count: int, size_hw: tuple[int, int], padding: int = 0) -> Batch:
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
    monkeypatch.setattr(plots, "save_grid", lambda i, a, names, captions, target: found.update({target.name: (i, a)}))
    return found


def test_a_grid_shows_images_of_all_shapes(
    tmp_path: Path, written: dict[str, tuple[list[Pixels], list[Annotations]]]
) -> None:
    """Spread over the share of a rank, which comes sorted by shape; two images in the last batch are enough."""
    sink = SampleImageCollector(index(["a", "b"], 5 * 192), ranks=2)  # of 96 images every other one is shown
    for first, count, size_hw in ((0, 40, (64, 64)), (40, 40, (48, 64)), (80, 16, (64, 32))):
        shown = letterboxed(first, count, size_hw, padding=8)
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
    sink.add(letterboxed(0, 5, (960, 1280)), [NOTHING] * 5)
    sink.write(tmp_path, 0.25)
    assert sorted(written) == ["val_batch0_labels.jpg", "val_batch0_pred.jpg"]
    images, labelled = written["val_batch0_labels.jpg"]
    assert [image.shape for image in images] == [(360, 480, 3)] * 5
    assert labelled[0].boxes_xyxy.tolist() == [[0, 0, 480, 360]]


def test_detections_below_the_confidence_are_left_out(tmp_path: Path) -> None:
    boxes = torch.tensor([[20, 100, 200, 200], [20, 220, 200, 300]], dtype=torch.float32)
    found = Detections(boxes, torch.tensor([0.9, 0.1]), torch.tensor([0, 1]))
    sink = SampleImageCollector(index(["a", "b"], 10), ranks=1)
    sink.add(letterboxed(0, 2, (320, 320), padding=8), [found, NOTHING])
    sink.write_predictions(tmp_path / "p.png", 0.5)
    drawn = cv2.imread(str(tmp_path / "p.png"))
    assert drawn is not None and drawn.shape == (320, 640, 3)
    red, green = (np.abs(drawn[:, :, ::-1].astype(int) - class_colour(i)).max(-1) < 60 for i in (0, 1))
    assert red.sum() > 500 and green.sum() == 0
    assert np.argwhere(red)[:, 1].min() == pytest.approx(19, abs=2), "without the padding at the left"
