"""Dataset index: builds the DatasetIndex of a split from a scan, and caches it in a file.

The file is in TESSERA_CACHE and is rebuilt when an image, a label, the names or the format changes. The dataset itself
is never modified. If the file cannot be written, a warning is logged and the index stays in memory.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera.data.labels.classes import SINGLE_CLASS
from tessera.data.labels.coco import result_ids
from tessera.data.labels.yolo_labels import ALL_CLASSES
from tessera.data.source.messages import (
    beyond_max_det,
    check_usable,
    excluded_summary,
    has_no_area,
    missing_labels,
    shared_labels,
    unlabelled_objects,
    unused_ignores,
    without_objects,
)
from tessera.data.source.scan import ClassNames, Scan, scan
from tessera.data.source.split_files import CachedCocoListing, Listing, list_images, select_images
from tessera.utils.environment import cache_dir, max_pixels
from tessera.utils.errors import UserError
from tessera.utils.files import atomic_write, open_plain, remove_leftovers
from tessera.utils.machine.opencv import cv2
from tessera.utils.text import first_of, plural, shown
from tessera.utils.types import CocoIds, DatasetIndex, DatasetSpec

_FORMAT = 11  # increment when the same files give another index
_MAGIC = b"TESSERA INDEX\n\0\6"  # the last byte is the version of the file layout
_ALIGNMENT = 64
_SHOWN = 5
_COCO_IMAGES = "coco_images"  # an array of the file alone
_PLAIN = ("split", "names", "digest", "problems", "notes", "excluded_summary", "stored_hash")  # in the header

logger = logging.getLogger(__name__)


def build_index(
    spec: DatasetSpec, split: str, *, single_cls: bool = False, verified: dict[str, str] | None = None
) -> DatasetIndex:
    """Index a split, from the cache if nothing has changed.

    Args:
        spec: the dataset.
        split: "train", "val" or "test".
        single_cls: all classes become 0, named as the dataset's only class, else "item".
        verified: index file → digest, of indexes just compared with this node's files, which are read without
            another comparison. This index is added.

    Raises:
        UserError: the split is missing or has no usable image, labels have classes that the YAML does not name, or no
            image of "train" has a label.
    """
    path = cache_dir() / "index" / f"{spec.name}-{split}-{_key(spec, split, single_cls)}.index"
    verified = {} if verified is None else verified
    digest = verified.get(str(path))
    if digest is not None and (stored := read_index(path, digest)) is not None:
        return dataclasses.replace(stored[0], pixels=spec.pixels)
    index = _verified_index(path, spec, split, single_cls)
    if index.excluded_summary:
        logger.info(index.excluded_summary)
    verified[str(path)] = index.digest
    return dataclasses.replace(index, pixels=spec.pixels)


def _verified_index(path: Path, spec: DatasetSpec, split: str, single_cls: bool) -> DatasetIndex:
    """Return the index in `path` if it matches the current images and labels; else rebuild it."""
    stored, coco_images = read_index(path) or (None, None)
    listing = list_images(spec, split, coco_images)
    digest = _digest(spec, split, listing, class_names(spec, single_cls))
    if stored is not None and stored.digest == digest:
        return stored
    if not listing.is_complete:
        listing = list_images(spec, split)
    if listing.unmatched_annotations:
        raise UserError(first_of(listing.unmatched_annotations, _SHOWN, "\n"))
    listing = select_images(spec, split, listing)
    logger.info("Scanning %s and labels of %s …", plural(len(listing.images), "image"), split)
    scanned = scan(listing, ClassNames.of(spec, single_cls))
    check_usable(spec, split, listing, scanned)
    index = _assemble(spec, split, single_cls, listing, scanned, digest)
    try:
        write_index(path, index, listing.coco_images)
    except OSError as error:
        logger.warning(
            "Cannot write %s (%s): the dataset will be scanned at every start. Set TESSERA_CACHE to a writable folder.",
            path,
            error.strerror,
        )
        return index
    written = read_index(path)
    return index if written is None or written[0].digest != digest else written[0]


def class_names(spec: DatasetSpec, single_cls: bool) -> tuple[str, ...]:
    """Return the names of the trained classes."""
    return spec.names if not single_cls or spec.nc == 1 else (SINGLE_CLASS,)


def problem_report(index: DatasetIndex) -> str:
    """Return a warning on what the scan found, with counts and the first lines; "" without problems."""
    messages = []
    for noun, about, found in (("problem", "with", index.problems), ("note", "on", index.notes)):
        if found:
            lines, count = first_of(found, _SHOWN, "\n  "), plural(len(found), noun)
            messages.append(f"{index.split}: {count} {about} images or labels (all: --check-data):\n  {lines}")
    return "\n".join(messages)


def index_warnings(index: DatasetIndex, max_det: int | None = None) -> list[str]:
    """Return the warnings before a run uses an index; `max_det` as of `beyond_max_det`, for an evaluation.

    In a validation, boxes without area count as objects that nothing can match, as in COCO's metric.
    """
    found = list(filter(None, [problem_report(index)]))
    without_area = int(has_no_area(index.boxes_xyxy).sum())
    if without_area:
        effect = "not learned" if index.split == "train" else "counted as missed objects"
        every = "all " if without_area == len(index.classes) > 1 else ""
        boxes = plural(without_area, "box")
        found.append(f"{index.split}: {every}{boxes} without width or height, {effect}; --check-data lists them")
    objects = np.bincount(index.classes, minlength=len(index.names))
    if len(never := np.flatnonzero((objects > 0) & (index.images_per_label() == 0))):
        effect = "nothing teaches their background" if index.split == "train" else "none of their detections is false"
        named = first_of([shown(index.names[c]) for c in never], _SHOWN)
        found.append(f"{index.split}: no image labels all objects of {named}: {effect}")
    if not len(index.classes):
        found.append(without_objects(index.split, len(index)))
    elif max_det or index.split != "train":
        counts = np.diff(index.box_offsets)
        found += filter(None, [beyond_max_det(index.split, counts, lambda image: index.path(image).name, max_det)])
    return found


def _key(spec: DatasetSpec, split: str, single_cls: bool) -> str:
    """Return the name of the cache file, one for each list of entries: a changed dataset replaces its own."""
    parts = [split, str(spec.root), *map(str, spec.splits.get(split, ())), *spec.names, str(single_cls)]
    parts += [str(spec.held_out)] if spec.held_out else []
    parts += [str((spec.label_names, spec.parts))] if spec.label_names else []
    return hashlib.blake2b("\0".join(parts).encode("utf-8", "surrogateescape"), digest_size=10).hexdigest()


def _digest(spec: DatasetSpec, split: str, listing: Listing, names: tuple[str, ...]) -> str:
    """Return the state of the dataset: relative paths, file states, names, format. A moved dataset keeps its digest."""
    state = hashlib.blake2b(digest_size=20)
    sources = [f"{listing.shown(file)} {status}" for file, (status, _) in sorted(listing.coco_images.items())]
    # One replacement for all paths: calls of `shown` would take longer than the rest of this function.
    images, labels = (
        "\0".join(["", *paths]).replace(f"\0{listing.root}/", "\0") for paths in (listing.images, listing.labels)
    )
    part = [split, *spec.held_out] if spec.held_out else []
    classes = [names, spec.ignore, spec.label_names, spec.parts, spec.keypoints, spec.labelled.get(split)]
    values = [_FORMAT, max_pixels(), cv2.__version__, classes, sources, listing.problems, listing.notes, part]
    if listing.auto_labels is not None:
        values.append([[listing.shown(path), own.sha256, own.scores] for path, own in listing.auto_labels.items()])
    header = json.dumps(values)
    for text in (header, images, labels):
        state.update(text.encode("utf-8", "surrogateescape") + b"\0\0")
    state.update(listing.image_stats.tobytes())
    state.update(listing.label_stats.tobytes())
    return state.hexdigest()


def _coco_ids(listing: Listing, scanned: Scan, spec: DatasetSpec, single: bool) -> CocoIds | None:
    """Return the COCO ids of the usable images; None if any image is of no COCO file, or ids collide."""
    places = np.flatnonzero(scanned.usable).tolist()
    if not all(place in listing.coco for place in places):
        return None
    files = {file: categories for file, _, categories in listing.coco.values()}
    # A class has the id of its category. A merged class has that of its namesake among its parts.
    named = [
        name if name in parts else parts[0] if len(parts) == 1 else ""
        for name, parts in zip(spec.names, spec.parts or [(name,) for name in spec.names], strict=True)
    ]
    untrained = spec.ignore + spec.excluded_names
    images = [listing.coco[place][1].id for place in places]
    ids = result_ids(images, list(files.values()), named, single, untrained)
    if ids is None:
        listing.notes.append(
            f"{', '.join(listing.shown(str(file)) for file in files)}: ids of images or categories collide; "
            "--save-json writes file names and class numbers instead"
        )
    return ids


def _assemble(
    spec: DatasetSpec, split: str, single_cls: bool, listing: Listing, scanned: Scan, digest: str
) -> DatasetIndex:
    ids = _coco_ids(listing, scanned, spec, single_cls)
    notes = listing.notes + unused_ignores(spec, split, scanned) + scanned.notes
    problems = listing.problems + shared_labels([listing]) + missing_labels(split, listing, scanned)
    problems += unlabelled_objects(split, listing, scanned) + scanned.problems
    paths = [os.fsencode(image) for image, usable in zip(listing.images, scanned.usable, strict=True) if usable]
    no_offsets = np.zeros(0, np.int64)
    index = DatasetIndex(
        split=split,
        names=class_names(spec, single_cls),
        digest=digest,
        problems=tuple(problems),
        notes=tuple(notes),
        excluded_summary=excluded_summary(spec, split, scanned),
        path_bytes=np.frombuffer(b"".join(paths), np.uint8),
        path_offsets=offsets_of([len(path) for path in paths]),
        sizes_hw=scanned.sizes_hw,
        box_offsets=offsets_of(scanned.counts),
        classes=scanned.classes,
        boxes_xyxy=scanned.boxes_xyxy,
        segment_offsets=offsets_of(scanned.point_counts) if len(scanned.points) else no_offsets,
        segment_points=scanned.points,
        ignored_offsets=offsets_of(scanned.ignored_counts) if len(scanned.ignored_classes) else no_offsets,
        ignored_classes=scanned.ignored_classes.clip(ALL_CLASSES),
        ignored_boxes_xyxy=scanned.ignored_boxes_xyxy,
        unlabelled_sets=scanned.unlabelled_sets,
        set_of_image=scanned.set_of_image,
        label_weights=scanned.weights,
        coco_text=np.frombuffer(json.dumps(ids).encode() if ids else b"", np.uint8),
    )
    for value in vars(index).values():
        if isinstance(value, np.ndarray):
            value.flags.writeable = False  # as arrays of the file
    return dataclasses.replace(index, stored_hash=index.content_hash())


def offsets_of(counts: Any) -> NDArray[np.int64]:
    """Return where each of n parts starts, and the end, int64 (n + 1,), from the counts of the parts."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(np.asarray(counts, np.int64))))


def write_index(path: Path, index: DatasetIndex, coco_images: CachedCocoListing) -> None:
    """Write an index file: magic, checksum of the rest, length of the header, header in JSON, arrays."""
    arrays = {name: np.ascontiguousarray(value) for name, value in vars(index).items() if isinstance(value, np.ndarray)}
    arrays[_COCO_IMAGES] = np.frombuffer(json.dumps(coco_images).encode(), np.uint8)
    shapes = [[name, array.dtype.str, array.shape] for name, array in arrays.items()]
    header = json.dumps({**{name: getattr(index, name) for name in _PLAIN}, "arrays": shapes}).encode()
    pieces = [len(header).to_bytes(8, "little"), header]
    written = len(_MAGIC) + 32 + 8 + len(header)
    for array in arrays.values():
        pieces += [bytes(-written % _ALIGNMENT), array.tobytes()]
        written += -written % _ALIGNMENT + array.nbytes
    checksum = hashlib.blake2b(digest_size=32)
    for piece in pieces:
        checksum.update(piece)
    remove_leftovers(path.parent)
    with atomic_write(path) as file:
        file.writelines([_MAGIC, checksum.digest(), *pieces])


def read_index(path: Path, digest: str | None = None) -> tuple[DatasetIndex, CachedCocoListing] | None:
    """Read an index file. No memory map: where a cleaner cuts the file, that would end the process without a message.

    Return it and, without `digest`, state and images of each COCO file; None if the file is missing, damaged, of
    another format or of another digest.
    """
    start = len(_MAGIC) + 32
    try:
        with open_plain(path) as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                return None
            file.seek(0)
            content = np.fromfile(file, np.uint8)
    except OSError:
        return None
    content.flags.writeable = False
    checksum = content[len(_MAGIC) : start].tobytes()
    if hashlib.blake2b(content[start:].data, digest_size=32).digest() != checksum:
        logger.warning("%s is damaged and will be rebuilt.", path)
        return None
    at = start + 8 + int.from_bytes(content[start : start + 8].tobytes(), "little")
    header = json.loads(content[start + 8 : at].tobytes())
    if digest not in (None, header["digest"]):
        return None
    fields: dict[str, Any] = {name: header[name] for name in _PLAIN}
    fields |= {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    for name, dtype, shape in header["arrays"]:
        at += -at % _ALIGNMENT
        length = int(np.prod(shape)) * np.dtype(dtype).itemsize
        fields[name] = np.asarray(content[at : at + length]).view(dtype).reshape(shape)
        at += length
    coco_images = fields.pop(_COCO_IMAGES)
    listed = json.loads(coco_images.tobytes()) if digest is None else {}
    return DatasetIndex(**fields), {file: (tuple(state), paths) for file, (state, paths) in listed.items()}
