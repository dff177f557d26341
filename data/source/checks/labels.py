"""Label checks of `--check-data`: classes that are unnamed or unused, or differ only in case; counts by class.

Also images without labels, and model-written labels that nobody has edited.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tessera.data.source.annotations.auto_labels import AutoLabel, auto_labels
from tessera.data.source.annotations.label_files import parse_any_labels
from tessera.data.source.checks.results import DatasetCheck, SplitCounts, SplitData, fraction_text
from tessera.data.source.index import class_names
from tessera.data.source.messages import counts_from_one, missing_labels, unknown_classes, unlabelled, without_objects
from tessera.utils.files import sha256
from tessera.utils.text import escape_control, first_of, one_line, plural, shown, table_row
from tessera.utils.types import DatasetSpec

_MOST_ROWS = 100
_MOST_ERRORS = 20  # classes; more mean that the YAML belongs to another dataset


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
    """Report classes of labels that the YAML does not name, and classes without an object in train."""
    unknown = unknown_classes(part.spec, part.split, part.scanned)
    check.errors += unknown[:_MOST_ERRORS]
    if len(unknown) > _MOST_ERRORS:
        more = len(unknown) - _MOST_ERRORS
        check.errors.append(f"{part.split}: {more:,} more classes are not named: is this the YAML of these labels?")
    if part.single_cls:
        return
    absent = _absent_categories(check, part)
    used = {*part.scanned.classes.tolist(), *([0] if counts_from_one(part.spec, part.scanned) else [])}
    missing = [shown(name) for number, name in enumerate(part.spec.names) if number not in used and name not in absent]
    if part.split == "train" and missing and used:
        check.notes.append(f"train: {plural(len(missing), 'class')} without an object: {first_of(missing, 8)}")


def _absent_categories(check: DatasetCheck, part: SplitData) -> set[str]:
    """Report and return the classes that no category of a split's COCO files is named after."""
    listing = part.listing
    files = {listing.shown(str(file)): categories for file, _, categories in listing.coco.values()}
    named = {name for categories in files.values() for name in categories.values()}
    if not listing.coco or len(listing.coco) < len(listing.images):  # other labels may have the classes
        return set()
    parts = part.spec.parts or [(name,) for name in part.spec.names]
    missing = [name for name, own in zip(part.spec.names, parts, strict=True) if named.isdisjoint(own)]
    if missing:
        check.notes.append(
            f"{first_of(list(files), 3)}: found no category named {first_of(list(map(shown, missing)), 8)}, which "
            f"{part.spec.yaml_path.name} names as classes"
        )
    return set(missing)


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


def counts_of(part: SplitData) -> SplitCounts:
    """Return image and object counts of a split."""
    classes, owners, nc = part.scanned.classes, part.owners, len(class_names(part.spec, part.single_cls))
    pairs = np.unique(np.stack((classes, owners), 1), axis=0) if len(classes) else np.zeros((0, 2), np.int64)
    images, objects = (np.bincount(column, minlength=nc).tolist() for column in (pairs[:, 0], classes))
    counts = part.scanned.counts
    return SplitCounts(part.split, len(counts), int((counts == 0).sum()), len(classes), tuple(images), tuple(objects))


def table(names: Sequence[str], counts: Sequence[SplitCounts]) -> list[str]:
    """Return a table of images and objects by class and split."""
    if not counts:
        return []
    heads = [f"{own.split} {noun}" for own in counts for noun in ("img", "obj")]
    columns = [column for own in counts for column in (own.class_images, own.class_objects)]
    rows = [table_row(one_line(escape_control(name), 60), *row) for name, *row in zip(names, *columns, strict=True)]
    more = len(rows) - _MOST_ROWS
    return [table_row("class", *heads), *rows[:_MOST_ROWS], *([f"and {more:,} more classes"] if more > 0 else [])]


def check_label_files(check: DatasetCheck, part: SplitData) -> None:
    """Count the images of a split with and without labels, and report those that may have lost them."""
    listing, scanned = part.listing, part.scanned
    missing = unlabelled(listing, scanned)
    lost = missing_labels(part.split, listing, scanned)
    if part.split == "val" and missing and len(missing) == len(scanned.counts):
        lost = [f"val: none of its {plural(len(missing), 'image')} has a label file, such as {missing[0]}"]
    check.problems += lost
    if missing and not lost:
        check.notes.append(
            f"{part.split}: {plural(len(missing), 'image')} without a label file, used as background: "
            f"{first_of(missing, 3)}"
        )
    objects = int((scanned.counts > 0).sum())
    if part.split != "train" and not objects and not scanned.unknown and len(missing) < len(scanned.counts):
        check.problems.append(without_objects(part.split, len(scanned.counts)))
    regions = int(((scanned.counts == 0) & (scanned.ignored_counts > 0)).sum())
    without = len(scanned.counts) - objects - regions
    alone = f"{regions:,} with ignored regions alone; " if regions else ""
    check.facts.append(
        f"{part.split}: {plural(len(scanned.counts), 'image')}: {objects:,} with objects; {alone}as background, "
        f"{without - len(missing):,} whose labels hold no object and {len(missing):,} without a label file"
    )


def check_auto_labels(check: DatasetCheck, part: SplitData) -> None:
    """Report how many label files are unchanged since `detect.py --auto-label`, the least certain first."""
    root = Path(part.listing.root)
    files = {Path(label) for place, label in enumerate(part.listing.labels) if label and place not in part.listing.coco}
    own = {file.parent for file in files}
    above = {parent for folder in own for parent in folder.parents if parent == root or root in parent.parents}
    noted = {path: label for path, label in auto_labels(own | above, check.problems).items() if path in files}
    if not noted:
        return
    same = {path: label for path, label in noted.items() if path.is_file() and sha256(path) == label.sha256}
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
    unsure = sorted((label.least_score, path) for path, label in same.items() if label.least_score < 1)
    if unsure:
        named = first_of([f"{part.listing.shown(str(path))} ({score:.2f})" for score, path in unsure], 3)
        check.facts.append(f"{part.split}: lowest scores, to review first: {named}")


def _other_classes(part: SplitData, labels: Mapping[Path, AutoLabel]) -> list[str]:
    """Return a message for each class number that means another class to the model than to the dataset."""
    own = part.spec.label_names or part.spec.names
    found: dict[tuple[int, str, str], list[Path]] = {}
    for path, label in labels.items():
        for number in sorted(set(parse_any_labels(str(path)).classes)):
            if number < min(len(label.names), len(own)):
                name, wanted = label.names[number], own[number]
                if name.strip().casefold() != wanted.strip().casefold():
                    found.setdefault((number, name, wanted), []).append(path)
    yaml = part.spec.yaml_path.name
    return [
        f"{part.split}: class {number} is {shown(name)} in the model {shown(labels[paths[0]].weights)} that wrote "
        f"{first_of([part.listing.shown(str(path)) for path in paths], 3)}, but {shown(wanted)} in {yaml}. Renumber "
        "the rows; if both names mean one class, remove the files from auto_labels.jsonl."
        for (number, name, wanted), paths in found.items()
    ]
