"""Differences of two sides: none between equals, a planted gain, 5 % false alarms; p-values against SciPy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from tessera.analysis.comparison import differences as module
from tessera.analysis.comparison.comparison import verdict
from tessera.analysis.comparison.differences import (
    LEVEL,
    Differences,
    differences,
    holm,
    images_needed,
    permutation_half_width,
    permutation_p_value,
    permuted_sides,
    student_quantile,
    student_tail,
)
from tessera.utils.evaluation.average_precision import Ranking
from tessera.utils.evaluation.curves import summarize
from tests.utils.evaluation.made_images import Image, make_image, ranked, share


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifth of the rounds: what is tested does not take more."""
    monkeypatch.setattr(module, "PERMUTATIONS", 199)
    monkeypatch.setattr(module, "ROUNDS", 199)


NC = 3


def scene(rng: np.random.Generator) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return boxes and classes of an image whose objects lie apart."""
    count = int(rng.integers(1, 7))
    corner = np.stack((np.arange(count) * 100.0, rng.uniform(0, 50, count)), 1)
    return np.concatenate((corner, corner + rng.uniform(30, 80, (count, 2))), 1), rng.integers(0, NC, count)


def detector(
    rng: np.random.Generator, scenes: Sequence[tuple[NDArray[np.float64], NDArray[np.int64]]], skill: float
) -> list[Image]:
    """Return images on which objects are missed with the probability 1 - skill, with as many false positives."""
    images = []
    for boxes, classes in scenes:
        seen = rng.random(len(boxes)) < skill
        moved = boxes + rng.normal(0, 4, boxes.shape)
        wrong = boxes[~seen] + 1000
        scores = np.concatenate((rng.beta(4, 2, int(seen.sum())), rng.beta(2, 4, len(wrong))))
        order = np.argsort(-scores)
        found = np.concatenate((moved[seen], wrong))[order]
        kinds = np.concatenate((classes[seen], classes[~seen]))[order]
        images.append(make_image(found, scores[order], kinds, boxes, classes))
    return images


def two_sides(seed: int, images: int, skill_a: float, skill_b: float) -> tuple[list[Image], list[Image]]:
    rng = np.random.default_rng(seed)
    scenes = [scene(rng) for _ in range(images)]
    return detector(rng, scenes, skill_a), detector(rng, scenes, skill_b)


def compared(*pair: list[Image]) -> Differences:
    shares = [share(side) for side in pair]
    a, b = ([ranked([own])] for own in shares)
    return differences(a, b, (shares[0], shares[1]))


def ranking(images: list[Image]) -> Ranking:
    return ranked([share(images)])


def test_holm_by_hand() -> None:
    """0.01 · 4, 0.02 · 3, 0.03 · 2 = 0.06 as the one before it, and never above 1 nor below one that is smaller."""
    np.testing.assert_allclose(holm(np.array([0.03, 0.01, 0.9, 0.02])), [0.06, 0.04, 0.9, 0.06])
    np.testing.assert_allclose(holm(np.array([0.5, 0.4, 0.6])), [1.0, 1.0, 1.0])
    assert holm(np.array([0.04])).tolist() == [0.04] and holm(np.zeros(0)).tolist() == []


@pytest.mark.parametrize("freedom", [1, 2, 3, 7, 127, 4999, 99_999])
def test_students_t_is_scipys(freedom: int) -> None:
    for t in (0.0, 0.3, 1.0, 2.0, 4.0, 8.0):
        assert student_tail(t, freedom) == student_tail(-t, freedom) == pytest.approx(2 * stats.t.sf(t, freedom), 1e-4)
    for level in (0.5, 0.05, 0.001):
        assert student_quantile(level, freedom) == pytest.approx(stats.t.isf(level / 2, freedom), 1e-6)


def test_a_difference_is_its_share_of_the_rounds_and_beyond_them_the_normal_tail() -> None:
    rng = np.random.default_rng(0)
    swapped = rng.normal(0, 0.01, 999)
    extreme = int((np.abs(swapped) >= 0.015).sum())
    assert permutation_p_value(0.015, swapped, 100) == permutation_p_value(-0.015, swapped, 100) == (1 + extreme) / 1000
    assert permutation_p_value(0.05, swapped, 100) == pytest.approx(
        2 * stats.norm.sf(0.05 / np.sqrt((swapped**2).mean())), 1e-9
    )
    assert permutation_p_value(0.05, swapped, 6) == 1 / 1000, "six images have 64 outcomes: what was counted stands"
    assert permutation_p_value(0.05, swapped, 12) == 2**-11
    assert permutation_p_value(0.0, np.zeros(999), 100) == 1


def test_what_chance_reaches_is_where_p_is_5_percent() -> None:
    swapped = np.random.default_rng(1).normal(0, 1, (4, 999))
    for rounds, reach in zip(swapped, permutation_half_width(swapped), strict=True):
        assert permutation_p_value(reach, rounds, 100) >= LEVEL > permutation_p_value(reach * (1 + 1e-6), rounds, 100)


def test_images_needed() -> None:
    """The standard error of 128 images is .01: to see .028 takes as many, to see .0028 a hundred times as many."""
    size = 0.01 * (stats.norm.isf(0.025) + stats.norm.isf(0.2))
    assert images_needed(size * 1.0001, 128, 1e-4, 0) == 128
    assert images_needed(size / 10 * 1.0001, 128, 1e-4, 0) == pytest.approx(12_800, abs=5)
    assert images_needed(size, 128, 1e-4, 1.01e-4) is None, "the trainings alone differ by as much"
    assert (images_needed(size, 128, 1e-4, 5e-5) or 0) == pytest.approx(256, abs=1)


NAMES = ("cat", "dog", "cow")


def test_a_against_itself_is_0() -> None:
    a, _ = two_sides(0, 60, 0.7, 0.7)
    found = compared(a, a)
    for one in (found.map, found.map50, *(each.ap for each in found.classes)):
        assert one.a == one.b and (one.difference, one.low, one.high, one.p) == (0, 0, 0, 1)
    assert verdict(found, NAMES).startswith("A and B have equal metrics in every class.")
    several = differences([ranking(a)] * 2, [ranking(a)] * 3, None)
    assert (several.map.difference, several.map.low, several.map.high, several.map.p) == (0, 0, 0, 1)


def test_figures_are_those_of_a_validation() -> None:
    a, b = two_sides(1, 40, 0.6, 0.8)
    found = compared(a, b)
    for side, images in (("a", a), ("b", b)):
        metrics, _ = summarize(ranking(images), NC)
        assert getattr(found.map, side) == pytest.approx(metrics.map, abs=1e-12)
        assert getattr(found.map50, side) == pytest.approx(metrics.map50, abs=1e-12)
        assert [getattr(one.ap, side) for one in found.classes] == pytest.approx(metrics.per_class[:, 3].tolist())
        assert [one.objects for one in found.classes] == metrics.objects_per_class.tolist()
        assert [one.images for one in found.classes] == metrics.images_per_class.tolist()


def test_a_planted_gain_of_two_points_is_found() -> None:
    a, b = two_sides(2, 1200, 0.70, 0.73)
    found = compared(a, b)
    assert 0.015 < found.map.difference < 0.035 and found.map.p < LEVEL
    assert 0 < found.map.low < found.map.difference < found.map.high
    assert verdict(found, NAMES).startswith("B is better than A: mAP50-95 +0.0")
    back = compared(b, a)
    assert back.map.difference == -found.map.difference and verdict(back, NAMES).startswith("B is worse than A")


def test_too_few_images_say_how_many_it_takes() -> None:
    found = compared(*two_sides(3, 30, 0.70, 0.72))
    said = verdict(found, NAMES)
    assert said.startswith("Undecided: mAP50-95") and "30 images are too few: it takes about " in said
    assert found.map.low < 0 < found.map.high and found.map.p > LEVEL


def test_a_gain_in_one_class_alone_is_found_there() -> None:
    a, _ = two_sides(4, 400, 0.6, 0.6)
    b, _ = two_sides(4, 400, 0.6, 0.6)
    b = [_all_of_class_0(image) for image in b]
    found = compared(a, b)
    assert [one.p_holm < LEVEL for one in found.classes] == [True, False, False]
    assert [one.ap.p <= one.p_holm for one in found.classes] == [True] * 3
    assert "Classes that differ significantly: better cat +" in verdict(found, NAMES)


def _all_of_class_0(image: Image) -> Image:
    """The image with its objects of class 0 found too, exactly."""
    found, boxes, classes = image
    more = boxes[classes == 0]
    return make_image(
        np.concatenate((more, found.boxes_xyxy)),
        np.concatenate((np.full(len(more), 0.99), found.scores)),
        np.concatenate((np.zeros(len(more)), found.classes)),
        boxes,
        classes,
    )


def test_scores_need_not_mean_the_same() -> None:
    """B's scores to the fourth power rank as before: nothing changes."""
    a, b = two_sides(5, 50, 0.7, 0.8)
    other = [make_image(f.boxes_xyxy, f.scores.double() ** 4, f.classes, *labels) for f, *labels in b]
    first, second = compared(a, b), compared(a, other)
    assert first.map == pytest.approx(second.map, abs=1e-9) and first.map50 == pytest.approx(second.map50, abs=1e-9)


def test_a_swapped_side_is_a_validation_of_the_images_that_it_takes() -> None:
    """Brute force: places among each side's detections are the scores, A's before B's."""
    a, b = two_sides(7, 20, 0.6, 0.8)
    states = [share(side) for side in (a, b)]
    found = permuted_sides(*states, np.random.default_rng(0))
    takes_b = np.random.default_rng(0).integers(2, size=(len(a), module.PERMUTATIONS), dtype=np.uint8)
    placed_a, placed_b = placed(a, 2.0), placed(b, 2.5)
    for round_ in range(5):
        for side, of_b in zip(found, (takes_b[:, round_], 1 - takes_b[:, round_]), strict=True):
            taken = [y if other else x for x, y, other in zip(placed_a, placed_b, of_b, strict=True)]
            assert side.maps()[1, round_] == pytest.approx(summarize(ranking(taken), NC)[0].map, abs=1e-9)


def placed(images: list[Image], shift: float) -> list[Image]:
    """The images with scores that say the place of a detection."""
    rows = [(image, row) for image, (found, *_) in enumerate(images) for row in range(len(found))]
    rows.sort(key=lambda at: -float(images[at[0]][0].scores[at[1]]))
    scores = [np.zeros(len(found)) for found, *_ in images]
    for place, (image, row) in enumerate(rows):
        scores[image][row] = 1 / (shift + place)
    return [make_image(f.boxes_xyxy, own, f.classes, *labels) for (f, *labels), own in zip(images, scores, strict=True)]


@pytest.mark.slow
def test_400_permutations_reject_at_5_percent() -> None:
    """Whichever of two detectors measured an image: the level is held, also for a class on few images."""
    a, b = two_sides(30, 40, 0.7, 0.7)
    rng = np.random.default_rng(31)
    p = []
    for _ in range(400):
        swap = rng.random(len(a)) < 0.5
        pairs = [(y, x) if other else (x, y) for x, y, other in zip(a, b, swap, strict=True)]
        found = compared([x for x, _ in pairs], [y for _, y in pairs])
        p.append([found.map.p, found.map50.p, *(one.ap.p for one in found.classes)])
    rejected = (np.array(p) < LEVEL).mean(0)
    assert (np.abs(rejected[:2] - 0.05) < 0.0151).all(), rejected
    assert (rejected <= 0.075).all(), rejected


def test_seeds_that_differ_widen_the_interval() -> None:
    runs = [ranking(two_sides(10, 60, skill, 0.5)[0]) for skill in (0.62, 0.70, 0.78)]
    steady = [ranking(two_sides(10, 60, 0.70, 0.5)[0])] * 3
    wide, narrow = differences(runs, steady, None), differences(steady, steady, None)
    assert wide.seed_variance > 0 and narrow.seed_variance == 0
    assert wide.map.p > 0.05 and wide.map.low < 0 < wide.map.high
    assert wide.map.a == pytest.approx(np.mean([summarize(run, NC)[0].map for run in runs]))
    alone = differences(runs, steady[:1], None)  # its trainings are taken to vary as A's
    assert alone.seed_variance == pytest.approx(4 * wide.seed_variance)


@pytest.mark.slow
def test_trainings_that_differ_by_chance_are_found_to_differ_in_5_percent_at_most() -> None:
    """Three and two runs a side, whose skills vary by seed on the same images."""
    rng = np.random.default_rng(11)
    p = []
    for number in range(40):
        skills = rng.normal(0.7, 0.05, 5).clip(0.4, 0.95)
        runs = [ranking(two_sides(1000 + number, 20, skill, 0.5)[0]) for skill in skills]
        p.append(differences(runs[:3], runs[3:], None).map.p)
    assert (np.array(p) < LEVEL).mean() <= 0.1
