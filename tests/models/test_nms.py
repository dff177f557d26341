"""NMS compared with an oracle and reference values; letterbox undone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchvision.ops import box_iou

from tessera.models.nms import NmsSettings, nms_of_candidates, non_max_suppression, select_candidates, undo_letterbox
from tessera.utils.types import Detections
from tests.utils.machine.stand_in import StandIn


def crowd(images: int, predictions: int, nc: int, seed: int, levels: int = 0) -> Tensor:
    """Overlapping boxes; with `levels`, probabilities take so many values only, so that scores are often equal."""
    generator = torch.Generator().manual_seed(seed)
    boxes = torch.rand(images, predictions, 4, generator=generator) * torch.tensor([60.0, 60, 40, 40])
    boxes[..., 2:] += 5
    probabilities = torch.rand(images, predictions, 1 + nc, generator=generator)
    if levels:
        probabilities = (probabilities * levels).round() / levels
    return torch.cat((boxes, probabilities), 2)


def oracle(rows: Tensor, rules: NmsSettings) -> list[tuple[int, int, float]]:
    """(prediction, class, score) of one image's detections, by plain loops."""
    candidates = []
    for index, row in enumerate(rows):
        if not row[4] > rules.conf:
            continue
        scores = [float(row[4] * p) for p in row[5:]]
        labels = range(len(scores)) if rules.multi_label else [scores.index(max(scores))]
        candidates += [(index, label, scores[label]) for label in labels if scores[label] > rules.conf]
    candidates = sorted(candidates, key=lambda candidate: -candidate[2])  # stable: ties in order of rows

    centre, size = rows[:, :2], rows[:, 2:4]
    boxes = torch.cat((centre - size / 2, centre + size / 2), 1).double()
    overlap = box_iou(boxes, boxes)
    kept: list[tuple[int, int, float]] = []
    for index, label, score in candidates[: rules.max_candidates]:
        rivals = [other for other, other_label, _ in kept if rules.agnostic or other_label == label]
        if all(overlap[index, other] <= rules.iou for other in rivals):
            kept.append((index, label, score))
    return kept[: rules.max_det]


RULES = st.builds(
    NmsSettings,
    conf=st.sampled_from([0.0, 0.1, 0.3]),
    iou=st.sampled_from([0.2, 0.45, 0.7]),
    max_det=st.sampled_from([1, 3, 300]),
    multi_label=st.booleans(),
    agnostic=st.booleans(),
    has_objectness=st.booleans(),
    max_candidates=st.sampled_from([7, 30_000]),
)


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**31), st.integers(0, 25), st.integers(1, 4), st.sampled_from([0, 4]), RULES)
def test_detections_equal_the_oracle(seed: int, predictions: int, nc: int, levels: int, rules: NmsSettings) -> None:
    decoded = with_objectness = crowd(2, predictions, nc, seed, levels)
    if not rules.has_objectness:  # the score is the class probability
        with_objectness[..., 4], decoded = 1, with_objectness[..., [0, 1, 2, 3, *range(5, 5 + nc)]]
    with pytest.MonkeyPatch.context() as patch:
        if seed % 2:
            patch.setattr("tessera.models.nms._MOST_SCORES", 3 * (5 + nc))
        results = non_max_suppression(decoded, rules)
    assert len(results) == 2
    for rows, found in zip(with_objectness, results, strict=True):
        expected = oracle(rows, rules)
        assert found.classes.tolist() == [label for _, label, _ in expected]
        assert found.scores.tolist() == pytest.approx([score for _, _, score in expected])
        boxes = [rows[index, :4] for index, _, _ in expected]
        centre_size = torch.stack(boxes) if boxes else torch.zeros(0, 4)
        low, high = centre_size[:, :2] - centre_size[:, 2:] / 2, centre_size[:, :2] + centre_size[:, 2:] / 2
        assert torch.equal(found.boxes_xyxy, torch.cat((low, high), 1))
        assert found.boxes_xyxy.dtype == found.scores.dtype == torch.float32 and found.classes.dtype == torch.int64


@pytest.mark.parametrize(("multi_label", "objectness"), [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize(("conf", "levels", "most"), [(0.0, 0, 30_000), (0.1, 4, 50), (0.3, 9, 7), (1.0, 0, 5)])
@pytest.mark.parametrize(("predictions", "nc"), [(300, 4), (40, 1), (0, 3)])
def test_candidates_of_a_whole_batch_give_the_same_detections(
    predictions: int,
    nc: int,
    conf: float,
    levels: int,
    most: int,
    multi_label: bool,
    objectness: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit by bit, ties at the limit included, and whatever part of the batch is done at once."""
    decoded = crowd(5, predictions, nc, 7, levels)
    decoded[1, :, 4] = float("nan")
    rules = NmsSettings(conf, 0.45, max_det=20, multi_label=multi_label, max_candidates=most, has_objectness=objectness)
    if not objectness:
        decoded = decoded[..., [0, 1, 2, 3, *range(5, 5 + nc)]]
    expected = non_max_suppression(decoded, rules)
    for most_scores in (1, 2 * predictions * (5 + nc), 2**25):
        monkeypatch.setattr("tessera.models.nms._MOST_SCORES", most_scores)
        selected = select_candidates(decoded, rules)
        assert selected.shape[:2] == (5, min(most, predictions * (nc if multi_label else 1)))
        for rows, alone in zip(selected, expected, strict=True):
            found = nms_of_candidates(rows, rules)
            assert torch.equal(found.boxes_xyxy, alone.boxes_xyxy)
            assert torch.equal(found.scores, alone.scores) and torch.equal(found.classes, alone.classes)
    assert select_candidates(decoded[:0], rules).shape[0] == 0


@pytest.mark.parametrize("multi_label", [True, False])
@pytest.mark.parametrize("find", [non_max_suppression, select_candidates])
def test_memory_does_not_grow_with_the_classes(
    find: Callable[[Tensor, NmsSettings], object], multi_label: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Early in training every class of every box is a candidate."""
    monkeypatch.setattr("tessera.models.nms._MOST_SCORES", 2000)
    with StandIn() as device:
        decoded = crowd(2, 100, 1000, 5)
        device.reset_peak_memory()
        find(decoded, NmsSettings(0.001, 0.6, multi_label=multi_label, max_candidates=10))
        assert device.peak_memory() - device.allocated_memory() <= 8 * 3 * 2000, "of 100,000 scores an image"


def test_detections_equal_the_reference(shared: Path) -> None:
    reference = np.load(shared / "reference" / "forward.npz")
    results = non_max_suppression(torch.from_numpy(reference["decoded"]), NmsSettings(0.25, 0.45, multi_label=False))
    rows = [
        np.column_stack((np.full(len(found), image), found.boxes_xyxy, found.scores, found.classes))
        for image, found in enumerate(results)
    ]
    ours, theirs = np.concatenate(rows), reference["nms_conf025_iou045"]
    assert ours.shape == theirs.shape
    np.testing.assert_array_equal(ours[:, [0, 6]], theirs[:, [0, 6]])
    np.testing.assert_allclose(ours[:, 1:5], theirs[:, 1:5], atol=1e-3)
    np.testing.assert_allclose(ours[:, 5], theirs[:, 5], atol=1e-5)


def test_classes_do_not_compete_however_far_out_the_boxes_lie() -> None:
    box = torch.tensor([8000.0, 8000.0, 16000.0, 16000.0])
    rows = torch.stack([torch.cat((box, torch.tensor([0.9]), torch.eye(80)[label])) for label in range(80)])
    (found,) = non_max_suppression(rows[None], NmsSettings(0.1, 0.5))
    assert sorted(found.classes.tolist()) == list(range(80))
    (found,) = non_max_suppression(rows[None], NmsSettings(0.1, 0.5, agnostic=True))
    assert found.classes.tolist() == [0]


def test_broken_numbers_are_no_detections() -> None:
    decoded = torch.full((1, 10, 8), float("nan"))
    assert len(non_max_suppression(decoded, NmsSettings(0.001, 0.6))[0]) == 0


def test_letterbox_is_undone_and_clipped() -> None:
    original = torch.tensor([[0.0, 10, 100, 50], [-5, 20, 400, 300]])
    scale, pad = torch.tensor([0.5, 0.25]), torch.tensor([7.0, 3.0])
    in_batch = original * scale.repeat(2) + pad.repeat(2)
    detections = Detections(in_batch, torch.tensor([0.9, 0.8]), torch.tensor([1, 2]))
    placement = torch.tensor([0.5, 0.25, 7, 3], dtype=torch.float64)
    undone = undo_letterbox(detections, placement, (200, 300))
    torch.testing.assert_close(undone.boxes_xyxy, torch.tensor([[0.0, 10, 100, 50], [0, 20, 300, 200]]))
    assert undone.scores is detections.scores and undone.classes is detections.classes


@pytest.mark.parametrize("objectness", [True, False])
def test_classes_have_thresholds_of_their_own(objectness: bool) -> None:
    """What is below its own counts for nothing, in the limits on candidates too; at 1 a class is never detected."""
    decoded = crowd(2, 200, 3, seed=9)[..., slice(None) if objectness else [0, 1, 2, 3, 5, 6, 7]]
    each = (0.3, 1.0, 0.6)
    rules = NmsSettings(0.3, 0.5, 20, has_objectness=objectness, max_candidates=100, class_confs=each)
    first = 5 if objectness else 4
    weight = decoded[..., 4:5] if objectness else 1.0
    passing = decoded.clone()
    passing[..., first:] *= decoded[..., first:] * weight > torch.tensor(each)
    expected = non_max_suppression(passing, dataclasses.replace(rules, class_confs=()))
    found = non_max_suppression(decoded, rules)
    apart = [nms_of_candidates(rows, rules) for rows in select_candidates(decoded, rules)]
    for one, other, third in zip(found, expected, apart, strict=True):
        assert len(one) > 5 and set(one.classes.tolist()) == {0, 2} and bool((one.scores[one.classes == 2] > 0.6).all())
        for same in (other, third):
            assert torch.equal(one.boxes_xyxy, same.boxes_xyxy) and torch.equal(one.scores, same.scores)
            assert torch.equal(one.classes, same.classes)
