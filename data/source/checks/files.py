"""Images without a label file, and those without an object."""

from __future__ import annotations

from tessera.data.source.checks.part import Part
from tessera.data.source.checks.report import DatasetCheck
from tessera.data.source.refusals import missing_labels, unlabelled, without_objects
from tessera.utils.text import counted, first_of


def check_label_files(check: DatasetCheck, part: Part) -> None:
    """Count the images of a split by whether they have labels, and report those that may have lost theirs."""
    listing, scanned = part.listing, part.scanned
    missing = unlabelled(listing, scanned)
    lost = missing_labels(part.split, listing, scanned)
    if part.split == "val" and missing and len(missing) == len(scanned.counts):
        lost = [f"val: none of its {counted(len(missing), 'image')} has a label file, such as {missing[0]}"]
    check.problems += lost
    if missing and not lost:
        check.notes.append(
            f"{part.split}: {counted(len(missing), 'image')} without a label file, used as background: "
            f"{first_of(missing, 3)}"
        )
    objects = int((scanned.counts > 0).sum())
    if part.split != "train" and not objects and not scanned.unknown and len(missing) < len(scanned.counts):
        check.problems.append(without_objects(part.split, len(scanned.counts)))
    regions = int(((scanned.counts == 0) & (scanned.ignored_counts > 0)).sum())
    without = len(scanned.counts) - objects - regions
    alone = f"{regions:,} with ignored regions alone; " if regions else ""
    check.facts.append(
        f"{part.split}: {counted(len(scanned.counts), 'image')}: {objects:,} with objects; {alone}as background, "
        f"{without - len(missing):,} whose labels hold no object and {len(missing):,} without a label file"
    )
