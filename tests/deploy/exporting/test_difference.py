"""Tests of the comparison of detections: matching, thresholds, NMS ties, and known defects of exports."""

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
from tessera.deploy.exporting.difference import (
    EXACT,
    HALF,
    INT8,
    Candidates,
    OutputDifference,
    Tolerance,
    compare,
    detect_rounds,
    rounds_difference,
    without_ties,
)
from tessera.deploy.runtime.pipeline import image_detector, image_hw, nms_settings
from tessera.models.nms import NmsSettings, non_max_suppression
from tessera.utils.checkpoints.weights import load_weights, model_of_weights
from tessera.utils.evaluation.network import ImageDetector, Network, TimedDetections, network_of_weights
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.types import Detections
from tests.deploy.exporting.made import found_rows

Row = tuple[float, float, float, float, float, int]
CAT, DOG = (10, 10, 50, 50, 0.9, 0), (12, 10, 50, 50, 0.8, 1)
FLAT = [(10, 0, 40, 0, 0.9, 0), (10, 0, 40, 0, 0.7, 0)]


def compared(a: Detections, b: Detections, max_det: int = 300, scale: float = 1.0) -> OutputDifference:
    return compare(a, b, conf=0.1, max_det=max_det, scale=scale, margin=2e-3)


def apart(score: float, left: float = 300) -> Row:
    return (left, 300, left + 40, 340, score, 0)


def test_differences_are_in_pixels_of_the_network() -> None:
    found = compared(found_rows(CAT), found_rows((10, 10.5, 50, 50, 0.88, 0)), scale=0.25)
    assert found.largest == pytest.approx((0.125, 0.02), abs=1e-6)
    boxes, scores = found.exceeds(EXACT).split("; ")
    assert (
        "boxes differ by 0.125 px in the median, expected at most 0.01" in boxes and "scores differ by 0.02" in scores
    )
    assert found.exceeds(EXACT._replace(box_px=0.1)).startswith("boxes differ by up to 0.125 px, expected at most 0.1")


@pytest.mark.parametrize(
    ("reference", "found", "max_det", "counts"),
    [
        ([CAT, DOG, apart(0.5)], [CAT, DOG, apart(0.5)], 300, (6, 6)),
        ([CAT, DOG], [(10, 10, 50, 50, 0.9, 1), (90, 10, 130, 50, 0.8, 1)], 300, (4, 2)),  # the dog with the box on it
        (FLAT, FLAT, 300, (4, 4)),  # boxes without an area
        ([CAT, apart(0.101)], [CAT], 300, (2, 2)),  # near the threshold
        ([CAT, apart(0.11)], [CAT], 300, (3, 2)),
        ([CAT, apart(0.5)], [CAT, apart(0.4995, 400)], 2, (2, 2)),  # one of two that nearly tie
        ([CAT, apart(0.5)], [CAT, apart(0.4995, 400)], 3, (4, 2)),
        ([CAT], [CAT, apart(0.05)], 300, (3, 2)),  # below the threshold
        ([CAT], [CAT, apart(0.6)], 1, (3, 2)),  # more than were asked for
        ([], [], 300, (0, 0)),
        ([], [CAT], 300, (1, 0)),
        ([CAT], [], 300, (1, 0)),
    ],
)
def test_which_detections_count(reference: list[Row], found: list[Row], max_det: int, counts: tuple[int, int]) -> None:
    difference = compared(found_rows(*reference), found_rows(*found), max_det)
    assert (difference.detections, difference.matched) == counts
    assert bool(difference.exceeds(EXACT)) == (counts[0] != counts[1])


# Two boxes that overlap by two thirds with scores as good as equal, a third beside the second alone, one far away.
LEFT, RIGHT, FURTHER, ALONE = (
    (0, 0, 50, 50, 0.9, 0),
    (10, 0, 60, 50, 0.8999, 0),
    (24, 0, 74, 50, 0.7, 0),
    (200, 200, 250, 250, 0.6, 0),
)
WEAK = (0, 5, 50, 55, 0.5, 0)  # as good as on LEFT


def left(reference: list[Row], found: list[Row], max_det: int = 300) -> tuple[int, int]:
    everything = found_rows(LEFT, RIGHT, FURTHER, ALONE, WEAK)
    rules = NmsSettings(0.1, 0.5, max_det)
    rest = without_ties(
        found_rows(*reference), found_rows(*found), Candidates(everything, everything), rules, 1.0, EXACT
    )
    return len(rest[0]), len(rest[1])


def test_one_of_two_equals_and_what_follows_from_it_do_not_count() -> None:
    assert left([LEFT, FURTHER, ALONE], [RIGHT, ALONE]) == (1, 1)
    assert left([RIGHT, ALONE], [LEFT, FURTHER, ALONE]) == (1, 1)
    assert left([LEFT, ALONE], [RIGHT], max_det=1) == (0, 0), "beyond the last that is allowed"
    assert left([LEFT], [LEFT, ALONE], max_det=1) == (1, 2), "more than were asked for"


@pytest.mark.parametrize(
    ("reference", "found", "rest"),
    [
        ([LEFT, FURTHER, ALONE], [LEFT, FURTHER], (3, 2)),  # nothing suppresses it
        ([LEFT, FURTHER, ALONE], [LEFT, RIGHT, FURTHER, ALONE], (3, 4)),  # both of two that compete
        ([LEFT, ALONE], [WEAK, ALONE], (2, 1)),  # a weaker one in its place
        ([LEFT, ALONE], [(3, 3, 53, 53, 0.9, 0), ALONE], (2, 2)),  # no candidate
        ([LEFT, ALONE], [(10, 0, 60, 50, 0.8999, 1), ALONE], (2, 2)),  # of another class
        ([], [ALONE], (0, 0)),  # of the thresholds, which the comparison looks at
    ],
)
def test_what_is_no_suppression_of_the_candidates_counts(
    reference: list[Row], found: list[Row], rest: tuple[int, int]
) -> None:
    assert left(reference, found) == rest


IMGSZ = 256
Images = tuple[NDArray[np.uint8], ...]


@pytest.fixture(scope="module")
def network(shared: Path) -> Network:
    weights = load_weights(shared / "weights" / "yolov5n.pt")
    return network_of_weights(model_of_weights(weights, "yolov5n.pt"), weights, Accelerator())


@pytest.fixture(scope="module")
def images(shared: Path) -> Images:
    found = [read_image(path) for path in sorted((shared / "coco128" / "images" / "train2017").glob("*.jpg"))[:24]]
    return tuple(pixels for pixels in found if pixels.shape[0] != pixels.shape[1])[:8]


class Whole:
    """A file with the whole pipeline, with a defect."""

    def __init__(self, network: Network, defect: Defect | None) -> None:
        self.network, self._defect = network, defect

    def detector(self) -> ImageDetector:
        return dataclasses.replace(image_detector(self.network, IMGSZ), detect=self.detect)

    def detect(self, pixels: NDArray[np.uint8], rules: NmsSettings) -> TimedDetections:
        found = self._defect(self, pixels, rules) if self._defect else self.sound(pixels, rules)
        return TimedDetections(found, (0, 0, 0))

    def sound(self, pixels: NDArray[np.uint8], rules: NmsSettings) -> Detections:
        own = nms_settings(self.network, conf=rules.conf, iou=rules.iou, max_det=rules.max_det)
        return image_detector(self.network, IMGSZ)(pixels, own).detections


Defect = Callable[[Whole, NDArray[np.uint8], NmsSettings], Detections]


def of_rules(change: Callable[[NmsSettings], NmsSettings]) -> Defect:
    return lambda file, pixels, rules: file.sound(pixels, change(rules))


def of_answers(change: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]) -> Defect:
    def changed(file: Whole, pixels: NDArray[np.uint8], rules: NmsSettings) -> Detections:
        found = file.sound(pixels, rules)
        return Detections(*change(found.boxes_xyxy, found.scores, found.classes))

    return changed


def dropped_padding(file: Whole, pixels: NDArray[np.uint8], rules: NmsSettings) -> Detections:
    """Stretched to multiples of the stride, where it should be padded."""
    height, width = image_hw(pixels)
    loaded = resized_sizes(np.array((height, width)), IMGSZ)
    new_h, new_w = (-(-loaded // 32) * 32).tolist()
    image = resized(pixels, (new_h, new_w), area=True)
    rows = file.network(torch.from_numpy(image[None]).permute(0, 3, 1, 2).float() / 255)
    own = nms_settings(file.network, conf=rules.conf, iou=rules.iou, max_det=rules.max_det)
    (found,) = non_max_suppression(rows, own)
    scale = torch.tensor([width / new_w, height / new_h] * 2)
    return Detections(found.boxes_xyxy * scale, found.scores, found.classes)


def rows_that_are_no_numbers(file: Whole, pixels: NDArray[np.uint8], rules: NmsSettings) -> Detections:
    """Beside all that is found, where there is room."""
    found = file.sound(pixels, rules)
    if len(found) + 2 > rules.max_det:
        return found
    boxes, scores, classes = (torch.cat((part, part[:2])) for part in (found.boxes_xyxy, found.scores, found.classes))
    boxes[-2:], scores[-2:] = torch.nan, torch.nan
    return Detections(boxes, scores, classes)


DEFECTS: dict[str, tuple[Defect, tuple[Tolerance, ...]]] = {
    "swapped channels": (lambda file, pixels, rules: file.sound(pixels[..., ::-1].copy(), rules), (EXACT, HALF, INT8)),
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
def judged(network: Network, images: Images) -> Callable[..., list[OutputDifference]]:
    reference = detect_rounds(network, images, IMGSZ)
    assert all(sum(map(len, found)) >= 8 for found in reference.detections), "enough to tell"

    def judge(file: Network | ImageDetector, tolerances: Sequence[Tolerance]) -> list[OutputDifference]:
        found = detect_rounds(file, images, IMGSZ, reference.rounds)
        return [rounds_difference(reference, found, images, IMGSZ, allowed, network) for allowed in tolerances]

    return judge


def test_a_sound_file_is_not_refused(network: Network, judged: Callable[..., list[OutputDifference]]) -> None:
    tolerances = EXACT, HALF, INT8
    for found, allowed in zip(judged(Whole(network, None).detector(), tolerances), tolerances, strict=True):
        assert not found.exceeds(allowed)
        assert (*found.largest, found.matched_fraction) == (0, 0, 1) and found.detections > 50


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_refused(network: Network, judged: Callable[..., list[OutputDifference]], name: str) -> None:
    defect, refused_by = DEFECTS[name]
    for found, allowed in zip(judged(Whole(network, defect).detector(), refused_by), refused_by, strict=True):
        assert found.exceeds(allowed)
