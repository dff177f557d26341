"""Label file checks of `--check-data`: images without labels, and model-written labels that nobody has edited."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tessera.analysis.checks.results import DatasetCheck, SplitData, fraction_text
from tessera.data.labels.auto_labels import AutoLabel, auto_labels
from tessera.data.labels.label_files import parse_any_labels
from tessera.data.source.messages import missing_labels, unlabelled, without_objects
from tessera.utils.files import sha256
from tessera.utils.text import first_of, plural, shown


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
