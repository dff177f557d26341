"""Files with the defects that exports are known for are refused; a sound one is not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tessera.data.feed.shapes import loaded_sizes, resized
from tessera.data.source.decode import read_image
from tessera.models.suppression import Suppression, non_max_suppression
from tessera.utils.checkpoints.weights import load_weights, model_of_weights
from tessera.utils.exporting.parity.agreement import EXACT, HALF, INT8, Agreement, Tolerance
from tessera.utils.exporting.parity.pictures import Pictures
from tessera.utils.exporting.parity.trial import Trial, agreement, try_out
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.runtime.checkpoint import TorchNetwork
from tessera.utils.runtime.model import Backend, PictureBackend
from tessera.utils.runtime.pipeline import Pipeline, picture_size, suppression_of
from tessera.utils.types import Detections

IMGSZ = 256


@pytest.fixture(scope="module")
def network(shared: Path) -> TorchNetwork:
    weights = load_weights(shared / "weights" / "yolov5n.pt")
    return TorchNetwork(model_of_weights(weights, "yolov5n.pt"), weights, Accelerator())


@pytest.fixture(scope="module")
def pictures(shared: Path) -> Pictures:
    """Real ones, not square."""
    found = [read_image(path) for path in sorted((shared / "coco128" / "images" / "train2017").glob("*.jpg"))[:24]]
    return Pictures(tuple(picture for picture in found if picture.shape[0] != picture.shape[1])[:8], "coco128")


@pytest.fixture(scope="module")
def reference(network: TorchNetwork, pictures: Pictures) -> Trial:
    trial = try_out(network, pictures.pictures, IMGSZ)
    assert all(sum(map(len, found)) >= 8 for found in trial.found), "enough to tell"
    return trial


class Whole(PictureBackend):
    """A file with the whole pipeline, with a defect."""

    def __init__(self, network: TorchNetwork, change: Callable[[Whole, NDArray[np.uint8], Suppression], Detections]):
        self.network, self._change = network, change
        self.names, self.imgsz, self.stride, self.source = network.names, network.imgsz, network.stride, "made.onnx"

    def detect(self, picture: NDArray[np.uint8], rules: Suppression) -> Detections:
        return self._change(self, picture, rules)

    def sound(self, picture: NDArray[np.uint8], rules: Suppression) -> Detections:
        own = suppression_of(self.network, conf=rules.conf, iou=rules.iou, max_det=rules.max_det)
        return Pipeline(self.network, IMGSZ)(picture, own).detections


def swapped_channels(file: Whole, picture: NDArray[np.uint8], rules: Suppression) -> Detections:
    return file.sound(np.ascontiguousarray(picture[..., ::-1]), rules)


def ignored_thresholds(file: Whole, picture: NDArray[np.uint8], rules: Suppression) -> Detections:
    return file.sound(picture, Suppression(0.05, 0.6, 300))


def dropped_padding(file: Whole, picture: NDArray[np.uint8], rules: Suppression) -> Detections:
    """Stretched to multiples of the stride, where it should be padded."""
    height, width = picture_size(picture)
    loaded = loaded_sizes(np.array((height, width)), IMGSZ)
    new_h, new_w = (-(-loaded // 32) * 32).tolist()
    image = resized(picture, (new_h, new_w), area=True)
    rows = file.network(torch.from_numpy(image[None]).permute(0, 3, 1, 2).float() / 255)
    own = suppression_of(file.network, conf=rules.conf, iou=rules.iou, max_det=rules.max_det)
    (found,) = non_max_suppression(rows, own)
    scale = torch.tensor([width / new_w, height / new_h] * 2)
    return Detections(found.boxes_xyxy * scale, found.scores, found.classes)


def shifted_padding(file: Whole, picture: NDArray[np.uint8], rules: Suppression) -> Detections:
    """Half a pixel beside where it should be."""
    found = file.sound(picture, rules)
    return Detections(found.boxes_xyxy + 0.5, found.scores, found.classes)


def no_suppression(file: Whole, picture: NDArray[np.uint8], rules: Suppression) -> Detections:
    return file.sound(picture, dataclasses.replace(rules, iou=1.0))


def other_iou(file: Whole, picture: NDArray[np.uint8], rules: Suppression) -> Detections:
    return file.sound(picture, dataclasses.replace(rules, iou=rules.iou + 0.05))


def ignored_iou(file: Whole, picture: NDArray[np.uint8], rules: Suppression) -> Detections:
    return file.sound(picture, dataclasses.replace(rules, iou=0.45))


def larger_boxes(file: Whole, picture: NDArray[np.uint8], rules: Suppression) -> Detections:
    found = file.sound(picture, rules)
    return Detections(found.boxes_xyxy * 1.02, found.scores, found.classes)


def other_classes(file: Whole, picture: NDArray[np.uint8], rules: Suppression) -> Detections:
    found = file.sound(picture, rules)
    return Detections(found.boxes_xyxy, found.scores, found.classes + 1)


def scores_that_are_no_numbers(file: Whole, picture: NDArray[np.uint8], rules: Suppression) -> Detections:
    found = file.sound(picture, rules)
    return Detections(found.boxes_xyxy, found.scores * torch.nan, found.classes)


def boxes_that_are_no_numbers(file: Whole, picture: NDArray[np.uint8], rules: Suppression) -> Detections:
    found = file.sound(picture, rules)
    return Detections(found.boxes_xyxy * torch.nan, found.scores, found.classes)


def rows_that_are_no_numbers(file: Whole, picture: NDArray[np.uint8], rules: Suppression) -> Detections:
    """Beside all that is found, where there is room."""
    found = file.sound(picture, rules)
    if len(found) + 2 > rules.max_det:
        return found
    parts = (found.boxes_xyxy, found.scores, found.classes)
    boxes, scores, classes = (torch.cat((part, part[:2])) for part in parts)
    boxes[len(found) :], scores[len(found) :] = torch.nan, torch.nan
    return Detections(boxes, scores, classes)


class Concatenated(Backend):
    """Boxes and scores share one scale of 8 bits."""

    def __init__(self, network: TorchNetwork) -> None:
        self._network, self.accelerator = network, network.accelerator
        self.names, self.imgsz, self.stride, self.source = network.names, network.imgsz, network.stride, "made.onnx"
        self.has_objectness = network.has_objectness

    def __call__(self, images: Tensor) -> Tensor:
        rows = self._network(images)
        scale = rows.abs().max() / 127
        return (rows / scale).round() * scale


def judged(
    reference: Trial, file: Backend | PictureBackend, pictures: Pictures, network: TorchNetwork, allowed: Tolerance
) -> Agreement:
    trial = try_out(file, pictures.pictures, IMGSZ, reference.rounds)
    return agreement(reference, trial, pictures.pictures, IMGSZ, allowed, network)


def test_a_sound_file_is_not_refused(network: TorchNetwork, reference: Trial, pictures: Pictures) -> None:
    for allowed in (EXACT, HALF, INT8):
        exact = judged(reference, Whole(network, Whole.sound), pictures, network, allowed)
        assert not exact.exceeds(allowed)
    assert (exact.box_px, exact.score, exact.share) == (0, 0, 1) and exact.detections > 50


@pytest.mark.parametrize(
    ("defect", "allowed"),
    [
        *((defect, EXACT) for defect in (swapped_channels, ignored_thresholds, dropped_padding, shifted_padding)),
        *((defect, EXACT) for defect in (no_suppression, other_iou, ignored_iou, larger_boxes, other_classes)),
        *((scores_that_are_no_numbers, allowed) for allowed in (EXACT, HALF, INT8)),
        *((boxes_that_are_no_numbers, allowed) for allowed in (EXACT, HALF, INT8)),
        (rows_that_are_no_numbers, EXACT),
        *((defect, HALF) for defect in (swapped_channels, no_suppression, ignored_iou, other_classes)),
        *((defect, INT8) for defect in (swapped_channels, no_suppression, other_classes)),
    ],
)
def test_a_defect_is_refused(
    network: TorchNetwork,
    reference: Trial,
    pictures: Pictures,
    defect: Callable[[Whole, NDArray[np.uint8], Suppression], Detections],
    allowed: Tolerance,
) -> None:
    assert judged(reference, Whole(network, defect), pictures, network, allowed).exceeds(allowed)


def test_outputs_that_were_joined_before_they_became_bytes_are_refused(
    network: TorchNetwork, reference: Trial, pictures: Pictures
) -> None:
    """Even by the tolerance of int8: scores of at most 1 vanish beside boxes of hundreds of pixels."""
    assert judged(reference, Concatenated(network), pictures, network, INT8).exceeds(INT8)
