"""Dataset checks of `--check-data`: splits, classes, label files and boxes here, images and drift beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera.analysis.checks.drift import check_drift
from tessera.analysis.checks.images import Fingerprint, check_copies, check_images, check_near_duplicates
from tessera.analysis.checks.results import DatasetCheck, SplitCounts, SplitData, fraction_text
from tessera.data.feed.image_sizes import fit_ratios
from tessera.data.feed.tiles import build_tile_index
from tessera.data.labels.coco import MAX_UNMATCHED, category_of, is_crowd, numbers
from tessera.data.labels.label_files import UNBOUNDED, AutoLabel, auto_labels, parse_any_labels
from tessera.data.source.dataset_root import matching_paths
from tessera.data.source.dataset_yaml import load_spec
from tessera.data.source.index import build_index, class_names
from tessera.data.source.messages import (
    beyond_max_det,
    check_usable,
    counts_from_one,
    excluded_summary,
    has_no_area,
    missing_labels,
    shared_labels,
    unknown_classes,
    unlabelled_objects,
    untrained_classes,
    unused_ignores,
    without_label_file,
    without_objects,
)
from tessera.data.source.scan import ClassNames, corners_of, scan
from tessera.data.source.split_files import OFFER, list_images, select_images
from tessera.utils.config import TrainConfig
from tessera.utils.errors import UserError
from tessera.utils.extensions import extension
from tessera.utils.files import sha256, user_path
from tessera.utils.image_size import ImageSize, round_imgsz
from tessera.utils.report.console import TrainingResult, setup_logging
from tessera.utils.text import escape_control, first_of, one_line, plural, shown, table_row
from tessera.utils.types import DatasetSpec

_SLACK, _SLACK_PX = 0.02, 2.0  # fraction of a side, and pixels, by which rounding may exceed the image
_MOST_SHOWN = 10.0  # largest fraction of a side in messages
_FAR = 0.05  # fraction of a side that rounding does not explain
_LEAST, _USUAL = 5, 0.25  # minimum number and fraction of boxes far outside the image that indicate corners
_MOST_ROWS = 100
_MOST_ERRORS = 20  # classes; more mean that the YAML belongs to another dataset


def check_data(flags: TrainConfig) -> TrainingResult:
    """Print every problem of the dataset for `--check-data`, and with `--tile` the number of tiles; without torch.

    Raises:
        UserError: the dataset has errors, or the page of `--report` cannot be written.
    """
    setup_logging(0, 1)
    spec = load_spec(flags.data)
    checked = check_dataset(spec, flags.single_cls, imgsz=flags.imgsz)
    print("\n".join(checked.lines()))
    found = checked.as_dict()
    if flags.report:
        write_page = extension("dataset page").write_data_page
        print(f"Report: {write_page(checked, spec, user_path(flags.report, '--report'))}")
    if checked.errors:
        raise UserError(
            f"--check-data: {flags.data} has {plural(len(checked.errors), 'error')}, listed above. Fix them first.",
            details={"checked": found},
        )
    if flags.tile:
        images = build_index(spec, "train", single_cls=flags.single_cls)
        build_tile_index(images, flags.tile, flags.overlap, round_imgsz(flags.imgsz, 1), show_progress=True)
    return TrainingResult(data=flags.data, checked=found, exit_code=checked.exit_code)


def check_dataset(spec: DatasetSpec, single_cls: bool = False, *, imgsz: ImageSize = 640) -> DatasetCheck:
    """Check all splits, decoding every image, with a bar on stderr; box sizes are at an image size of `imgsz`."""
    check = DatasetCheck()
    names = ClassNames.of(spec, single_cls)
    fingerprints: dict[SplitData, list[Fingerprint | None]] = {}
    if not single_cls:
        check_names(check, spec)
    for split in spec.splits:
        try:
            listing = select_images(spec, split, list_images(spec, split))
        except UserError as error:
            if split != "test":
                check.errors.append(str(error))
            elif any(matching_paths(spec.root, entry) for entry in spec.splits[split]):
                check.problems.append(str(error))
            else:
                check.notes.append(f"no training needs `test`: {error}")
            continue
        part = SplitData(spec, split, listing, scan(listing, names), single_cls)
        errors = len(check.errors)
        _check_part(check, part)
        fingerprints[part] = check_images(check, part)
        if split == "test":  # training does not read it
            check.problems += check.errors[errors:]
            del check.errors[errors:]
        excluded = excluded_summary(spec, split, part.scanned)
        check.facts += [
            box_size_summary(part, imgsz),
            *ignored_regions(part),
            *partly_labelled(part),
            *weighted_labels(part),
            *([excluded] if excluded else []),
        ]
    for split in ("train", "val"):
        if split not in spec.splits:
            offer = f" {OFFER}" if split == "val" else ""
            check.errors.append(f"{spec.yaml_path}: names no {split} images. Add '{split}:' with their folder.{offer}")
    check.problems += shared_labels([part.listing for part in fingerprints])
    check_untrained(check, list(fingerprints))
    check_copies(check, fingerprints)
    check_near_duplicates(check, fingerprints)
    check_drift(check, list(fingerprints))
    check.names = class_names(spec, single_cls)
    check.counts = [counts_of(part) for part in fingerprints]
    check.facts += _class_table(check.names, check.counts)
    return check


def _check_part(check: DatasetCheck, part: SplitData) -> None:
    listing, scanned = part.listing, part.scanned
    check.images += len(scanned.sizes_hw)
    check.objects += len(scanned.classes)
    check.errors += listing.unmatched_annotations[:MAX_UNMATCHED]
    if more := len(listing.unmatched_annotations[MAX_UNMATCHED:]):
        check.errors.append(f"{part.split}: {more:,} more annotations belong to no image")
    # Splits may share files.
    check.problems += [line for line in listing.problems if line not in check.problems] + scanned.problems
    check.notes += [line for line in listing.notes if line not in check.notes] + scanned.notes
    check.notes += unused_ignores(part.spec, part.split, scanned)
    check.skipped_images += [
        listing.shown(image) for image, usable in zip(listing.images, scanned.usable, strict=True) if not usable
    ]
    if not scanned.unknown:  # else the unknown classes are the errors
        try:
            check_usable(part.spec, part.split, listing, scanned)
        except UserError as error:
            check.errors.append(str(error))
    check_classes(check, part)
    check_label_files(check, part)
    check_auto_labels(check, part)
    check_boxes(check, part)
    if part.split != "train":
        dense = beyond_max_det(
            part.split, scanned.counts, lambda image: listing.shown(listing.images[part.places[image]]), None
        )
        check.problems += [dense] if dense else []


# -------------------------------------------------------------------------------------------------------------- classes


def check_names(check: DatasetCheck, spec: DatasetSpec) -> None:
    """Report classes whose names differ only in case."""
    spelled: dict[str, list[str]] = {}
    for name in spec.names:
        spelled.setdefault(name.casefold(), []).append(shown(name))
    for names in spelled.values():
        if len(names) > 1:
            check.notes.append(
                f"{spec.yaml_path.name}: the classes {first_of(names, 5, ' and ')} differ only in case. If they are "
                "one class, name it once and correct the labels."
            )


def check_classes(check: DatasetCheck, part: SplitData) -> None:
    """Report classes of labels that the YAML does not name, and classes that COCO files do not name."""
    unknown = unknown_classes(part.spec, part.split, part.scanned)
    check.errors += unknown[:_MOST_ERRORS]
    if len(unknown) > _MOST_ERRORS:
        more = len(unknown) - _MOST_ERRORS
        check.errors.append(f"{part.split}: {more:,} more classes are not named: is this the YAML of these labels?")
    if missing := [] if part.single_cls else _absent_categories(part):
        files = dict.fromkeys(part.listing.shown(str(file)) for file, _, _ in part.listing.coco.values())
        check.notes.append(
            f"{first_of(list(files), 3)}: found no category named {first_of(list(map(shown, missing)), 8)}, which "
            f"{part.spec.yaml_path.name} names as classes"
        )


def check_untrained(check: DatasetCheck, parts: Sequence[SplitData]) -> None:
    """Report classes without an object in train: as a problem if another split has objects of them."""
    train = next((part for part in parts if part.split == "train"), None)
    if train is None or train.single_cls or not len(train.scanned.classes):
        return
    if counts_from_one(train.spec, train.scanned):
        return  # of which an error tells
    known, names, classes = _absent_categories(train), train.spec.names, train.scanned.classes
    for part in parts:
        sets = train.scanned.unlabelled_sets
        check.problems += untrained_classes(names, classes, part.split, part.scanned.classes, sets)
        known = [*known, *(names[c] for c in np.unique(part.scanned.classes))]
    if missing := [shown(name) for name in names if name not in known]:
        check.notes.append(f"train: {plural(len(missing), 'class')} without an object: {first_of(missing, 8)}")


def _absent_categories(part: SplitData) -> list[str]:
    """Return the classes that no category of a split's COCO files is named after."""
    listing = part.listing
    named = {name for _, _, categories in listing.coco.values() for name in categories.values()}
    if not listing.coco or len(listing.coco) < len(listing.images):  # other labels may have the classes
        return []
    parts = part.spec.parts or [(name,) for name in part.spec.names]
    return [name for name, own in zip(part.spec.names, parts, strict=True) if named.isdisjoint(own)]


def ignored_regions(part: SplitData) -> list[str]:
    """Return a summary of ignored regions by their origin; [] without regions."""
    classes = part.scanned.ignored_classes
    if not len(classes):
        return []
    kinds = {"crowds and difficult objects": int((classes >= 0).sum()), "rows of class -1": int((classes == -1).sum())}
    kinds |= {shown(name): int((classes == -2 - number).sum()) for number, name in enumerate(part.spec.ignore)}
    images = plural(int((part.scanned.ignored_counts > 0).sum()), "image")
    found = ", ".join(f"{kind} {count:,}" for kind, count in kinds.items() if count)
    regions = plural(len(classes), "ignored region")
    return [f"{part.split}: {regions} in {images}, neither object nor background: {found}"]


def partly_labelled(part: SplitData) -> list[str]:
    """Return a summary of the images that do not label all classes; [] without such images."""
    scanned, names = part.scanned, class_names(part.spec, part.single_cls)
    images = np.bincount(scanned.set_of_image[scanned.set_of_image >= 0], minlength=len(scanned.unlabelled_sets))
    if not len(images):
        return []
    by_class = zip(names, (images @ ~scanned.unlabelled_sets).tolist(), strict=True)
    named = first_of([f"{shown(name)} in {count:,}" for name, count in by_class if count], 8)
    none = int(scanned.labels_nothing().sum())
    partly, classes = int(images.sum()) - none, f": {named}" if named else ""
    every = plural(len(scanned.counts), "image")
    return [f"{part.split}: {partly:,} of {every} label some classes only{classes}; {none:,} label none"]


def weighted_labels(part: SplitData) -> list[str]:
    """Return a summary of the objects that `label_weights` weighs; [] without any."""
    weights = part.scanned.weights
    less = fraction_text(int((weights < 1).sum()), len(weights), "object")
    text = f"{part.split}: {less} have a weight below 1; all together count as {weights.sum():,.1f}"
    return [text] if len(weights) else []


def counts_of(part: SplitData) -> SplitCounts:
    """Return image and object counts of a split."""
    classes, owners, nc = part.scanned.classes, part.owners, len(class_names(part.spec, part.single_cls))
    pairs = np.unique(np.stack((classes, owners), 1), axis=0) if len(classes) else np.zeros((0, 2), np.int64)
    images, objects = (np.bincount(column, minlength=nc).tolist() for column in (pairs[:, 0], classes))
    counts, nothing = part.scanned.counts, part.scanned.labels_nothing()
    empty = int(((counts == 0) & ~nothing).sum())
    return SplitCounts(part.split, len(counts), empty, len(classes), tuple(images), tuple(objects))


def _class_table(names: Sequence[str], counts: Sequence[SplitCounts]) -> list[str]:
    """Return a table of images and objects by class and split."""
    if not counts:
        return []
    heads = [f"{own.split} {noun}" for own in counts for noun in ("img", "obj")]
    columns = [column for own in counts for column in (own.class_images, own.class_objects)]
    rows = [table_row(one_line(escape_control(name), 60), *row) for name, *row in zip(names, *columns, strict=True)]
    more = len(rows) - _MOST_ROWS
    return [table_row("class", *heads), *rows[:_MOST_ROWS], *([f"and {more:,} more classes"] if more > 0 else [])]


# ---------------------------------------------------------------------------------------------------------- label files


def check_label_files(check: DatasetCheck, part: SplitData) -> None:
    """Count the images of a split with and without labels, and report those that may have lost them."""
    listing, scanned = part.listing, part.scanned
    missing = without_label_file(listing, scanned)
    lost = missing_labels(part.split, listing, scanned)
    if part.split == "val" and missing and len(missing) == len(scanned.counts):
        lost = [f"val: none of its {plural(len(missing), 'image')} has a label file, such as {missing[0]}"]
    check.problems += lost + unlabelled_objects(part.split, listing, scanned)
    if missing and not lost:
        check.notes.append(
            f"{part.split}: {plural(len(missing), 'image')} without a label file, used as background: "
            f"{first_of(missing, 3)}"
        )
    objects = int((scanned.counts > 0).sum())
    if part.split != "train" and not objects and not scanned.unknown and len(missing) < len(scanned.counts):
        check.problems.append(without_objects(part.split, len(scanned.counts)))
    empty = (scanned.counts == 0) & ~scanned.labels_nothing()
    regions = int((empty & (scanned.ignored_counts > 0)).sum())
    without = int(empty.sum()) - regions
    alone = f"{regions:,} with ignored regions alone; " if regions else ""
    check.facts.append(
        f"{part.split}: {plural(len(scanned.counts), 'image')}: {objects:,} with objects; {alone}as background, "
        f"{without - len(missing):,} whose labels hold no object and {len(missing):,} without a label file"
    )


def check_auto_labels(check: DatasetCheck, part: SplitData) -> None:
    """Report how many label files are unchanged since `detect.py --auto-label`, the least certain first."""
    files, wrong = {label for label in part.listing.labels if label}, list[str]()
    noted = auto_labels(files, part.listing.root, wrong)
    check.problems += [line for line in wrong if line not in check.problems]
    if not noted:
        return
    same = {path: own for path, own in noted.items() if Path(path).is_file() and sha256(Path(path)) == own.sha256}
    if not part.single_cls:
        check.errors += _other_classes(part, same)
    makers = first_of(sorted({shown(label.weights) for label in noted.values()}), 3)
    changed = f"; it wrote {len(noted) - len(same):,} more, changed since" if len(same) < len(noted) else ""
    line = (
        f"{part.split}: {fraction_text(len(same), len(files), 'label file')} as a model wrote them ({makers}){changed}"
    )
    if same and part.split != "train":
        check.problems.append(f"{line}: metrics on them measure agreement with that model")
        return
    check.facts.append(line)
    least = sorted((min(label.scores, default=1.0), path) for path, label in same.items())
    if unsure := [(score, path) for score, path in least if score < 1]:
        named = first_of([f"{part.listing.shown(path)} ({score:.2f})" for score, path in unsure], 3)
        check.facts.append(f"{part.split}: lowest scores, to review first: {named}")


def _other_classes(part: SplitData, labels: Mapping[str, AutoLabel]) -> list[str]:
    """Return a message for each class number that means another class to the model than to the dataset."""
    own = part.spec.label_names or part.spec.names
    found: dict[tuple[int, str, str], list[str]] = {}
    for path, label in labels.items():
        for number in sorted(set(parse_any_labels(path).classes)):
            if number < min(len(label.names), len(own)):
                name, wanted = label.names[number], own[number]
                if name.strip().casefold() != wanted.strip().casefold():
                    found.setdefault((number, name, wanted), []).append(path)
    yaml = part.spec.yaml_path.name
    return [
        f"{part.split}: class {number} is {shown(name)} in the model {shown(labels[paths[0]].weights)} that wrote "
        f"{first_of([part.listing.shown(path) for path in paths], 3)}, but {shown(wanted)} in {yaml}. Renumber "
        "the rows; if both names mean one class, remove the files from auto_labels.jsonl."
        for (number, name, wanted), paths in found.items()
    ]


# ---------------------------------------------------------------------------------------------------------------- boxes


class UnclippedBoxes(NamedTuple):
    """Boxes of a split as written, before clipping; k boxes."""

    owners: NDArray[np.int64]  # (k,), index of each box's image in the listing
    excess: NDArray[np.float64]  # (k,), largest overshoot as a fraction of the side
    excess_px: NDArray[np.float64]  # the same in pixels
    as_corners: NDArray[np.bool_]  # (k,), third and fourth number exceed the first two, as in x1 y1 x2 y2


def check_boxes(check: DatasetCheck, part: SplitData) -> None:
    """Report boxes without area, boxes that exceed their image, and x1 y1 x2 y2 read as x y w h."""
    for place, count in zip(
        *np.unique(part.owners[has_no_area(part.scanned.boxes_xyxy)], return_counts=True), strict=True
    ):
        where = part.listing.label_location(int(place))(None)
        check.problems.append(f"{where}: {plural(int(count), 'box')} without width or height")
    turned = [place for place, (_, image, _) in part.listing.coco.items() for _, row in image.annotations if _turn(row)]
    if turned:
        check.problems.append(
            f"{part.split}: {plural(len(turned), 'rotated box')} (attributes.rotation), used without rotation: "
            f"{_places(part, turned)}. Export polygons instead"
        )
    written = _written(part)
    corners = _corners(written)
    if corners.any():
        read = "x y width height" if part.listing.coco else "centre x, centre y, width, height"
        number = fraction_text(int(corners.sum()), len(corners), "box")
        check.errors.append(
            f"{part.split}: {number} seem to be written as x1 y1 x2 y2, expected {read}: "
            f"{_places(part, np.unique(written.owners[corners]).tolist())}. Convert these labels."
        )
    beyond = (written.excess > _SLACK) & (written.excess_px > _SLACK_PX) & ~corners
    if beyond.any():
        number, most = fraction_text(int(beyond.sum()), len(beyond), "box"), float(written.excess[beyond].max())
        exceed, their = ("exceeds", "its") if beyond.sum() == 1 else ("exceed", "their")
        by = f"up to {100 * most:.0f} %" if most <= _MOST_SHOWN else f"more than {100 * _MOST_SHOWN:,.0f} %"
        where = _places(part, np.unique(written.owners[beyond]).tolist())
        check.problems.append(f"{part.split}: {number} {exceed} {their} image by {by} of its side: {where}")


def _places(part: SplitData, places: Sequence[int]) -> str:
    return first_of([part.listing.label_location(place)(None) for place in dict.fromkeys(places)], 3)


def _turn(record: Mapping[str, Any]) -> float:
    """Return the degrees by which CVAT states that a box is rotated."""
    attributes = record.get("attributes")
    rotated = numbers([attributes.get("rotation")]) if isinstance(attributes, dict) else None
    return rotated[0] % 180 if rotated else 0.0


def _corners(written: UnclippedBoxes) -> NDArray[np.bool_]:
    """Return which boxes, (k,), seem to be corners where centre and size are expected.

    Corners ascend within a row. Read as centre and size, 60 to 97 % of the boxes in files of ascending rows leave
    the image (cards, raccoon, coco128). Correct boxes hardly ever leave it far.
    """
    if not len(written.owners):
        return np.zeros(0, np.bool_)
    _, of = np.unique(written.owners, return_inverse=True)
    ordered = np.bincount(of, weights=~written.as_corners)[of] == 0  # all boxes of the file
    far = int((ordered & (written.excess > _FAR)).sum())
    return ordered if far >= max(_LEAST, _USUAL * int(ordered.sum())) else np.zeros(len(of), np.bool_)


def _written(part: SplitData) -> UnclippedBoxes:
    """Return the boxes of all usable images as written."""
    listing, scanned = part.listing, part.scanned
    is_text = np.array(
        [place not in listing.coco and not label.endswith(".xml") for place, label in enumerate(listing.labels)]
    )
    mine = is_text[part.owners]  # boxes of label files are not clipped when they are read
    boxes = scanned.boxes_xyxy[mine].astype(np.float64)
    centres, sizes = (boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]
    as_corners = np.all(sizes > centres, axis=1) & (scanned.point_counts[mine] == 0)
    rows = [(part.owners[mine], boxes, as_corners)]
    for place in part.places[~is_text[part.places]].tolist():
        own, own_ordered = _of_records(part, place)
        rows.append((np.full(len(own), place), own, own_ordered))
    places, boxes, ordered = map(np.concatenate, zip(*rows, strict=True))
    image_sizes = np.zeros((len(listing.images), 2))
    image_sizes[part.places] = scanned.sizes_hw[:, ::-1]
    sides = image_sizes[places]
    out = np.maximum(np.maximum(-boxes[:, :2], boxes[:, 2:] - sides), 0)
    excess = (out / np.maximum(sides, 1)).max(1, initial=0)
    return UnclippedBoxes(places, excess, out.max(1, initial=0), ordered)


def _of_records(part: SplitData, place: int) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return corners in pixels, (n, 4), and `as_corners`, (n,), of an image's objects in a COCO or XML file."""
    untrained = part.spec.ignore + part.spec.excluded_names
    if place not in part.listing.coco:
        fractions = np.array(parse_any_labels(part.listing.labels[place], untrained).boxes).reshape(-1, 4)
        corners = corners_of(fractions) * UNBOUNDED
        return corners, np.zeros(len(corners), np.bool_)
    _, image, categories = part.listing.coco[place]
    records = [
        numbers(record.get("bbox"))
        for _, record in image.annotations
        if not is_crowd(record) and category_of(record, categories) not in untrained
    ]
    rows = np.array([row for row in records if row is not None and len(row) == 4], np.float64).reshape(-1, 4)
    return np.hstack((rows[:, :2], rows[:, :2] + rows[:, 2:])), np.all(rows[:, 2:] > rows[:, :2], axis=1)


def box_size_summary(part: SplitData, imgsz: ImageSize) -> str:
    """Return a summary of box sizes in images resized to `imgsz`."""
    boxes = part.scanned.boxes_xyxy
    if not len(boxes):
        return f"{part.split}: no box"
    to, of = fit_ratios(part.scanned.sizes_hw, imgsz)
    scale = np.repeat(to / of, part.scanned.counts)
    low, middle, high = np.quantile((boxes[:, 2:] - boxes[:, :2]) * scale[:, None], (0.05, 0.5, 0.95), axis=0)
    shown = [f"{width:.0f} x {height:.0f}" for width, height in (low, middle, high)]
    return f"{part.split}: boxes at {imgsz} px: 5 % are below {shown[0]}, half below {shown[1]}, 95 % below {shown[2]}"
