"""Exported files, with and without NMS inside, have the metrics of their model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tessera.analysis.comparison.disagreements import ImageResult, detections_above
from tessera.data.augment.pipeline import letterbox
from tessera.data.feed.cache import open_images
from tessera.data.feed.image_sizes import rect_val_shapes
from tessera.data.feed.loader import ValLoader, build_val_loader
from tessera.models.detector import DetectionModel
from tessera.models.nms import NmsSettings, non_max_suppression, undo_letterbox
from tessera.utils.evaluation.network import Backend, ImageBackend
from tessera.utils.evaluation.evaluate import Evaluation, evaluate
from tessera.utils.evaluation.evaluate import EvaluatedModel, Settings
from tessera.utils.machine.opencv import cv2
from tessera.utils.ranks.world import World
from tessera.utils.types import Detections, Sample

IMGSZ = 64


class Rows(Backend):
    """The model as a file has it: objectness multiplied in."""

    def __init__(self, model: DetectionModel) -> None:
        self._model = model

    def __call__(self, images: Tensor) -> Tensor:
        decoded, _ = self._model(images)
        return torch.cat((decoded[..., :4], decoded[..., 5:] * decoded[..., 4:5]), -1)


class Whole(ImageBackend):
    """The whole pipeline around it, image by image."""

    imgsz = IMGSZ

    def __init__(self, model: DetectionModel) -> None:
        self._rows = Rows(model)
        self.seen: list[tuple[int, ...]] = []

    def detect(self, picture: NDArray[np.uint8], rules: NmsSettings) -> Detections:
        self.seen.append(picture.shape)
        height, width = picture.shape[:2]
        ratio = IMGSZ / max(height, width)
        size_wh = round(width * ratio), round(height * ratio)
        image = np.asarray(cv2.resize(picture, size_wh, interpolation=cv2.INTER_AREA), np.uint8)
        shape = tuple(rect_val_shapes(np.array([[height, width]], np.int32), IMGSZ, 32)[0].tolist())
        empty = Sample(image, np.zeros((0, 4), np.float32), np.zeros(0, np.int32))
        placed, (_, _, left, top) = letterbox(empty, shape)  # type: ignore[arg-type]
        rows = self._rows(torch.from_numpy(placed.image).permute(2, 0, 1)[None].float() / 255)
        (found,) = non_max_suppression(rows, replace(rules, has_objectness=False))
        placement = torch.tensor([size_wh[0] / width, size_wh[1] / height, left, top], dtype=torch.float64)
        return undo_letterbox(found, placement, (height, width))


def measured(model: EvaluatedModel, loader: ValLoader) -> Evaluation:
    return evaluate(model, loader, World(), Settings(conf=0.02))


def share_found(expected: ImageResult, found: ImageResult) -> float:
    """Return the fraction of detections that have an equal among `found`, but for rounding."""
    boxes = np.abs(expected.boxes_xyxy[:, None] - found.boxes_xyxy).max(2) < 1e-2
    scores = np.abs(expected.scores[:, None] - found.scores) < 1e-5
    same = boxes & scores & (expected.classes[:, None] == found.classes)
    return float(same.any(1).mean())


@pytest.mark.parametrize("stand_in", [Rows, Whole])
def test_a_file_is_measured_as_its_model(model: DetectionModel, loader: ValLoader, stand_in: type) -> None:
    expected, file = measured(model, loader), stand_in(model)
    found = measured(file, loader)
    assert expected.metrics.objects == found.metrics.objects > 0
    assert found.metrics.map50 == pytest.approx(expected.metrics.map50, abs=1e-4)
    assert found.metrics.speed_ms[1] > 0
    assert len(expected.matches.scores) > 100
    ours, theirs = (detections_above(one.matches, 0.0) for one in (found, expected))
    for image, detections in theirs.items():
        assert len(ours[image].scores) == len(detections.scores)
        assert share_found(detections, ours[image]) > 0.97, "but for scores that nearly tie"
    if stand_in is Whole:
        sizes = {tuple(size) for size in loader.index.sizes_hw.tolist()}
        assert {shape[:2] for shape in file.seen} == sizes, "pictures as they are, in no other size"


def test_every_image_is_padded_to_the_one_size_that_a_file_takes(loader: ValLoader) -> None:
    with (
        open_images(loader.index, IMGSZ, "none", "area", World()) as store,
        build_val_loader(store, World(), batch_size=4, stride=32, workers=0, size_hw=(64, 96)) as padded,
    ):
        assert [batch.images.shape for batch in padded] == [(4, 64, 96, 3)] * 2
