"""Transforms of the user's own: places, random numbers, checks; the stream for any workers and ranks, and resumed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.data.augment.transforms import END, STAGES, OwnTransform, load_transforms, transforms_of
from tessera.utils.config import TrainConfig
from tessera.utils.errors import ConfigError, UserError
from tessera.utils.types import DatasetIndex, Draw, Sample
from tests.data.augment.made_scenes import dataset_of_shapes as dataset
from tests.data.augment.made_scenes import trained
from tests.data.augment.test_pipeline import LOW
from tests.data.feed.made_rank import rank
from tests.data.feed.test_loader import hyp, index, many_processors, stream, train_loader  # noqa: F401 - fixtures

HERE = __name__


def noise(sample: Sample, rng: np.random.Generator) -> Sample:
    sample.image[:] = np.clip(sample.image + rng.normal(0, 9, sample.image.shape), 0, 255)
    return sample


def mirror(sample: Sample, rng: np.random.Generator) -> Sample:
    """Returns new arrays, and boxes that reach beyond the image by rounding."""
    width = sample.image.shape[1]
    boxes = sample.boxes_xyxy.copy()
    boxes[:, [0, 2]] = width - boxes[:, [2, 0]] + np.float32(1e-4)
    segments = [np.stack([width - part[:, 0], part[:, 1]], 1) for part in sample.segments]
    return Sample(np.ascontiguousarray(sample.image[:, ::-1]), boxes, sample.classes, segments)


def half(sample: Sample, rng: np.random.Generator) -> Sample:
    """The left half, of another size: only before the mosaic."""
    return Sample(sample.image[:, : max(sample.image.shape[1] // 2, 1)], sample.boxes_xyxy, sample.classes)


def test_each_place_sees_what_the_stages_before_it_made() -> None:
    strong = dataclasses.replace(LOW, mixup=1.0)
    seen: list[tuple[str, tuple[int, ...], bool]] = []

    def at(stage: str) -> OwnTransform:
        def look(sample: Sample, rng: np.random.Generator) -> Sample:
            seen.append((stage, sample.image.shape, bool(sample.segments)))
            return sample

        return OwnTransform(f"look@{stage}", stage, look)

    own = [at(stage) for stage in (*STAGES, END)][::-1]
    after, before = trained(dataset(0), strong, 3, transforms=own), trained(dataset(0), strong, 3)
    assert (after.image == before.image).all() and (after.boxes_xyxy == before.boxes_xyxy).all()
    expected = [*["mosaic"] * 4, "mixup", *["mosaic"] * 4, "mixup", "hsv", "albumentations", "end"]
    assert [stage for stage, _, _ in seen] == expected
    assert all(shape == (64, 64, 3) and not outlined for stage, shape, outlined in seen if stage != "mosaic")
    assert any(outlined for stage, _, outlined in seen if stage == "mosaic")


@pytest.mark.parametrize("stage", [*STAGES, END])
@pytest.mark.parametrize("function", [noise, mirror])
def test_pure_in_seed_epoch_and_position_without_changing_other_draws(stage: str, function: Any) -> None:
    source, own = dataset(0), OwnTransform(f"a:b@{stage}", stage, function)
    originals = [sample.image.copy() for sample in source.samples]
    first, again = (trained(source, LOW, 5, transforms=[own]) for _ in range(2))
    assert (first.image == again.image).all() and (first.boxes_xyxy == again.boxes_xyxy).all()
    assert all((a == b.image).all() for a, b in zip(originals, source.samples, strict=True))
    without = trained(source, LOW, 5)
    assert (first.image != without.image).any()
    if function is noise:  # boxes depend on the draws of mosaic and warp alone
        assert (first.boxes_xyxy == without.boxes_xyxy).all()
        both = trained(source, LOW, 5, transforms=[OwnTransform("c:d", END, lambda s, rng: s), own])
        assert (both.image == first.image).all()
        other = trained(source, LOW, 5, transforms=[own._replace(name="a:c")])
        assert (other.image != first.image).any(), "another name has another generator"
    if stage == END and function is mirror:
        np.testing.assert_array_equal(first.image, without.image[:, ::-1])
    assert (first.boxes_xyxy >= 0).all() and (first.boxes_xyxy <= 64).all()


def test_before_the_mosaic_an_image_may_change_its_size() -> None:
    own = OwnTransform("a:half@mosaic", "mosaic", half)
    assert (trained(dataset(0), LOW, 5, transforms=[own]).image != trained(dataset(0), LOW, 5).image).any()


def bad(**changes: Callable[[Sample], Any]) -> Callable[[Sample, np.random.Generator], Sample]:
    return lambda sample, rng: dataclasses.replace(sample, **{k: change(sample) for k, change in changes.items()})


BOX = np.array([[1, 1, 5, 5]], np.float32)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda sample, rng: sample.image, "ndarray, expected the Sample"),
        (bad(image=lambda s: s.image / 255), "float64 (64, 64, 3) as image: expected uint8 (64, 64, 3)"),
        (bad(image=lambda s: s.image[:5]), "uint8 (5, 64, 3) as image: expected uint8 (64, 64, 3)"),
        (bad(image=lambda s: s.image.tolist()), "list as image: expected uint8"),
        (bad(boxes_xyxy=lambda s: s.boxes_xyxy.astype(float)), "float64 (1, 4) as boxes_xyxy: expected float32 (1, 4)"),
        (bad(boxes_xyxy=lambda s: BOX[:0]), "float32 (0, 4) as boxes_xyxy: expected float32 (1, 4)"),
        (bad(boxes_xyxy=lambda s: BOX[:, ::-1]), "the box [5.0, 5.0, 1.0, 1.0], expected finite x1 ≤ x2"),
        (bad(boxes_xyxy=lambda s: BOX * np.float32("nan")), "the box [nan, nan, nan, nan], expected finite"),
        (bad(classes=lambda s: np.array([3], np.int32)), "the classes 3 to 3, expected 0 to 2, or -1 = ignored"),
        (bad(classes=lambda s: s.classes.astype(int)), "int64 (1,) as classes: expected int32 (1,)"),
        (bad(segments=lambda s: [BOX, BOX]), "2 segments for 1 objects"),
        (lambda sample, rng: 1 // 0, "it raised ZeroDivisionError: integer division or modulo by zero"),
    ],
)
def test_results_are_checked(function: Any, message: str) -> None:
    apply = transforms_of([OwnTransform("m:f", END, function)], 0, Draw(0, 0, 0, (64, 64)), 3)
    with pytest.raises(UserError, match="--transforms m:f: ") as raised:
        apply(END, Sample(np.zeros((64, 64, 3), np.uint8), BOX, np.zeros(1, np.int32)))
    assert message in str(raised.value)
    if "raised" in message:
        assert Path(__file__).name in str(raised.value)


def test_names() -> None:
    given = [noise, (noise, "hsv"), f"{HERE}:mirror@mosaic"]
    names = (f"{HERE}:noise", f"{HERE}:noise@hsv", f"{HERE}:mirror@mosaic")
    config = TrainConfig(transforms=given)  # type: ignore[arg-type]
    assert config.transforms == names and TrainConfig(**config.as_dict()).transforms == names
    assert TrainConfig(transforms=noise).transforms == names[:1]  # type: ignore[arg-type]
    assert TrainConfig.from_args(["--transforms", *names]) == {"transforms": [*names]}
    loaded = load_transforms(names)
    assert [(own.stage, own.function) for own in loaded] == [(END, noise), ("hsv", noise), ("mosaic", mirror)]
    for wrong, message in (
        ([f"{HERE}:noise@hvs"], "unknown stage 'hvs'. Did you mean 'hsv'? Stages: mosaic, mixup, hsv, albumentations"),
        ([f"{HERE}:noise"] * 2, "twice"),
        ([f"{HERE}:HERE"], "expected a function"),
        (["nowhere:noise"], "no module nowhere"),
    ):
        with pytest.raises(ConfigError, match="--transforms") as raised:
            load_transforms(wrong)
        assert message in str(raised.value)


@pytest.mark.usefixtures("many_processors")
def test_the_stream_for_any_workers_and_ranks_and_resumed(index: DatasetIndex, hyp: Any) -> None:  # noqa: F811
    own = {"transforms": (f"{HERE}:noise@mosaic", f"{HERE}:mirror")}
    alone = stream(train_loader(index, hyp, **own))
    assert alone != stream(train_loader(index, hyp))
    assert stream(train_loader(index, hyp, workers=2, **own)) == alone
    assert stream(train_loader(index, hyp, workers=1, **own), (1, 1)) == alone[3:]
    shares = [stream(train_loader(index, hyp, rank(number, 2), **own)) for number in range(2)]
    for whole, first, second in zip(alone, *shares, strict=True):
        assert first[0] + second[0] == whole[0]  # pixels


def test_an_error_in_a_worker_names_the_function(index: DatasetIndex, hyp: Any) -> None:  # noqa: F811
    with pytest.raises(UserError, match=f"--transforms {HERE}:half: it returned uint8"):
        stream(train_loader(index, hyp, workers=1, transforms=(f"{HERE}:half",)))
