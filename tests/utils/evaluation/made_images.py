"""Images with detections and objects, for the tests of the metrics."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tessera.analysis.error_counts import Errors, count_errors
from tessera.utils.evaluation.average_precision import Ranking, ranking_of
from tessera.utils.evaluation.matching import Matches, Regions, match_image
from tessera.utils.types import DatasetIndex, Detections
from tests.data.made_index import make_index

Image = tuple[Detections, NDArray[np.float32], NDArray[np.int32]]


def make_image(boxes: object, scores: object, classes: object, target_boxes: object, target_classes: object) -> Image:
    return (
        Detections(
            torch.as_tensor(boxes, dtype=torch.float32).reshape(-1, 4),
            torch.as_tensor(scores, dtype=torch.float32),
            torch.as_tensor(classes, dtype=torch.int64),
        ),
        np.array(target_boxes, np.float32).reshape(-1, 4),
        np.array(target_classes, np.int32).reshape(-1),
    )


def random_image(
    rng: np.random.Generator, nc: int, *, coarse: bool, crowded: bool = False, distinct: bool = False
) -> Image:
    """Objects and detections scattered around them; coarse boxes and scores make ties of IoU and of score common."""
    n_targets = int(rng.choice([0, 1, 2, 6, 25])) if crowded else int(rng.integers(0, 5))
    n_detections = int(rng.integers(0, 120)) if crowded else int(rng.integers(0, 15))
    area = 40 if crowded else 120
    corner = rng.integers(0, area, (n_targets, 2))
    targets = np.concatenate((corner, corner + rng.integers(10, 60, (n_targets, 2))), 1).astype(np.float32)
    target_classes = rng.integers(0, max(nc - 1, 1), n_targets)  # the last class has no objects
    if n_targets:
        source = rng.integers(0, n_targets, n_detections)
        shift = rng.choice([0, 0, 2, 5, 12], (n_detections, 4)) * rng.choice([-1, 1], (n_detections, 4))
        boxes = targets[source] + shift + (0 if coarse else rng.normal(0, 2, (n_detections, 4)))
        classes = np.where(rng.random(n_detections) < 0.7, target_classes[source], rng.integers(0, nc, n_detections))
    else:
        boxes = rng.integers(0, 50, (n_detections, 4)).astype(np.float64)
        classes = rng.integers(0, nc, n_detections)
    boxes[:, 2:] = np.maximum(boxes[:, 2:], boxes[:, :2] + 1)
    scores = rng.integers(1, 9, n_detections) / 8 if coarse and not distinct else rng.random(n_detections)
    order = np.argsort(-scores, kind="stable")
    return make_image(boxes[order], scores[order], classes[order], targets, target_classes)


def random_images(seed: int, n: int, nc: int, **kinds: bool) -> list[Image]:
    rng = np.random.default_rng(seed)
    return [random_image(rng, nc, **kinds) for _ in range(n)]


def random_regions(images: list[Image], seed: int, nc: int) -> list[Regions]:
    """Up to three regions an image, around and beside its objects, some of any class."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in images:
        count = int(rng.integers(0, 4))
        corner = rng.integers(0, 80, (count, 2))
        boxes = np.concatenate((corner, corner + rng.integers(5, 90, (count, 2))), 1)
        found.append((rng.integers(-1, nc, count).astype(np.int32), boxes.astype(np.float32)))
    return found


def accumulate(images: list[Image], regions: Sequence[Regions] = ()) -> Ranking:
    """Match images, with the ignored regions of each."""
    return ranked([share(images, regions=regions)])


def share(images: list[Image], indices: Sequence[int] | None = None, regions: Sequence[Regions] = ()) -> Matches:
    """What a rank collects: all images, or those of `indices`."""
    chosen = range(len(images)) if indices is None else indices
    return Matches.joined([match_image(*images[i], regions[i] if regions else None, image=i) for i in chosen])


def flags(bits: NDArray[np.uint16]) -> NDArray[np.bool_]:
    """Bits (D,) of `Matches` as (D, T)."""
    return bits[:, None] >> np.arange(10) & 1 == 1


def gathered(shares: Sequence[Matches]) -> Matches:
    """What the ranks send each other and join."""
    return Matches.joined([pickle.loads(pickle.dumps(own)) for own in shares])


def ranked(shares: Sequence[Matches]) -> Ranking:
    return ranking_of(gathered(shares))


def index_of(images: list[Image], nc: int) -> DatasetIndex:
    """A split of these images, of which there are no files."""
    return replace(
        make_index([(500, 500)] * len(images), classes=[classes.tolist() for *_, classes in images]),
        split="val",
        names=tuple(f"class {c}" for c in range(nc)),
        boxes_xyxy=np.concatenate([np.zeros((0, 4), np.float32), *(boxes for _, boxes, _ in images)]),
    )


def errors_of(
    images: list[Image],
    nc: int,
    confidence: float = 0.0,
    shares: Sequence[Sequence[int]] = (),
    regions: Sequence[Regions] = (),
) -> Errors:
    """What a validation got wrong, of ranks that have these shares, or of one."""
    found = gathered([share(images, indices, regions) for indices in shares or [range(len(images))]])
    return count_errors(found, index_of(images, nc), confidence)


def matrix_of(errors: Errors) -> NDArray[np.int64]:
    """The whole confusion matrix: rows predicted, columns true, background last."""
    return errors.confusion.grouped(np.arange(errors.confusion.nc + 1))


def assert_same_bits(a: Any, b: Any) -> None:
    """Two `Ranking`s or `Errors` are equal bit by bit."""
    if is_dataclass(a):
        a, b = ([getattr(side, item.name) for item in fields(a)] for side in (a, b))
    if isinstance(a, (list, tuple)):
        for own, other in zip(a, b, strict=True):
            assert_same_bits(own, other)
        return
    assert np.asarray(a).dtype == np.asarray(b).dtype
    np.testing.assert_array_equal(a, b)
