"""Dataset scan: reads and checks the images and labels of a split."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, compress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera.data.labels.coco import as_json, parse_coco
from tessera.data.labels.label_files import AUTO_LABELS, LONGEST, NO_CLASS_LIMIT, UNBOUNDED, AnyClassName
from tessera.data.labels.voc import parse_voc
from tessera.data.labels.yolo_labels import ALL_CLASSES, ParsedLabels, check_stated_size, parse_labels
from tessera.data.source.decode import UnusableImage, decoded_size
from tessera.data.source.image_header import Size, extra_pages_message, read_file_header
from tessera.data.source.split_files import Listing
from tessera.utils.files import open_plain, sha256
from tessera.utils.machine.host import in_chunks
from tessera.utils.text import first_of
from tessera.utils.types import DatasetSpec, without_labels

_FILES_AT_A_TIME = 256
_NEXT = 3  # further places to name
_SLOW_S = 0.001  # an image; from memory it takes a twentieth of that


class ClassNames(NamedTuple):
    """Mapping from the classes of labels to trained, ignored and excluded classes."""

    ids: Mapping[str, int]  # name → class; -2 - k for the k-th of the ignored, then excluded classes
    single: bool  # all other classes become 0, unnamed ones included
    numbers: tuple[int, ...] = ()  # class number in label files → class; () if they are equal
    ignored: int = 0  # number of ignored classes
    keypoints: int = 0  # as in DatasetSpec
    trained: tuple[str, ...] = ()  # names of the trained classes, before `single`

    @classmethod
    def of(cls, spec: DatasetSpec, single: bool) -> ClassNames:
        """Return the mapping for a dataset."""
        parts = spec.parts or [(name,) for name in spec.names]
        ids = {name: number for number, names in enumerate(parts) for name in names}
        ids |= {name: ALL_CLASSES - 1 - number for number, name in enumerate(spec.ignore + spec.excluded_names)}
        return cls(
            ids, single, tuple(ids[name] for name in spec.label_names), len(spec.ignore), spec.keypoints, spec.names
        )


class Scan(NamedTuple):
    """Scan results; n usable images, with m objects."""

    usable: NDArray[np.bool_]  # (N,), whether each listed image is usable
    sizes_hw: NDArray[np.int32]  # (n, 2)
    counts: NDArray[np.int64]  # (n,), objects of each image
    classes: NDArray[np.int32]  # (m,)
    boxes_xyxy: NDArray[np.float32]  # (m, 4) pixels
    point_counts: NDArray[np.int64]  # (m,), points of each object's polygon
    points: NDArray[np.float32]  # (k, 2) pixels
    ignored_counts: NDArray[np.int64]  # (n,), ignored regions of each image
    ignored_classes: NDArray[np.int32]  # (r,), as in `IgnoredRegions`
    ignored_boxes_xyxy: NDArray[np.float32]  # (r, 4) pixels
    excluded_counts: NDArray[np.int64]  # (n,), objects and regions of excluded classes in each image
    excluded_classes: NDArray[np.int64]  # (l,), index of each one's class among the excluded classes
    problems: list[str]  # "file:line: what"
    notes: list[str]  # harmless ones: duplicate rows
    unknown: list[tuple[str, str]]  # (place, class) of rows of unnamed classes
    # (n,), removed objects of classes that the entry of their image does not label
    unlabelled_counts: NDArray[np.int64] = np.zeros(0, np.int64)
    weights: NDArray[np.float32] = np.zeros(0, np.float32)  # (m,), of the objects; (0,) if labels have none
    unlabelled_sets: NDArray[np.bool_] = np.zeros((0, 0), np.bool_)  # see DatasetIndex
    set_of_image: NDArray[np.int32] = np.zeros(0, np.int32)

    def labels_nothing(self) -> NDArray[np.bool_]:
        """Return which images label no class, (n,)."""
        return without_labels(self.unlabelled_sets, self.set_of_image, len(self.counts))


def scan(listing: Listing, names: ClassNames) -> Scan:
    """Read every image header and every label of `listing`."""
    ranges = in_chunks(
        lambda start, end: scan_range(listing, start, end, names), len(listing.images), _FILES_AT_A_TIME, _SLOW_S
    )
    columns = zip(*(ranges or [scan_range(listing, 0, 0, names)]), strict=True)
    merged: list[Any] = [np.concatenate(c) if isinstance(c[0], np.ndarray) else [*chain(*c)] for c in columns]
    usable = np.flatnonzero(merged[0]).tolist()
    sets, set_of_image = label_sets_of(listing, usable, names)
    scanned = Scan(*merged)._replace(unlabelled_sets=sets, set_of_image=set_of_image)
    if len(scanned.weights) and scanned.weights.min() == 1:
        scanned.problems.append(
            "train: label_weights: no object has a score below 1, so all count fully. Remove the key, or give scores: "
            f"`score` of COCO annotations, or {AUTO_LABELS} beside label files, unchanged since, or above up to `path`"
        )
    return scanned


def label_sets_of(
    listing: Listing, images: Sequence[int], names: ClassNames
) -> tuple[NDArray[np.bool_], NDArray[np.int32]]:
    """Return `DatasetIndex.unlabelled_sets` and `set_of_image` for images of a listing.

    A federated COCO file labels a class in an image if it has a category of each of the class's names, all complete.
    """
    nc = len(names.trained)
    parts = np.bincount([own for own in names.ids.values() if own >= 0], minlength=nc)
    of_entry = {
        own: np.array([own is not None and name not in own for name in names.trained]) for own in set(listing.labelled)
    }
    of_file = dict[int, dict[int, int]]()  # identity of a file's categories → category id → class
    rows: dict[bytes, int] = {}
    of_image = np.full(len(images), -1, np.int32)
    for number, image in enumerate(images):
        unlabelled = of_entry[listing.labelled[image]]
        _, record, categories = listing.coco.get(image, (None, None, {}))
        if record is not None and (complete := record.labelled_categories()) is not None:
            if id(categories) not in of_file:
                of_file[id(categories)] = {own: names.ids.get(name, -1) for own, name in categories.items()}
            classes = of_file[id(categories)]
            done = [own for category in complete if (own := classes.get(category, -1)) >= 0]
            unlabelled = unlabelled | (np.bincount(np.array(done, np.int64), minlength=nc) < parts)
        if unlabelled.any():
            row = b"\1" if names.single else unlabelled.tobytes()
            of_image[number] = rows.setdefault(row, len(rows))
    if not rows:
        return np.zeros((0, 0), np.bool_), np.zeros(0, np.int32)
    return np.frombuffer(b"".join(rows), np.bool_).reshape(len(rows), -1), of_image


def scan_range(listing: Listing, start: int, end: int, names: ClassNames) -> Scan:
    """Read the images from `start` to before `end` and their labels."""
    usable: list[bool] = []
    sizes: list[Size] = []
    every: list[ParsedLabels] = []
    problems: list[str] = []
    notes: list[str] = []
    unknown: list[tuple[str, str]] = []
    weights: list[float] = []
    for index in range(start, end):
        image = listing.images[index]
        usable.append(False)
        try:
            size = decoded_size(image, int(listing.image_stats[index, 0]))
        except UnusableImage as error:
            problems.append(f"{listing.shown(image)}: {error}; image skipped")
            continue
        if image.lower().endswith((".tif", ".tiff")) and (remark := extra_pages_message(Path(image))):
            problems.append(f"{listing.shown(image)}: {remark}")
        objects = read_objects(listing, index, size, names)
        of_objects = [] if listing.auto_labels is None else _weights(listing, index, objects)
        if objects.problems or objects.unknown or objects.duplicates or objects.remarks or objects.notes:
            where = listing.label_location(index)
            problems += _by_cause(where, objects.remarks)
            problems += _by_cause(where, [(line, f"{what}; image skipped") for line, what in objects.problems])
            notes += _by_cause(where, objects.notes)
            unknown += [(where(line), name) for line, name in objects.unknown]
            if objects.duplicates:
                noun = "row is a duplicate" if objects.duplicates == 1 else "rows are duplicates"
                notes.append(f"{where(None)}: {objects.duplicates} {noun}, used once")
            if objects.problems:
                continue
        usable[-1] = True
        sizes.append(size)
        every.append(objects)
        weights += of_objects
    sizes_hw = np.array(sizes, np.int32).reshape(-1, 2)
    counts = np.array([len(own.classes) for own in every], np.int64)
    classes = np.array([*chain.from_iterable(own.classes for own in every)], np.int32)
    boxes = np.array([*chain.from_iterable(own.boxes for own in every)], np.float64).reshape(-1, 4)
    point_counts = [map(len, own.polygons) if own.polygons else [0] * len(own.classes) for own in every]
    polygons = [part * size[::-1] for own, size in zip(every, sizes, strict=True) for part in own.polygons]
    regions = [own.ignored for own in every]
    owners = np.repeat(np.arange(len(every)), np.array([len(own.classes) for own in regions], np.int64))
    of_regions = np.array([*chain.from_iterable(own.classes for own in regions)], np.int64)
    region_boxes = np.array([*chain.from_iterable(own.boxes for own in regions)], np.float64).reshape(-1, 4)
    places = ALL_CLASSES - 1 - names.ignored - of_regions  # index among the excluded classes; below 0 for others
    is_ignored = places < 0
    return Scan(
        np.array(usable, np.bool_),
        sizes_hw,
        counts,
        np.zeros_like(classes) if names.single else classes,
        to_corners(boxes, np.repeat(sizes_hw, counts, 0)),
        np.array([*chain.from_iterable(point_counts)], np.int64),
        np.concatenate([np.zeros((0, 2)), *polygons]).astype(np.float32),
        np.bincount(owners[is_ignored], minlength=len(every)),
        np.minimum(of_regions[is_ignored].astype(np.int32), 0 if names.single else NO_CLASS_LIMIT),
        to_corners(region_boxes[is_ignored], sizes_hw[owners[is_ignored]]),
        np.bincount(owners[~is_ignored], minlength=len(every)),
        places[~is_ignored],
        problems,
        notes,
        unknown,
        np.array([own.unlabelled for own in every], np.int64),
        np.array(weights, np.float32),
    )


def _weights(listing: Listing, index: int, objects: ParsedLabels) -> list[float]:
    """Return the weights of the objects of image `index`, and add problems with their scores.

    They are the scores of COCO annotations and of unchanged auto-labels; 1 without a score.
    """
    if index in listing.coco:
        records = dict(listing.coco[index][1].annotations)
        found = [1 if (own := records[line].get("score")) is None else own for line in objects.lines]
        wrong = [not isinstance(own, (int, float)) or not 0 <= own <= 1 for own in found]
        objects.problems += [
            (line, f"score is {as_json(own)}, expected 0 to 1, the weight of its object")
            for line, own in compress(zip(objects.lines, found, strict=True), wrong)
        ]
        return found
    label = (listing.auto_labels or {}).get(listing.labels[index])
    is_same = label is not None and objects.lines and sha256(Path(listing.labels[index])) == label.sha256
    scores = dict(enumerate(label.scores, 1)) if label is not None and is_same else {}
    return [scores.get(line, 1.0) for line in objects.lines]


def _by_cause(where: Callable[[int | None], str], rows: Iterable[tuple[int | None, str]]) -> list[str]:
    """Return one message for each cause, with its first place."""
    places: dict[str, list[str]] = {}
    for line, what in rows:
        places.setdefault(what, []).append(where(line))
    return [f"{found[0]}: {what}{'.' * (len(found) > 1)}{more_rows(found)}" for what, found in places.items()]


def more_rows(places: Sequence[str]) -> str:
    """Return the number of further rows with the same message, and the next places; "" without any."""
    if len(places) == 1:
        return ""
    return f" There are {len(places):,} such rows; the next: {first_of(places[1:], _NEXT)}"


def to_corners(fractions: NDArray[np.float64], sizes_hw: NDArray[np.int32]) -> NDArray[np.float32]:
    """Convert centres and sizes (m, 4), fractions, to corners in pixels; in double precision, rounded once."""
    return (corners_of(fractions) * sizes_hw[:, [1, 0, 1, 0]]).astype(np.float32)


def corners_of(boxes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Convert centres and sizes (m, 4) to corners."""
    half = boxes[:, 2:] / 2
    return np.hstack((boxes[:, :2] - half, boxes[:, :2] + half))


def read_objects(listing: Listing, index: int, size_hw: Size, names: ClassNames) -> ParsedLabels:
    """Read the labels of image `index`, of the classes that its entry labels; empty without a label file."""
    parsed = _read_labels(listing, index, size_hw, names)
    if (labelled := listing.labelled[index]) is not None:
        parsed.keep_only([number for number, name in enumerate(names.trained) if name in labelled])
    return parsed


def _read_labels(listing: Listing, index: int, size_hw: Size, names: ClassNames) -> ParsedLabels:
    path = listing.labels[index]
    if index in listing.coco:
        _, image, categories = listing.coco[index]
        ids = {**dict.fromkeys(categories.values(), 0), **names.ids} if names.single else names.ids
        read = partial(parse_coco, image.annotations, categories=categories, class_ids=ids)
        parsed = read(size_hw=size_hw)
        parsed.stated_hw = (0, 0) if 0 in image.size_hw else image.size_hw
    else:
        length = int(listing.label_stats[index, 0])
        if length == -1 or (not length and not path.endswith(".xml")):
            return ParsedLabels()
        try:
            raw = _read_bytes(path, length)
        except OSError as error:
            link = ", a broken link" if Path(path).is_symlink() else ""
            return ParsedLabels(problems=[(None, f"cannot be read ({error.strerror}{link})")])
        if not path.endswith(".xml"):
            nc = NO_CLASS_LIMIT if names.single else len(names.ids)
            return parse_labels(raw, nc, names.numbers, names.keypoints)
        read = partial(parse_voc, raw, class_ids=AnyClassName(names.ids) if names.single else names.ids)
        parsed = read(size_hw=size_hw)
    if parsed.stated_hw in ((0, 0), size_hw):
        return parsed
    boxes = np.array(read(size_hw=(UNBOUNDED, UNBOUNDED)).boxes).reshape(-1, 4)
    reach_hw = ((boxes[:, :2] + boxes[:, 2:] / 2) * UNBOUNDED).max(0, initial=0)[::-1]
    header = read_file_header(listing.images[index])
    is_usable, what = check_stated_size(
        parsed.stated_hw, size_hw, reach_hw, header is not None and header.orientation >= 5
    )
    if not is_usable:
        return ParsedLabels(problems=[(None, what)])
    parsed.remarks.insert(0, (None, what))
    return parsed


def _read_bytes(path: str, length: int) -> bytes:
    """Read `length` bytes; faster than `open`, whose buffering takes longer than the reading."""
    if length < 0 or length > LONGEST:
        open_plain(path, LONGEST).close()  # raises with the kind of file, or its size
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO must not block
    try:
        raw = os.read(descriptor, length)
        while len(raw) < length and (block := os.read(descriptor, length - len(raw))):
            raw += block
        return raw
    finally:
        os.close(descriptor)
