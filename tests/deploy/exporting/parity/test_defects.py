"""Tests of the verification with known defects of exports: each is refused, a sound file is not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tessera.data.feed.image_sizes import resized, resized_sizes
from tessera.data.source.decode import read_image
from tessera.deploy.exporting.parity.difference import EXACT, HALF, INT8, Difference, Tolerance
from tessera.deploy.exporting.parity.trial import run_trial, trial_difference
from tessera.deploy.runtime.pipeline import image_detector, image_hw, nms_settings
from tessera.models.nms import NmsSettings, non_max_suppression
from tessera.utils.checkpoints.weights import load_weights, model_of_weights
from tessera.utils.evaluation.network import ImageDetector, Network, TimedDetections, network_of_weights
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.types import Detections

IMGSZ = 256
Pictures = tuple[NDArray[np.uint8], ...]


@pytest.fixture(scope="module")
def network(shared: Path) -> Network:
    weights = load_weights(shared / "weights" / "yolov5n.pt")
    return network_of_weights(model_of_weights(weights, "yolov5n.pt"), weights, Accelerator())


@pytest.fixture(scope="module")
def pictures(shared: Path) -> Pictures:
    found = [read_image(path) for path in sorted((shared / "coco128" / "images" / "train2017").glob("*.jpg"))[:24]]
    return tuple(picture for picture in found if picture.shape[0] != picture.shape[1])[:8]


class Whole:
    """A file with the whole pipeline, with a defect."""

    def __init__(self, network: Network, defect: Defect | None) -> None:
        self.network, self._defect = network, defect

    def detector(self) -> ImageDetector:
        return dataclasses.replace(image_detector(self.network, IMGSZ), detect=self.detect)

    def detect(self, picture: NDArray[np.uint8], rules: NmsSettings) -> TimedDetections:
        found = self._defect(self, picture, rules) if self._defect else self.sound(picture, rules)
        return TimedDetections(found, (0, 0, 0))

    def sound(self, picture: NDArray[np.uint8], rules: NmsSettings) -> Detections:
        own = nms_settings(self.network, conf=rules.conf, iou=rules.iou, max_det=rules.max_det)
        return image_detector(self.network, IMGSZ)(picture, own).detections


Defect = Callable[[Whole, NDArray[np.uint8], NmsSettings], Detections]


def of_rules(change: Callable[[NmsSettings], NmsSettings]) -> Defect:
    return lambda file, picture, rules: file.sound(picture, change(rules))


def of_answers(change: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]) -> Defect:
    def changed(file: Whole, picture: NDArray[np.uint8], rules: NmsSettings) -> Detections:
        found = file.sound(picture, rules)
        return Detections(*change(found.boxes_xyxy, found.scores, found.classes))

    return changed


def dropped_padding(file: Whole, picture: NDArray[np.uint8], rules: NmsSettings) -> Detections:
    """Stretched to multiples of the stride, where it should be padded."""
    height, width = image_hw(picture)
    loaded = resized_sizes(np.array((height, width)), IMGSZ)
    new_h, new_w = (-(-loaded // 32) * 32).tolist()
    image = resized(picture, (new_h, new_w), area=True)
    rows = file.network(torch.from_numpy(image[None]).permute(0, 3, 1, 2).float() / 255)
    own = nms_settings(file.network, conf=rules.conf, iou=rules.iou, max_det=rules.max_det)
    (found,) = non_max_suppression(rows, own)
    scale = torch.tensor([width / new_w, height / new_h] * 2)
    return Detections(found.boxes_xyxy * scale, found.scores, found.classes)


def rows_that_are_no_numbers(file: Whole, picture: NDArray[np.uint8], rules: NmsSettings) -> Detections:
    """Beside all that is found, where there is room."""
    found = file.sound(picture, rules)
    if len(found) + 2 > rules.max_det:
        return found
    boxes, scores, classes = (torch.cat((part, part[:2])) for part in (found.boxes_xyxy, found.scores, found.classes))
    boxes[-2:], scores[-2:] = torch.nan, torch.nan
    return Detections(boxes, scores, classes)


DEFECTS: dict[str, tuple[Defect, tuple[Tolerance, ...]]] = {
    "swapped channels": (
        lambda file, picture, rules: file.sound(picture[..., ::-1].copy(), rules),
        (EXACT, HALF, INT8),
    ),
    "ignored thresholds": (of_rules(lambda _: NmsSettings(0.05, 0.6, 300)), (EXACT,)),
    "dropped padding": (dropped_padding, (EXACT,)),
    "half a pixel beside": (of_answers(lambda boxes, *rest: (boxes + 0.5, *rest)), (EXACT,)),
    "no suppression": (of_rules(lambda rules: dataclasses.replace(rules, iou=1.0)), (EXACT, HALF, INT8)),
    "another iou": (of_rules(lambda rules: dataclasses.replace(rules, iou=rules.iou + 0.05)), (EXACT,)),
    "ignored iou": (of_rules(lambda rules: dataclasses.replace(rules, iou=0.45)), (EXACT, HALF)),
    "larger boxes": (of_answers(lambda boxes, *rest: (boxes * 1.02, *rest)), (EXACT,)),
    "other classes": (of_answers(lambda boxes, scores, classes: (boxes, scores, classes + 1)), (EXACT, HALF, INT8)),
    "scores that are no numbers": (of_answers(lambda boxes, s, c: (boxes, s * torch.nan, c)), (EXACT, HALF, INT8)),
    "boxes that are no numbers": (of_answers(lambda boxes, *rest: (boxes * torch.nan, *rest)), (EXACT, HALF, INT8)),
    "scores that vanish": (of_answers(lambda *parts: (parts[0][:0], parts[1][:0], parts[2][:0])), (EXACT, HALF, INT8)),
    "rows that are no numbers": (rows_that_are_no_numbers, (EXACT,)),
}


@pytest.fixture(scope="module")
def judged(network: Network, pictures: Pictures) -> Callable[..., list[Difference]]:
    reference = run_trial(network, pictures, IMGSZ)
    assert all(sum(map(len, found)) >= 8 for found in reference.found), "enough to tell"

    def judge(file: Network | ImageDetector, tolerances: Sequence[Tolerance]) -> list[Difference]:
        found = run_trial(file, pictures, IMGSZ, reference.rounds)
        return [trial_difference(reference, found, pictures, IMGSZ, allowed, network) for allowed in tolerances]

    return judge


def test_a_sound_file_is_not_refused(network: Network, judged: Callable[..., list[Difference]]) -> None:
    tolerances = EXACT, HALF, INT8
    for found, allowed in zip(judged(Whole(network, None).detector(), tolerances), tolerances, strict=True):
        assert not found.exceeds(allowed)
        assert (*found.largest, found.matched_fraction) == (0, 0, 1) and found.detections > 50


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_refused(network: Network, judged: Callable[..., list[Difference]], name: str) -> None:
    defect, refused_by = DEFECTS[name]
    for found, allowed in zip(judged(Whole(network, defect).detector(), refused_by), refused_by, strict=True):
        assert found.exceeds(allowed)
