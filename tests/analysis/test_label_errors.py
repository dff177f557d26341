"""Planted label errors are ranked first, and perfect labels have none."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tessera.analysis.label_errors import (
    Counts,
    Evidence,
    EvidenceCollector,
    LabelError,
    LabelErrorKind,
    Labels,
    find_candidates,
    label_error_table,
    suspects,
)
from tessera.utils.types import DatasetIndex, Detections
from tests.data.made_index import make_index

IMAGES, NC, SIZE = 30, 3, 200
NO_REGIONS = np.zeros(0, np.int32), np.zeros((0, 4), np.float32)


class Scene(NamedTuple):
    classes: NDArray[np.int32]
    boxes: NDArray[np.float32]


def scenes() -> list[Scene]:
    """Make six objects an image, on a grid of nine cells of 60 pixels, so that they do not meet."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(IMAGES):
        cells = rng.permutation(9)[:6]
        corner = np.stack((cells % 3, cells // 3), 1) * 62 + rng.integers(2, 8, (6, 2))
        boxes = np.concatenate((corner, corner + rng.integers(30, 50, (6, 2))), 1).astype(np.float32)
        found.append(Scene(rng.integers(0, NC, 6).astype(np.int32), boxes))
    return found


def seen(scene: Scene, rng: np.random.Generator) -> Detections:
    """Return the detections of a good detector, and some of very low confidence."""
    count = len(scene.classes)
    boxes = np.concatenate((scene.boxes + rng.normal(0, 0.7, (count, 4)), np.tile([[80, 80, 99, 99]], (4, 1))))
    scores = np.concatenate((rng.uniform(0.85, 0.97, count), [0.012, 0.004, 0.002, 0.001]))
    classes = np.concatenate((scene.classes, [0, 1, 2, 0]))
    return Detections(torch.tensor(boxes).float(), torch.tensor(scores).float(), torch.tensor(classes).long())


def listed(
    labelled: Sequence[Scene], true: Sequence[Scene], regions: object = NO_REGIONS, map50: float = 1.0
) -> list[LabelError]:
    """Return the label errors by a good detector, however the images are divided."""
    rng, index = np.random.default_rng(1), index_of(labelled)
    found = [seen(scene, rng) for scene in true]

    def evidence(images: Sequence[int]) -> Evidence:
        counts, rows = Counts.none(NC), []
        for i in images:
            rows.append(find_candidates(i, found[i], Labels(*labelled[i], regions, (SIZE, SIZE)), counts))  # type: ignore[arg-type]
        return Evidence(np.concatenate(rows), counts)

    everything = range(len(labelled))
    divided = [evidence(everything[1::2]), evidence(everything[::2])]
    once = suspects(Evidence.joined(NC, [evidence(everything)]), index, map50)
    assert once == suspects(Evidence.joined(NC, divided), index, map50)
    return once


def index_of(labelled: Sequence[Scene]) -> DatasetIndex:
    made = make_index([(SIZE, SIZE)] * len(labelled), classes=[scene.classes.tolist() for scene in labelled])
    made.boxes_xyxy[:] = np.concatenate([scene.boxes for scene in labelled])
    return made


def with_error(scene: Scene, kind: LabelErrorKind) -> Scene:
    """Return the labels with an error in, or about, the first."""
    classes, boxes = scene.classes.copy(), scene.boxes.copy()
    if kind is LabelErrorKind.MISSING:
        return Scene(classes[1:], boxes[1:])
    if kind is LabelErrorKind.WRONG_CLASS:
        classes[0] = (classes[0] + 1) % NC
    if kind is LabelErrorKind.SHIFTED:
        boxes[0] += (boxes[0, [2, 3, 2, 3]] - boxes[0, [0, 1, 0, 1]]) * 0.25
    spurious, twin = np.array([[2, 192, 40, 199]]), boxes[:1] + np.array([0, 0, 2, 1])
    more = {LabelErrorKind.SPURIOUS: spurious, LabelErrorKind.DUPLICATE: twin}.get(kind, np.zeros((0, 4)))
    return Scene(np.append(classes, classes[: len(more)]), np.concatenate((boxes, more)).astype(np.float32))


def test_perfect_labels_have_no_suspects() -> None:
    true = scenes()
    assert listed(true, true) == []
    assert label_error_table([], 1.0, 180, 30) == ["Label errors: none suspected among 180 labels of 30 images."]


@pytest.mark.parametrize("kind", LabelErrorKind)
def test_a_planted_error_is_the_first_suspect(kind: LabelErrorKind) -> None:
    true = scenes()
    labelled = [*true[:7], with_error(true[7], kind), *true[8:]]
    first, *others = listed(labelled, true)
    assert others == [] and (first.kind, first.image) == (kind, 7) and first.score > 0.6
    box, c = true[7].boxes[0], int(true[7].classes[0])
    at = {LabelErrorKind.MISSING: -1, LabelErrorKind.SPURIOUS: 6, LabelErrorKind.DUPLICATE: 6}.get(kind, 0)
    assert first.object == at and first.other == (0 if kind is LabelErrorKind.DUPLICATE else -1)
    if kind in (LabelErrorKind.SPURIOUS, LabelErrorKind.DUPLICATE):
        assert first.suggested is None and first.suggested_box is None
    else:
        assert first.suggested == c and first.suggested_box is not None
        np.testing.assert_allclose(first.suggested_box, box, atol=4)


def test_one_label_is_one_suspect_and_all_kinds_are_found_together() -> None:
    true = scenes()
    labelled = [*(with_error(scene, kind) for scene, kind in zip(true, LabelErrorKind, strict=False)), *true[5:]]
    found = listed(labelled, true)
    assert sorted((s.image, s.kind) for s in found) == [(n, kind) for n, kind in enumerate(LabelErrorKind)]
    assert [s.score for s in found] == sorted((s.score for s in found), reverse=True)


def test_what_lies_in_an_ignored_region_is_no_suspect() -> None:
    true = scenes()
    labelled = [with_error(true[0], LabelErrorKind.MISSING), *true[1:]]
    everywhere = np.array([-1], np.int32), np.array([[0, 0, SIZE, SIZE]], np.float32)
    assert len(listed(labelled, true)) == 1
    assert listed(labelled, true, everywhere) == []


def test_labels_of_classes_that_the_weights_lack_are_left_out() -> None:
    """What is found there is no missing label either, and those of other classes keep their places."""
    true = scenes()
    kinds = (LabelErrorKind.SPURIOUS, LabelErrorKind.DUPLICATE)
    labelled = [*(with_error(scene, kind) for scene, kind in zip(true, kinds, strict=False)), *true[2:]]
    index, rng = index_of(labelled), np.random.default_rng(1)
    unknown = int(true[2].classes[0])
    found = [seen(scene, rng) for scene in true]
    for detections in found:  # the weights take such an object for one of the next class
        detections.classes[detections.classes == unknown] = (unknown + 1) % NC
    sink = EvidenceCollector(index, [c for c in range(NC) if c != unknown])
    batch = SimpleNamespace(indices=torch.arange(len(true)))
    sink.add(batch, found)  # type: ignore[arg-type]
    evidence = sink.evidence()
    left_out = int((index.classes == unknown).sum())
    assert evidence.counts.supports.sum() == len(index.classes) - left_out
    planted = [scene.classes[-1] for scene in labelled[:2]]
    expected = [(n, kind, 6) for n, kind in enumerate(kinds) if planted[n] != unknown]
    assert expected and [(s.image, s.kind, s.object) for s in suspects(evidence, index, 1.0)] == expected
    (line,) = label_error_table([], 1.0, 5, 2, 1)
    assert line.endswith("among 5 labels of 2 images (left out: 1 label of classes that the weights do not know).")


def test_a_class_that_is_often_found_falsely_counts_for_less() -> None:
    """Two labels are missing, of two classes; of one of them the detector detects many others that are not there."""
    true = scenes()
    a, b = (next(i for i, scene in enumerate(true) if scene.classes[0] == c) for c in (0, 1))
    labelled = [with_error(s, LabelErrorKind.MISSING) if i in (a, b) else s for i, s in enumerate(true)]
    ghosts = Scene(np.array([1], np.int32), np.array([[150, 192, 190, 199]], np.float32))
    haunted = [
        Scene(*(np.concatenate(pair) for pair in zip(scene, ghosts, strict=True))) if i not in (a, b) else scene
        for i, scene in enumerate(true)
    ]
    found = {s.image: s.score for s in listed(labelled, haunted)}
    assert found[a] > found[b] + 0.1


def test_detections_in_any_order_keep_their_boxes() -> None:
    """Two that are equal to four digits come in the wrong order: each is still about its own label."""
    box = np.array([[0, 0, 50, 50], [100, 100, 150, 150]], np.float32)
    found = Detections(torch.tensor(box), torch.tensor([0.90001, 0.90004]), torch.tensor([0, 0]))
    labels = Labels(np.zeros(2, np.int32), box + 1, NO_REGIONS, (SIZE, SIZE))
    assert len(find_candidates(0, found, labels, Counts.none(NC))) == 0


def test_an_object_of_a_class_that_its_image_does_not_label_is_found() -> None:
    """In LVIS such classes have objects: their labels are supported, and other detections say nothing."""
    box = np.array([[0, 0, 50, 50], [100, 100, 150, 150]], np.float32)
    found = Detections(torch.tensor(box), torch.tensor([0.9, 0.9]), torch.tensor([0, 0]))
    labels = Labels(np.zeros(1, np.int32), box[:1], NO_REGIONS, (SIZE, SIZE), np.arange(NC) == 0)
    assert len(find_candidates(0, found, labels, Counts.none(NC))) == 0


def test_a_weak_detector_scores_lower_and_says_so() -> None:
    """All kinds but duplicates are multiplied by mAP50, which keeps their order."""
    true = scenes()
    labelled = [*(with_error(scene, kind) for scene, kind in zip(true, LabelErrorKind, strict=False)), *true[5:]]
    sure, weak = ({s.kind: s.score for s in listed(labelled, true, map50=map50)} for map50 in (1.0, 0.4))
    factors = {kind: weak[kind] / score for kind, score in sure.items()}
    assert factors.pop(LabelErrorKind.DUPLICATE) == 1 and len(factors) == 4
    assert list(factors.values()) == pytest.approx([0.4] * 4, abs=1e-3)
    told = label_error_table(listed(labelled, true, map50=0.4), 0.4, 180, 30)[-1]
    assert "multiplied by mAP50 on these labels, 0.400. Such a detector is often wrong itself" in told
