"""The user's own transforms of training samples (`--transforms`), at their places among the stages of pipeline.py.

    def transform(sample: Sample, rng: np.random.Generator) -> Sample

It gets and returns an image, uint8 (H, W, 3) RGB, with boxes, classes and, before the mosaic, polygons, and weights if
the dataset has label weights; it may change them in place. Its generator follows from the seed, the epoch, the position
and its own name: the stream of samples stays a pure function of them, and no other random number changes.
"""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera.data.augment.geometry import clip_boxes
from tessera.utils.errors import ConfigError, UserError, did_you_mean
from tessera.utils.seeding import sample_rng
from tessera.utils.text import one_line, shown
from tessera.utils.types import Draw, Sample
from tessera.utils.user_parts import load_part

FLAG = "--transforms"
STAGES = ("mosaic", "mixup", "hsv", "albumentations")  # in this order; a transform has its place before one
END = "end"  # after all stages

Apply = Callable[[str, Sample], Sample]


class OwnTransform(NamedTuple):
    """A transform of the user's own."""

    name: str  # module:name or module:name@stage
    stage: str  # that it precedes, or END
    function: Callable[[Sample, np.random.Generator], Sample]


def load_transforms(names: Sequence[str]) -> tuple[OwnTransform, ...]:
    """Import `module:name` or `module:name@stage`, in the order in which transforms of one place are applied.

    Raises:
        ConfigError: no such stage or function, or one given twice at the same place.
        UserError: its module raises while it is imported.
    """
    found = []
    for number, name in enumerate(names):
        part, at, stage = name.partition("@")
        if at and stage not in STAGES:
            hint = did_you_mean(stage, STAGES)
            raise ConfigError(f"{FLAG} {name}: unknown stage {shown(stage)}.{hint} Stages: {', '.join(STAGES)}.")
        if name in names[:number]:
            raise ConfigError(f"{FLAG}: found {name} twice, expected each once at a place.")
        function = load_part(part, FLAG)
        if not callable(function):
            raise ConfigError(f"{FLAG} {name}: found {shown(str(function))}, expected a function.")
        found.append(OwnTransform(name, stage or END, function))
    return tuple(found)


def transforms_of(transforms: Sequence[OwnTransform], seed: int, draw: Draw, nc: int) -> Apply:
    """Return a function that applies the transforms of a place to a sample of `draw`, for a dataset of `nc` classes."""
    rngs: dict[str, np.random.Generator] = {}

    def apply(stage: str, sample: Sample) -> Sample:
        for own in transforms:
            if own.stage == stage:
                if own.name not in rngs:
                    key = hashlib.blake2b(f"{seed} {own.name}".encode(), digest_size=8).digest()
                    rngs[own.name] = sample_rng(int.from_bytes(key), draw.epoch, draw.position, "transform")
                sample = _transformed(own, sample, rngs[own.name], nc)
        return sample

    return apply


def _transformed(own: OwnTransform, sample: Sample, rng: np.random.Generator, nc: int) -> Sample:
    if own.stage == STAGES[0]:  # as loaded: memory of the cache and of the index, of any size
        sample = Sample(sample.image.copy(), sample.boxes_xyxy, sample.classes.copy(), sample.segments, sample.weights)
    out, least = sample.image, int(sample.classes.min(initial=-1))
    weights = sample.weights
    try:
        found = own.function(sample, rng)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = one_line(f"{type(error).__name__}: {error}", 200)
        raise UserError(f"{FLAG} {own.name}: it raised {text} ({place.filename}:{place.lineno}).") from error
    if wrong := _mistake(found, None if own.stage == STAGES[0] else out.shape, (least, nc), weights):
        raise UserError(f"{FLAG} {own.name}: it returned {wrong}.")
    if own.stage != STAGES[0] and found.image is not out:
        np.copyto(out, found.image)  # a row of the batch
        found.image = out
    boxes = clip_boxes(found.boxes_xyxy, found.image.shape[:2])
    keep = np.all(boxes[:, 2:] > boxes[:, :2], axis=1)
    segments = [part for part, kept in zip(found.segments, keep.tolist(), strict=False) if kept]
    weights = found.weights[keep] if found.weights is not None and _has_weights(found, weights) else None
    return Sample(found.image, boxes[keep], found.classes[keep], segments, weights)


def _has_weights(found: Sample, given: NDArray[np.float32] | None) -> bool:
    """Return whether weights of a transform's result count: it set them, or some that were `given` are below 1."""
    is_set = found.weights is not None and found.weights is not given
    return is_set or (given is not None and bool((given < 1).any()))


def _mistake(
    found: object, shape: tuple[int, ...] | None, classes: tuple[int, int], weights: NDArray[np.float32] | None
) -> str:
    """Return what is wrong with a transform's result, and what is expected; "" if nothing is.

    `classes` are the least class, and the number of those from 0 on; `weights` those that were given.
    """
    least, nc = classes
    if not isinstance(found, Sample):
        return f"{type(found).__name__}, expected the Sample"
    count = len(found.classes) if isinstance(found.classes, np.ndarray) else 0
    arrays: list[tuple[str, type, tuple[Any, ...]]] = [
        ("image", np.uint8, shape or ("H", "W", 3)),
        ("classes", np.int32, (count,)),
        ("boxes_xyxy", np.float32, (count, 4)),
    ]
    if _has_weights(found, weights):
        arrays.append(("weights", np.float32, (count,)))
    for name, dtype, wanted in arrays:
        value = getattr(found, name)
        expected = f"{name}: expected {np.dtype(dtype)} {wanted}".replace("'", "")
        if not isinstance(value, np.ndarray):
            return f"{type(value).__name__} as {expected}"
        is_wanted = len(value.shape) == len(wanted) and all(
            a == b or (isinstance(b, str) and a > 0) for a, b in zip(value.shape, wanted, strict=True)
        )
        if value.dtype != dtype or not is_wanted:
            return f"{value.dtype} {value.shape} as {expected}"
    boxes = found.boxes_xyxy
    if not np.isfinite(boxes).all() or (boxes[:, 2:] < boxes[:, :2]).any():
        at = int((~np.isfinite(boxes).all(1) | (boxes[:, 2:] < boxes[:, :2]).any(1)).argmax())
        return f"the box {boxes[at].tolist()}, expected finite x1 ≤ x2 and y1 ≤ y2 in pixels of the image"
    if count and not (found.classes.min() >= least and found.classes.max() < nc):
        regions = "-1 = ignored" if least == -1 else f"-1 = ignored, or {least} to -2 of the regions as given"
        return f"the classes {found.classes.min()} to {found.classes.max()}, expected 0 to {nc - 1}, or {regions}"
    if _has_weights(found, weights) and not np.all((found.all_weights() >= 0) & (found.all_weights() <= 1)):
        return "weights outside of 0 to 1"
    if found.segments and len(found.segments) != count:
        return f"{len(found.segments)} segments for {count} objects, expected one for each, or []"
    return ""
