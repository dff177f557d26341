"""Data types shared by all packages: dataset, sample, batch, detections, metrics.

DatasetSpec → DatasetIndex → Draw → Sample → Batch → predictions → Detections → Metrics.
Images are uint8 RGB (H, W, 3). Boxes are float32 xyxy in pixels of their image.

Legend: N images and M objects of a dataset; B images and T targets of a batch; D detections; C classes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from tessera.utils.bit_depth import PixelRule
from tessera.utils.seeding import ValFraction
from tessera.utils.text import table_row

if TYPE_CHECKING:  # `--check-data` does without torch
    import torch
    from torch import Tensor

Array = TypeVar("Array", float, Any)
FILL = 114  # grey level of letterbox padding and of empty areas of a warp
_MOST_ROWS = 20  # classes of a printed table
CocoId = int | str
# What a new run begins with: nothing, weights of synthetic shapes, of all its classes for the same model, other
# weights, or a classifier's.
Pretraining = Literal["scratch", "drawn", "known", "new", "backbone"]


class CocoIds(NamedTuple):
    """Ids of images and classes in a COCO file."""

    images: tuple[CocoId, ...]  # by image of an index
    categories: tuple[int, ...]  # by class


class Archive(NamedTuple):
    """An archive of a dataset."""

    url: str  # http or https
    into: str = ""  # subfolder of the datasets folder to unpack to


@dataclass(frozen=True)
class DatasetSpec:
    """A parsed and validated dataset YAML."""

    name: str  # the YAML's stem, such as "coco128"
    yaml_path: Path
    root: Path  # base of relative entries
    splits: dict[str, tuple[Path, ...]]  # "train", "val", "test" → absolute entries; one may be missing
    names: tuple[str, ...]  # of the classes, by index
    download: tuple[Archive, ...] = ()  # archives, in order
    pixels: PixelRule | None = None  # conversion of more than 8 bits to 8
    held_out: ValFraction | None = None  # the part of "train" that is "val"; both then have the same entries
    ignore: tuple[str, ...] = ()  # classes whose objects are ignored regions
    label_names: tuple[str, ...] = ()  # all names in labels, by class number of label files; () = `names`
    parts: tuple[tuple[str, ...], ...] = ()  # names in labels that are merged into each class; () = no merging
    excluded_names: tuple[str, ...] = ()  # names in labels that `classes` turns into background
    keypoints: int = 0  # numbers after the box in a row of a pose label, by `kpt_shape`
    # Split → the classes that each of its entries labels, None = all; {} if all entries label all classes.
    labelled: dict[str, tuple[tuple[str, ...] | None, ...]] = field(default_factory=dict)
    label_weights: bool = False  # whether the scores of train's labels weigh their objects in the loss

    @property
    def nc(self) -> int:
        """Number of classes."""
        return len(self.names)


def without_labels(sets: NDArray[np.bool_], set_of_image: NDArray[np.int32], images: int) -> NDArray[np.bool_]:
    """Return which images label no class, (N,), from `DatasetIndex.unlabelled_sets` and `set_of_image`."""
    return np.append(sets.all(1), False)[set_of_image] if len(set_of_image) else np.zeros(images, np.bool_)


@dataclass(frozen=True)
class DatasetIndex:
    """All images and labels of one split, as flat arrays, which workers share without copies."""

    split: str  # "train", "val" or "test"
    names: tuple[str, ...]  # of the classes, by index
    path_bytes: NDArray[np.uint8]  # (P,), the paths as the file system encodes them (UTF-8), concatenated
    path_offsets: NDArray[np.int64]  # (N + 1,), where each path starts
    sizes_hw: NDArray[np.int32]  # (N, 2), height and width in pixels, after EXIF orientation
    box_offsets: NDArray[np.int64]  # (N + 1,), where each image's objects start
    classes: NDArray[np.int32]  # (M,)
    boxes_xyxy: NDArray[np.float32]  # (M, 4), pixels of the original image
    segment_offsets: NDArray[np.int64]  # (M + 1,), where each object's polygon starts; (0,) without polygons
    segment_points: NDArray[np.float32]  # (K, 2), xy pixels of the original image
    digest: str  # of images, labels, names and times of files: key of caches on this machine
    problems: tuple[str, ...] = ()  # of the scan, one line each: "file:line: message"
    notes: tuple[str, ...] = ()  # likewise, without consequences
    # Ignored regions, where nothing is trained and predictions are no false positives: where each image's start
    # (N + 1,), or (0,) without any; class, -1 for any (R,); boxes (R, 4).
    ignored_offsets: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    ignored_classes: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    ignored_boxes_xyxy: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 4), np.float32))
    # Classes that images do not label, so that they may show such objects: the sets that occur, (K, C), and the set of
    # each image, -1 for none (N,), or (0,) if all images label all classes.
    unlabelled_sets: NDArray[np.bool_] = field(default_factory=lambda: np.zeros((0, 0), np.bool_))
    set_of_image: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    # (M,), weight of each object in the loss, 0 … 1; (0,) if all are 1.
    label_weights: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    coco_text: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))  # `CocoIds` as JSON, or (0,)
    excluded_summary: str = ""  # description of the objects that `classes` of the YAML excludes
    stored_hash: str = ""  # `content_hash`, if it was computed before
    pixels: PixelRule | None = None  # conversion of more than 8 bits to 8

    def __len__(self) -> int:
        return len(self.sizes_hw)

    def path(self, index: int) -> Path:
        """Return the path of image `index`."""
        start, end = self.path_offsets[index : index + 2]
        return Path(os.fsdecode(self.path_bytes[start:end].tobytes()))

    def labels(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Return classes (n,) and boxes (n, 4) of image `index`, xyxy pixels of the original image, as views."""
        start, end = self.box_offsets[index : index + 2]
        return self.classes[start:end], self.boxes_xyxy[start:end]

    def ignored(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Return classes (r,), -1 for any, and boxes (r, 4) of the ignored regions of image `index`."""
        start, end = self.ignored_offsets[index : index + 2] if len(self.ignored_offsets) else (0, 0)
        return self.ignored_classes[start:end], self.ignored_boxes_xyxy[start:end]

    def unlabelled_set(self, index: int) -> int:
        """Return the row of `unlabelled_sets` of image `index`; -1 if the image labels all classes."""
        return int(self.set_of_image[index]) if len(self.set_of_image) else -1

    def unlabelled(self, index: int) -> NDArray[np.bool_] | None:
        """Return which classes image `index` does not label, (C,); None if it labels all."""
        row = self.unlabelled_set(index)
        return None if row < 0 else self.unlabelled_sets[row]

    def labels_nothing(self) -> NDArray[np.bool_]:
        """Return which images label no class, (N,)."""
        return without_labels(self.unlabelled_sets, self.set_of_image, len(self))

    def images_per_label(self) -> NDArray[np.int64]:
        """Return for each class the number of images that label it, (C,)."""
        without = np.bincount(self.set_of_image[self.set_of_image >= 0], minlength=len(self.unlabelled_sets))
        return len(self) - without @ self.unlabelled_sets.reshape(len(without), len(self.names))

    def coco_ids(self) -> CocoIds | None:
        """Return the ids of the COCO file that the images come from; None without one."""
        if len(self.coco_text) == 0:
            return None
        images, categories = json.loads(self.coco_text.tobytes())
        return CocoIds(tuple(images), tuple(categories))

    def content_hash(self) -> str:
        """Return a hash of file names, image sizes, labels and class names, the same for every copy of the dataset."""
        if self.pixels:
            objects = replace(self, pixels=None).content_hash()
            return hashlib.blake2b(f"{objects} {self.pixels}".encode(), digest_size=8).hexdigest()
        if self.stored_hash:
            return self.stored_hash
        paths = self.path_bytes.tobytes()
        names = (paths[start:end].rpartition(b"/")[2] for start, end in pairwise(self.path_offsets.tolist()))
        state = hashlib.blake2b(b"\0".join(names), digest_size=8)
        state.update("\0".join(self.names).encode())
        labels = self.sizes_hw, self.box_offsets, self.classes, self.boxes_xyxy, self.segment_points
        regions = self.ignored_offsets, self.ignored_classes, self.ignored_boxes_xyxy  # empty ones add nothing
        for array in (*labels, *regions, self.unlabelled_sets, self.set_of_image, self.label_weights):
            state.update(np.ascontiguousarray(array).data)
        return state.hexdigest()

    def segments(self, index: int) -> list[NDArray[np.float32]]:
        """Return a polygon (k, 2) for each box of image `index` (k = 0: none); [] in a dataset without any."""
        if len(self.segment_offsets) == 0:
            return []
        start, end = self.box_offsets[index : index + 2]
        return [self.segment_points[a:b] for a, b in pairwise(self.segment_offsets[start : end + 1].tolist())]


@dataclass(frozen=True)
class Draw:
    """One position in the training stream."""

    index: int  # image of the dataset
    position: int  # in the epoch's global order; with the epoch it seeds the sample's augmentation
    epoch: int  # from 0
    size_hw: tuple[int, int]  # of the sample in pixels, multiples of the stride
    # Images near this position, itself included, and their positions: candidates for a mosaic.
    mosaic_candidates: Mapping[int, int] = field(default_factory=dict)


@dataclass
class Sample:
    """One image and its objects."""

    image: NDArray[np.uint8]  # (H, W, 3) RGB
    boxes_xyxy: NDArray[np.float32]  # (n, 4) pixels
    # (n,), -1 of an ignored region, -2 - k of a region whose image has row k of `DatasetIndex.unlabelled_sets`
    classes: NDArray[np.int32]
    # Polygons (k, 2) in pixels, one per object (k = 0: none), or [] in a dataset without any.
    segments: list[NDArray[np.float32]] = field(default_factory=list)
    weights: NDArray[np.float32] | None = None  # (n,), of each in the loss, 1 of a region; None = all 1

    def all_weights(self) -> NDArray[np.float32]:
        """Return the weights (n,)."""
        return np.ones(len(self.classes), np.float32) if self.weights is None else self.weights


@dataclass(frozen=True)
class Batch:
    """Samples as tensors."""

    images: Tensor  # uint8 (B, H, W, 3) RGB; `permute(0, 3, 1, 2)` is a channels-last view
    # float32 (T, 6): image, class, x1, y1, x2, y2 in pixels of `images`. Class -1 is an ignored region, class -2 - k a
    # region where the classes of row k of `unlabelled` have no labels. With label weights (T, 7): the weight is last.
    targets: Tensor
    indices: Tensor  # int64 (B,), images of the dataset
    sizes_hw: Tensor  # int64 (B, 2), the original sizes
    # float64 (B, 4), rows scale_x, scale_y, left, top of a letterbox: x_batch = x_original · scale_x + left. NaN in
    # training.
    placements: Tensor
    # Images that did not decode → reason. In training they are grey without objects, in validation missing.
    undecodable: Mapping[int, str] = field(default_factory=dict)
    unlabelled: Tensor | None = None  # bool (K, C); None if all images label all classes
    # All images that were read: of the samples, their mosaics, and the undecodable ones.
    loaded: AbstractSet[int] = frozenset()

    def __len__(self) -> int:
        return self.images.shape[0]

    def images_on(self, device: torch.device) -> Tensor:
        """Return the images as float (B, 3, H, W) in 0 … 1 on `device`, in channels-last memory format."""
        return self.images.to(device).permute(0, 3, 1, 2).float().div_(255)

    def pin_memory(self) -> Batch:
        """Copy the images into page-locked memory; called by torch's DataLoader."""
        return replace(self, images=self.images.pin_memory())  # the rest is read on the host


@dataclass(frozen=True)
class Detections:
    """Detections of one image."""

    boxes_xyxy: Tensor  # float32 (D, 4) pixels
    scores: Tensor  # float32 (D,), descending
    classes: Tensor  # int64 (D,)

    def __len__(self) -> int:
        return self.scores.shape[0]

    def select(self, rows: Tensor) -> Detections:
        """Return those of `rows`, bool (D,)."""
        return Detections(self.boxes_xyxy[rows], self.scores[rows], self.classes[rows])

    def cpu(self) -> Detections:
        """Return the detections on the host."""
        return Detections(self.boxes_xyxy.cpu(), self.scores.cpu(), self.classes.cpu())


@dataclass(frozen=True)
class Metrics:
    """Metrics of a validation, equal on every rank. C' classes have objects, of nc classes.

    Attributes:
        precision, recall: means over the C' classes at `confidence`.
        map50, map: mean average precision at IoU 0.5, and over IoU 0.5:0.05:0.95.
        class_ids: int64 (C',), the classes that have objects.
        per_class: float64 (C', 4), precision, recall, AP50 and AP of `class_ids`.
        images_per_class, objects_per_class: int64 (nc,).
        images, objects: totals.
        confidence: that of the best mean F1, or as given.
        class_confidences: float64 (nc,), that of each class's best F1, or of all classes without detections.
        losses: one for each of the loss's names; () if no loss was computed.
        speed_ms: milliseconds per image of preprocessing, inference and NMS.
        names: class names by index; () if unknown.
    """

    precision: float
    recall: float
    map50: float
    map: float
    class_ids: NDArray[np.int64]
    per_class: NDArray[np.float64]
    images_per_class: NDArray[np.int64]
    objects_per_class: NDArray[np.int64]
    images: int
    objects: int
    confidence: float
    class_confidences: NDArray[np.float64]
    losses: tuple[float, ...] = ()
    speed_ms: tuple[float, float, float] = (0.0,) * 3
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return a table: all classes, and each class with ground truth if they are few."""
        confidences = [self.confidence]
        if len(self.class_ids) <= _MOST_ROWS:
            confidences += self.class_confidences[self.class_ids].tolist()
        header = table_row("class", "images", "objects", "P", "R", "mAP50", "mAP50-95", "best conf")
        return "\n".join([header, *(table_row(*row, c) for c, row in zip(confidences, self.rows(), strict=False))])

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """Yield name, images, objects, precision, recall, AP50, AP of all classes, then of each with ground truth."""
        yield "all", self.images, self.objects, self.precision, self.recall, self.map50, self.map
        for c, values in zip(self.class_ids.tolist(), self.per_class.tolist(), strict=True):
            name = self.names[c] if self.names else str(c)
            yield name, int(self.images_per_class[c]), int(self.objects_per_class[c]), *values

    def class_maps(self) -> tuple[float, ...]:
        """Return the AP of every class; the mean for classes without ground truth."""
        maps = np.full(len(self.objects_per_class), self.map)
        maps[self.class_ids] = self.per_class[:, 3]
        return tuple(maps.tolist())

    @property
    def fitness(self) -> float:
        """Score that selects `best.pt` and ends a training early, unless `--metric` names another."""
        return fitness(self.map50, self.map)


def fitness(map50: Array, map: Array) -> Array:
    """Return 0.1 mAP50 + 0.9 mAP50-95, of one validation or of a column of them."""
    return 0.1 * map50 + 0.9 * map
