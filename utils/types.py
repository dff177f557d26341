"""The types that cross packages.

DatasetSpec → DatasetIndex → Draw → Sample → Batch → predictions → Detections → Metrics.
Images are uint8 RGB, height × width × 3. Boxes are float32 xyxy pixels of the image they stand beside.

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
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tessera.utils.bit_depth import PixelRule
from tessera.utils.seeding import HeldOut
from tessera.utils.text import table_row

Array = TypeVar("Array", float, Any)
FILL = 114  # grey level of letterbox padding and of what a warp leaves empty
_MOST_ROWS = 20  # classes that a printed table shows one by one
CocoId = int | str
# A fresh run starts from nothing, weights of all its classes in their own model, others, or the body of a classifier.
Start = Literal["scratch", "known", "new", "body"]


class CocoIds(NamedTuple):
    """What a COCO file calls its images and classes."""

    images: tuple[CocoId, ...]  # of an index, in its order
    categories: tuple[int, ...]  # by class


class Archive(NamedTuple):
    """An archive of a dataset."""

    url: str  # http or https
    into: str = ""  # the folder it is unpacked to, below the folder of datasets; "" for that folder itself


@dataclass(frozen=True)
class DatasetSpec:
    """A dataset YAML, read and checked."""

    name: str  # the YAML's stem, such as "coco128"
    yaml_path: Path
    root: Path  # the folder that relative entries start from
    splits: dict[str, tuple[Path, ...]]  # "train", "val", "test" → absolute entries; one may be missing
    names: tuple[str, ...]  # of the classes, by index
    download: tuple[Archive, ...] = ()  # archives, in order
    pixels: PixelRule | None = None  # how levels of more than 8 bits become 8
    held_out: HeldOut | None = None  # what of "train" is "val"; the two then have the same entries
    ignore: tuple[str, ...] = ()  # names of classes whose objects are ignored regions
    label_names: tuple[str, ...] = ()  # all names in labels, by the numbers of label files; () where these are `names`
    parts: tuple[tuple[str, ...], ...] = ()  # the names in labels that each class is made of; () where each is its own
    left_out: tuple[str, ...] = ()  # names in labels whose objects are background, as `classes` does not keep them
    keypoints: int = 0  # how many numbers follow the box in a label file's row of a pose, by `kpt_shape`

    @property
    def nc(self) -> int:
        """Number of classes."""
        return len(self.names)


@dataclass(frozen=True)
class DatasetIndex:
    """All images and labels of one split, as flat arrays (shared by workers without copies)."""

    split: str  # "train", "val" or "test"
    names: tuple[str, ...]  # of the classes, by index
    path_bytes: NDArray[np.uint8]  # (P,), the paths as the file system encodes them (UTF-8), end to end
    path_offsets: NDArray[np.int64]  # (N + 1,), where each path starts
    sizes_hw: NDArray[np.int32]  # (N, 2), height and width in pixels, after EXIF orientation
    box_offsets: NDArray[np.int64]  # (N + 1,), where each image's objects start
    classes: NDArray[np.int32]  # (M,)
    boxes_xyxy: NDArray[np.float32]  # (M, 4), pixels of the original image
    segment_offsets: NDArray[np.int64]  # (M + 1,), where each object's polygon starts; (0,) where no label is one
    segment_points: NDArray[np.float32]  # (K, 2), xy pixels of the original image
    digest: str  # changes with images, labels, names, and times of files: the key of caches, on this machine alone
    problems: tuple[str, ...] = ()  # what the scan found, one line each: "file:line: what"
    notes: tuple[str, ...] = ()  # likewise, of what costs nothing
    # Ignored regions, in which nothing is trained on, and predictions are no false positives: where each image's start
    # (N + 1,), or (0,) where there are none; the class that each is about, -1 for any (R,); boxes (R, 4).
    ignored_offsets: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    ignored_classes: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    ignored_boxes_xyxy: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 4), np.float32))
    coco_text: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))  # `CocoIds` as JSON, or (0,)
    left_out: str = ""  # what `classes` of the YAML leaves out of the labels, in words
    stored_hash: str = ""  # `content_hash`, where it was computed before
    pixels: PixelRule | None = None  # for levels of more than 8 bits, part of no file but the dataset's YAML

    def __len__(self) -> int:
        return len(self.sizes_hw)

    def path(self, index: int) -> Path:
        """Path of image `index`."""
        start, end = self.path_offsets[index : index + 2]
        return Path(os.fsdecode(self.path_bytes[start:end].tobytes()))

    def labels(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Classes (n,) and boxes (n, 4), xyxy pixels of the original image, of image `index`: views, not copies."""
        start, end = self.box_offsets[index : index + 2]
        return self.classes[start:end], self.boxes_xyxy[start:end]

    def ignored(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Classes (r,), -1 for any, and boxes (r, 4) of the ignored regions of image `index`, as `labels`."""
        start, end = self.ignored_offsets[index : index + 2] if len(self.ignored_offsets) else (0, 0)
        return self.ignored_classes[start:end], self.ignored_boxes_xyxy[start:end]

    def coco_ids(self) -> CocoIds | None:
        """Ids of the COCO file that the images come from; None where they do not."""
        if len(self.coco_text) == 0:
            return None
        images, categories = json.loads(self.coco_text.tobytes())
        return CocoIds(tuple(images), tuple(categories))

    def content_hash(self) -> str:
        """Hash of what is trained on: file names, image sizes, labels, class names; not where or when it was copied."""
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
        regions = self.ignored_offsets, self.ignored_classes, self.ignored_boxes_xyxy  # without any nothing is added
        for array in (*labels, *regions):
            state.update(np.ascontiguousarray(array).data)
        return state.hexdigest()

    def segments(self, index: int) -> list[NDArray[np.float32]]:
        """Polygons (k, 2) of image `index` in the order of its boxes (k = 0: none); [] in a dataset without any."""
        if len(self.segment_offsets) == 0:
            return []
        start, end = self.box_offsets[index : index + 2]
        return [self.segment_points[a:b] for a, b in pairwise(self.segment_offsets[start : end + 1].tolist())]


@dataclass(frozen=True)
class Draw:
    """One place in the training stream."""

    index: int  # image of the dataset
    position: int  # place in the epoch's global order; with the epoch it keys the sample's randomness
    epoch: int  # from 0; it also decides whether mosaic is still on
    size_hw: tuple[int, int]  # of the sample in pixels, multiples of the stride
    # Images near this place in the epoch's order, itself too, and their places: a mosaic's partners.
    neighbours: Mapping[int, int] = field(default_factory=dict)


@dataclass
class Sample:
    """One image and its objects."""

    image: NDArray[np.uint8]  # (H, W, 3) RGB
    boxes_xyxy: NDArray[np.float32]  # (n, 4) pixels
    classes: NDArray[np.int32]  # (n,), -1 of an ignored region
    # Polygons (k, 2) in pixels, one an object (k = 0 where it has none), or [] where the dataset has none.
    segments: list[NDArray[np.float32]] = field(default_factory=list)


@dataclass(frozen=True)
class Batch:
    """Samples as tensors."""

    images: Tensor  # uint8 (B, H, W, 3) RGB; `permute(0, 3, 1, 2)` is a channels-last view
    targets: (
        Tensor  # float32 (T, 6), rows image, class, x1, y1, x2, y2 in pixels of `images`; class -1 = ignored region
    )
    indices: Tensor  # int64 (B,), images of the dataset
    sizes_hw: Tensor  # int64 (B, 2), the original sizes
    # float64 (B, 4), rows scale_x, scale_y, left, top: x_batch = x_original · scale_x + left. Only validation's
    # letterbox can be undone; after augmentation the rows are NaN.
    placements: Tensor
    # Images that did not decode → why. In training they are grey without objects, in validation missing.
    left_out: Mapping[int, str] = field(default_factory=dict)
    # All images that were looked at for it: of the samples, their partners in mosaics, and those left out.
    loaded: AbstractSet[int] = frozenset()

    def __len__(self) -> int:
        return self.images.shape[0]

    def images_on(self, device: torch.device) -> Tensor:
        """The images as float (B, 3, H, W) in 0 … 1 on `device`: a channels-last view of what the loader made."""
        return self.images.to(device).permute(0, 3, 1, 2).float().div_(255)

    def pin_memory(self) -> Batch:
        """Copy into page-locked memory; called by torch's DataLoader."""
        return replace(self, images=self.images.pin_memory())  # the rest is read on the host


@dataclass(frozen=True)
class Detections:
    """What was found on one image."""

    boxes_xyxy: Tensor  # float32 (D, 4) pixels
    scores: Tensor  # float32 (D,), descending
    classes: Tensor  # int64 (D,)

    def __len__(self) -> int:
        return self.scores.shape[0]


@dataclass(frozen=True)
class Metrics:
    """Result of a validation, the same on every rank."""

    precision: float  # mean over the classes at `confidence`, as recall
    recall: float
    map50: float  # mean average precision at IoU 0.5
    map: float  # and over 0.5:0.05:0.95
    class_ids: NDArray[np.int64]  # (C',), classes that have objects
    per_class: NDArray[np.float64]  # (C', 4), rows precision, recall, AP50, AP of `class_ids`
    images_per_class: NDArray[np.int64]  # (nc,)
    objects_per_class: NDArray[np.int64]  # (nc,)
    images: int
    objects: int
    confidence: float  # where the mean smoothed F1 is best
    class_confidences: NDArray[np.float64]  # (nc,), where each class's F1 is best; `confidence` where none is found
    losses: tuple[float, ...] = ()  # one for each of the criterion's names; () where no loss was asked for
    speed_ms: tuple[float, float, float] = (0.0,) * 3  # milliseconds an image: preparation, inference, NMS
    names: tuple[str, ...] = ()  # class names by index; () where they are not known

    def __str__(self) -> str:
        """A small table: all classes together, and each that has objects, where they are few."""
        confidences = [self.confidence]
        if len(self.class_ids) <= _MOST_ROWS:
            confidences += self.class_confidences[self.class_ids].tolist()
        header = table_row("class", "images", "objects", "P", "R", "mAP50", "mAP50-95", "best conf")
        return "\n".join([header, *(table_row(*row, c) for c, row in zip(confidences, self.rows(), strict=False))])

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """Name, images, objects, precision, recall, AP50, AP: of all classes together, then of each with objects."""
        yield "all", self.images, self.objects, self.precision, self.recall, self.map50, self.map
        for c, figures in zip(self.class_ids.tolist(), self.per_class.tolist(), strict=True):
            name = self.names[c] if self.names else str(c)
            yield name, int(self.images_per_class[c]), int(self.objects_per_class[c]), *figures

    def class_maps(self) -> tuple[float, ...]:
        """AP of every class; the mean of all for classes that the validation has no object of."""
        maps = np.full(len(self.objects_per_class), self.map)
        maps[self.class_ids] = self.per_class[:, 3]
        return tuple(maps.tolist())

    @property
    def fitness(self) -> float:
        """What `best.pt` and EarlyStopping go by."""
        return fitness(self.map50, self.map)


def fitness(map50: Array, map: Array) -> Array:
    """0.1 mAP50 + 0.9 mAP50-95, of one validation or of a column of them."""
    return 0.1 * map50 + 0.9 * map
