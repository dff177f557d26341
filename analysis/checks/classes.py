"""Class checks of `--check-data`: unnamed or unused classes, names that differ only in case, counts by class."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tessera.analysis.checks.results import DatasetCheck, SplitCounts, SplitData
from tessera.data.source.index import class_names
from tessera.data.source.messages import counts_from_one, unknown_classes, untrained_classes
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
        check.problems += untrained_classes(names, classes, part.split, part.scanned.classes)
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
