"""Drift checks: planted differences are reported, chance and crowded images are not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from tessera.analysis.checks.drift import CLASSES, OBJECT_COUNTS, POSITIONS, SIZES, check_drift
from tessera.analysis.checks.results import DatasetCheck, SplitData
from tessera.data.source.scan import Scan
from tessera.data.source.split_files import Listing
from tessera.utils.types import DatasetSpec

Rng = np.random.Generator
NAMES = ("cat", "dog", "horse")
SIDE = 400
Objects = Sequence[tuple[int, float, float, float]]  # class, centre x and y, side, as fractions of the image


def made_part(split: str, scene: Callable[[np.random.Generator], Objects], images: int, seed: int) -> SplitData:
    """A split of scenes; the same for the same seed."""
    rng = np.random.default_rng(seed)
    scenes = [scene(rng) for _ in range(images)]
    rows = np.array([row for objects in scenes for row in objects], np.float64).reshape(-1, 4)
    half = rows[:, 3:] / 2
    fields: dict[str, Any] = dict.fromkeys(Scan._fields)
    fields |= {
        "usable": np.ones(images, np.bool_),
        "sizes_hw": np.full((images, 2), SIDE, np.int32),
        "set_of_image": np.zeros(0, np.int32),
        "counts": np.array([len(objects) for objects in scenes], np.int64),
        "classes": rows[:, 0].astype(np.int32),
        "boxes_xyxy": (SIDE * np.hstack((rows[:, 1:3] - half, rows[:, 1:3] + half))).astype(np.float32),
    }
    spec = DatasetSpec("made", yaml_path=Path("made.yaml"), root=Path(), splits={split: ()}, names=NAMES)
    return SplitData(spec, split, cast(Listing, None), Scan(**fields), False)


def checked(train: SplitData, val: SplitData) -> DatasetCheck:
    check = DatasetCheck()
    check_drift(check, [train, val])
    return check


def changed(check: DatasetCheck) -> set[str]:
    return {drift.family for drift in check.drifts if drift.changed}


def ordinary(rng: Rng) -> list[tuple[int, float, float, float]]:
    """Class, centre x, centre y and side of each object of an image, fractions of it; correlated within the image."""
    own = int(rng.integers(3))
    side, x = 0.05 + 0.3 * rng.random(), 0.2 + 0.6 * rng.random()
    return [(own, x, 0.2 + 0.6 * rng.random(), side) for _ in range(int(rng.geometric(0.25)))]


def planted(kind: str) -> Callable[[Rng], list[tuple[int, float, float, float]]]:
    def scene(rng: Rng) -> list[tuple[int, float, float, float]]:
        objects = ordinary(rng)
        if kind == CLASSES:
            return [(0 if rng.random() < 0.7 else c, x, y, side) for c, x, y, side in objects]
        if kind == SIZES:
            return [(c, x, y, side * 0.5) for c, x, y, side in objects]
        if kind == POSITIONS:
            return [(c, x, 0.2 + 0.2 * y, side) for c, x, y, side in objects]
        return objects + [(c, x, y, side) for c, x, y, side in objects for _ in range(3)]

    return scene


@pytest.mark.parametrize("kind", [CLASSES, SIZES, POSITIONS, OBJECT_COUNTS])
def test_what_was_planted_is_named(kind: str) -> None:
    check = checked(made_part("train", ordinary, 400, 0), made_part("val", planted(kind), 150, 1))
    assert kind in changed(check)
    (note,) = (line for line in check.notes if line.startswith(f"val: {kind} differ significantly from train"))
    assert "%" in note


def test_chance_hardly_ever_alarms() -> None:
    """Objects of an image are alike in class, place and size: a test over objects would alarm nearly always."""
    alarms = sum(
        bool(changed(checked(made_part("train", ordinary, 150, seed), made_part("val", ordinary, 40, 1000 + seed))))
        for seed in range(20)
    )
    assert alarms <= 3  # of 20 at 5 %, more happens in one of 63 tries


def test_a_crowd_in_one_image_moves_nothing() -> None:
    crowd = made_part("val", lambda rng: [(2, rng.random(), rng.random(), 0.05)] * 2000, 1, 7)
    val = made_part("val", ordinary, 60, 1)
    scanned = val.scanned._replace(
        counts=np.concatenate((val.scanned.counts, crowd.scanned.counts)),
        classes=np.concatenate((val.scanned.classes, crowd.scanned.classes)),
        boxes_xyxy=np.concatenate((val.scanned.boxes_xyxy, crowd.scanned.boxes_xyxy)),
        sizes_hw=np.concatenate((val.scanned.sizes_hw, crowd.scanned.sizes_hw)),
    )
    assert changed(checked(made_part("train", ordinary, 200, 0), dataclasses.replace(val, scanned=scanned))) == set()


def test_little_says_nothing_and_the_same_says_the_same() -> None:
    train = made_part("train", ordinary, 200, 0)
    assert checked(train, made_part("val", planted(SIZES), 10, 1)).drifts == []
    val = made_part("val", planted(SIZES), 60, 1)
    assert checked(train, val).drifts == checked(train, val).drifts


@pytest.mark.parametrize("kind", [CLASSES, OBJECT_COUNTS])
def test_images_that_label_some_classes_only_do_not_count(kind: str) -> None:
    """Of 300 images of val those that differ do not label all classes; with the others alone nothing differs."""
    train, half = made_part("train", ordinary, 200, 0), np.arange(300) % 2 - 1
    rng = [ordinary, planted(kind)]
    number = iter(range(300))
    val = made_part("val", lambda own: rng[next(number) % 2 == 0](own), 300, 1)
    assert kind in changed(checked(train, val))
    scanned = val.scanned._replace(unlabelled_sets=np.array([[True, False, False]]), set_of_image=-1 - half)
    assert kind not in changed(checked(train, dataclasses.replace(val, scanned=scanned)))
