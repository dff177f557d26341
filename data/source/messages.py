"""Checks of a scanned split and their messages, shared by indexing and `--check-data`: classes, missing labels."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tessera.data.labels.yolo_labels import ALL_CLASSES, MAX_OVERSHOOT
from tessera.data.source.scan import Scan, more_rows
from tessera.data.source.split_files import MISSING, Listing
from tessera.utils.errors import UserError, did_you_mean
from tessera.utils.flags.program import called
from tessera.utils.text import first_of, plural, shown
from tessera.utils.thresholds import MAX_DET, MOST_DET
from tessera.utils.types import DatasetSpec

_SHOWN, _NEXT, _NEXT_LINE = 4, 3, "\n  "
_TRIED = 20  # images whose folders are searched for other annotations
_MOST_EXCLUDED = 10  # classes to name
_FEW, _TENTH = 16, 10  # images that may fail to decode: 16, and a tenth of a split
MANY_MISSING = 0.1  # fraction of images without a label file; so much background is common advice


def check_usable(spec: DatasetSpec, split: str, listing: Listing, scanned: Scan) -> None:
    """Raise a UserError if training on the scanned split would be wrong or impossible."""
    if scanned.unknown:
        raise UserError(first_of(unknown_classes(spec, split, scanned), _SHOWN, _NEXT_LINE))
    if not scanned.usable.any():
        lines = first_of([*listing.notes, *listing.problems, *scanned.problems], _SHOWN, _NEXT_LINE)
        raise UserError(
            f"{spec.yaml_path}: {split}: none of {plural(len(listing.images), 'image')} can be used:\n  {lines}"
        )
    _require_pixels(listing, scanned)
    if split == "train" and not len(scanned.classes) and len(scanned.excluded_classes):
        raise UserError(
            f"{spec.yaml_path}: train: no label is of a class that `classes` keeps. "
            f"{excluded_summary(spec, split, scanned)}. Keep one that the labels have."
        )
    if split == "train" and not len(scanned.classes):
        raise UserError(_no_objects(spec, listing, scanned))


def _no_objects(spec: DatasetSpec, listing: Listing, scanned: Scan) -> str:
    """Return the message for a training split without a labelled object."""
    images = plural(len(listing.images), "image")
    what = f"{spec.yaml_path}: train: no labels found for {images}"
    crowds = int((scanned.ignored_classes >= 0).sum())
    if removed := int(scanned.unlabelled_counts.sum()):
        return f"{what}: `labelled` of their entry names no class of the {plural(removed, 'object')}. Add it there."
    if all(own == () for own in listing.labelled):
        return f"{what}: no entry of train labels a class. Name the labelled classes in `labelled`."
    annotations = sum(len(image.annotations) for _, image, _ in listing.coco.values())
    labelled = sum(map(os.path.isfile, listing.labels))
    if scanned.problems and not crowds and annotations + labelled:
        found = plural(annotations, "annotation") if annotations else plural(labelled, "label file")
        problems = first_of([*scanned.problems, *listing.problems], _SHOWN, _NEXT_LINE)
        return f"{spec.yaml_path}: train: {found} for {images}, none usable:\n  {problems}"
    if listing.coco:
        held = f"{plural(crowds, 'crowd')} (iscrowd) and no object" if crowds else "no object"
        return (
            f"{what}: {first_of([*listing.coco_images], _SHOWN, _NEXT_LINE)}: its annotations hold {held}. Label some."
        )
    hint = ""
    if not labelled and (other := _unread_annotations(listing)):
        entry = f" (`train: {os.path.relpath(other, listing.root)}`)" if other.endswith(".json") else ""
        hint = f" {other} is not read as labels: export YOLO, Pascal VOC, or a COCO JSON file as the entry{entry}."
    return (
        f"{what}: {labelled:,} of them have a label file, none with a usable row. Expected\n  "
        f"{_label_places(listing)}\nA label file has the image's path with the last /images/ replaced by /labels/ and "
        f"the suffix .txt. Correct `path`, move the labels there, or label the images.{hint}"
    )


def _unread_annotations(listing: Listing) -> str:
    """Return the first JSON, CSV or XML file that may hold the labels of the images; "" if there is none."""
    folders = dict.fromkeys(Path(image).parent for image in listing.images[:_TRIED])
    above, labels = dict.fromkeys(folder.parent for folder in folders), set(listing.labels)
    for folder in (*folders, *above, *(folder / name for folder in above for name in ("annotations", "labels"))):
        for path in sorted(folder.glob("*.*")):
            if path.suffix in (".csv", ".json", ".xml") and str(path) not in labels:
                return str(path)
    return ""


def _require_pixels(listing: Listing, scanned: Scan) -> None:
    """Raise for a COCO file, or XML files of a folder, whose boxes are fractions of the image."""
    file_of = {place: str(file) for place, (file, _, _) in listing.coco.items()}
    file_of |= {at: xml.rpartition("/")[0] for at, xml in enumerate(listing.labels) if xml.endswith(".xml")}
    files = list(dict.fromkeys(file_of.values()))
    numbers = {file: number for number, file in enumerate(files)}
    of_image = np.array([numbers[file_of[at]] if at in file_of else -1 for at in range(len(listing.images))], np.int64)
    of_box = np.repeat(of_image[scanned.usable], scanned.counts)
    is_beyond = (scanned.boxes_xyxy > 1 + MAX_OVERSHOOT).any(1)  # fractions may be rounded up
    for number in np.setdiff1d(of_box, [-1, *np.unique(of_box[is_beyond])]):
        raise UserError(
            f"{listing.shown(files[number])}: all boxes ({int((of_box == number).sum()):,}) lie in the first pixel of "
            "their images: they seem to be fractions, expected pixels. Multiply them by the image's width or height."
        )


def unknown_classes(spec: DatasetSpec, split: str, scanned: Scan) -> list[str]:
    """Return a message for each unnamed class of the labels, with its number of rows and the first places."""
    places: dict[str, list[str]] = {}
    for place, name in scanned.unknown:
        places.setdefault(name, []).append(place)
    if counts_from_one(spec, scanned):
        (found,) = places.values()
        return [
            f"{found[0]}: class {spec.nc}, but {spec.yaml_path.name} names classes from 0 to {spec.nc - 1}, and no row "
            f"of {split} has class 0: the labels seem to count from 1. Subtract 1 from each class.{more_rows(found)}"
        ]
    return [_unknown(spec, found[0], name) + more_rows(found) for name, found in places.items()]


def counts_from_one(spec: DatasetSpec, scanned: Scan) -> bool:
    """Return whether the classes of label files are 1 … nc instead of 0 … nc - 1."""
    beyond = {name for _, name in scanned.unknown}
    return (
        not spec.label_names
        and not scanned.unlabelled_counts.any()
        and beyond == {str(spec.nc)}
        and not (scanned.classes == 0).any()
        and (spec.nc == 1 or len(scanned.classes) > 0)
    )


def _unknown(spec: DatasetSpec, place: str, name: str) -> str:
    names = spec.label_names or spec.names
    ignored = f", the {len(spec.ignore)} to ignore included" if spec.ignore else ""
    known = first_of([shown(name) for name in names], _SHOWN)
    hint = "" if name.isdecimal() else f" It names {known}.{did_you_mean(name[1:-1], names)}"
    found = f"{place}: class {name}, but {spec.yaml_path.name} names {plural(len(names), 'class')}{ignored}."
    return f"{found} Fix the label or add the class.{hint}"


def unused_ignores(spec: DatasetSpec, split: str, scanned: Scan) -> list[str]:
    """Return a message on ignored classes that no training label has, whose names may be misspelled."""
    used = set(scanned.ignored_classes.tolist())
    unused = [shown(name) for number, name in enumerate(spec.ignore) if ALL_CLASSES - 1 - number not in used]
    if split != "train" or not unused:
        return []
    return [f"train: {spec.yaml_path.name}: ignore: no label is of class {first_of(unused, _NEXT)}. Check the name."]


def most_undecodable(images: int, met: int) -> int:
    """Return how many images may fail to decode and be skipped, after `met` of all `images` were decoded."""
    return min(images - 1, max(_FEW, images // _TENTH), _FEW + met // _TENTH)


def excluded_summary(spec: DatasetSpec, split: str, scanned: Scan) -> str:
    """Return a summary of what the key `classes` excludes: objects by class, and images that become background."""
    if not spec.excluded_names:
        return ""
    objects = np.bincount(scanned.excluded_classes, minlength=len(spec.excluded_names)).tolist()
    of_images = scanned.excluded_counts > 0
    nothing_left = (scanned.counts == 0) & (scanned.ignored_counts == 0) & ~scanned.labels_nothing()
    emptied = int((of_images & nothing_left).sum())
    by_count = sorted(zip(spec.excluded_names, objects, strict=True), key=lambda pair: -pair[1])
    by_class = [f"{shown(name)} {count:,}" for name, count in by_count]
    return (
        f"{split}: `classes` excludes {len(spec.excluded_names):,} of {len(spec.label_names):,} classes with "
        f"{plural(sum(objects), 'object')} in {plural(int(of_images.sum()), 'image')}, {emptied:,} of which "
        f"{'is' if emptied == 1 else 'are'} background without them: {first_of(by_class, _MOST_EXCLUDED)}"
    )


def without_objects(split: str, images: int) -> str:
    """Return the message for a val or test split without a labelled object."""
    return (
        f"{split}: no object in the labels of its {plural(images, 'image')}, so mAP will be 0. Label some of them, or "
        f"set `{split}:` to a labelled set."
    )


def untrained_classes(
    names: Sequence[str],
    trained: NDArray[np.integer],
    split: str,
    classes: NDArray[np.integer],
    unlabelled_sets: NDArray[np.bool_],
) -> list[str]:
    """Return a message if a split has objects of classes that train lacks, from the classes of both splits' objects.

    Classes of `unlabelled_sets`, (K, C), which some image of train does not label, may have a teacher.
    """
    objects, of_train = np.bincount(classes, minlength=len(names)), np.bincount(trained, minlength=len(names))
    untaught = ~unlabelled_sets.reshape(len(unlabelled_sets), len(names)).any(0)
    missing = np.flatnonzero((objects > 0) & (of_train == 0) & untaught).tolist()
    if not missing:
        return []
    found = first_of([f"{plural(int(objects[c]), 'object')} of {shown(names[c])}" for c in missing], _SHOWN)
    return [
        f"{split}: {found}, but train has none to learn from, so they lower mAP. Add such images to train, divide the "
        "images otherwise, or leave the class out with `classes:`"
    ]


def beyond_max_det(split: str, counts: NDArray[np.int64], name: Callable[[int], str], max_det: int | None) -> str:
    """Return the message for images with more objects than detections are evaluated; "" without such images.

    Args:
        counts: (N,), objects of each image, which is called `name(image)`.
        max_det: value of `--max-det`; None = the limit of a training, which has no such flag.
    """
    limit = max_det or MAX_DET
    order = np.argsort(-counts, kind="stable")
    dense = order[counts[order] > limit].tolist()
    if not dense:
        return ""
    of = f"--max-det {limit}" if max_det else f"the {limit} detections an image that a training evaluates"
    flag = f"--max-det {min(int(counts[dense[0]]), MOST_DET)}"
    remedy = (
        f"Give {flag}." if max_det else f"The weights do not depend on it; {called('val.py')} {flag} evaluates all."
    )
    return (
        f"{split}: {plural(len(dense), 'image')} with more objects than {of}: "
        f"{first_of([f'{name(image)} ({counts[image]:,})' for image in dense], 3)}. Recall over all objects is at most "
        f"{np.minimum(counts, limit).sum() / counts.sum():.3f}, and mAP is limited too. {remedy}"
    )


def unlabelled_objects(split: str, listing: Listing, scanned: Scan) -> list[str]:
    """Return a message on labels of classes that the entry of their image does not label."""
    counts = scanned.unlabelled_counts
    if not counts.any():
        return []
    places = np.flatnonzero(scanned.usable)[counts > 0]
    objects, are = plural(int(counts.sum()), "object"), "is" if counts.sum() == 1 else "are"
    return [
        f"{split}: {objects} in {plural(len(places), 'image')} {are} not used, such as in "
        f"{listing.shown(listing.images[places[0]])}, as `labelled` of the entry does not name the class. Add it there "
        "if all its objects are labelled"
    ]


def has_no_area(boxes_xyxy: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Return which boxes (n, 4) have no width or no height, (n,)."""
    found: NDArray[np.bool_] = np.any(boxes_xyxy[:, 2:] <= boxes_xyxy[:, :2], axis=1)
    return found


def missing_labels(split: str, listing: Listing, scanned: Scan) -> list[str]:
    """Return a message if many images, but not all, have no label file: they may have lost it."""
    missing = without_label_file(listing, scanned)
    images = len(scanned.counts)
    if not MANY_MISSING * images < len(missing) < images:
        return []
    have, are = ("has", "is") if len(missing) == 1 else ("have", "are")
    return [
        f"{split}: {len(missing):,} of {images:,} images {have} no label file and {are} used as background: "
        f"{first_of(missing, _NEXT)}. Restore their labels, or add an empty label file to each background image"
    ]


def shared_labels(listings: Sequence[Listing]) -> list[str]:
    """Return a message on label files of several images, such as a.jpg and a.png."""
    owners: dict[str, str] = {}
    shared: dict[str, set[str]] = {}
    for listing in listings:
        for image, label, size in zip(listing.images, listing.labels, listing.label_stats[:, 0].tolist(), strict=True):
            if label and size != MISSING[0] and owners.setdefault(label, image) != image:
                shared.setdefault(label, {owners[label]}).add(image)
    if not shared:
        return []
    shown_as = listings[0].shown
    named = [f"{shown_as(label)} ({first_of(sorted(map(shown_as, own)), _NEXT)})" for label, own in shared.items()]
    return [
        f"{plural(len(shared), 'label file')} of several images, each of which gets all boxes: "
        f"{first_of(named, _NEXT)}. Keep one image for each label file, or rename the others and label them"
    ]


def without_label_file(listing: Listing, scanned: Scan) -> list[str]:
    """Return the usable images that lack the label file that their entry has, as messages name them."""
    places = np.flatnonzero(scanned.usable)[~scanned.labels_nothing()]
    missing = places[listing.label_stats[places, 0] == MISSING[0]].tolist()
    expected = (place for place in missing if place not in listing.coco)
    return [listing.shown(listing.images[place]) for place in expected]


def _label_places(listing: Listing) -> str:
    """Return the folders that label files were expected in, each with an example."""
    examples: dict[str, str] = {}
    for label in listing.labels:
        examples.setdefault(label.rpartition("/")[0], label)
    named = [f"{label} (and its like)" for folder, label in sorted(examples.items()) if folder]
    return first_of(named, _SHOWN, _NEXT_LINE)
