"""A dataset read for its conversion: as training reads it, and then every number as it is written."""

# Paths are strings, as in data/source/listing.py.
# ruff: noqa: PTH120
from __future__ import annotations

import codecs
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tessera.data.conversion.coco import ExactCoco, read_exactly
from tessera.data.conversion.kept import Kept, read_kept
from tessera.data.conversion.objects import ANY_NAME, Labelled, LabelledImage, Size, of_record
from tessera.data.conversion.voc import of_fields, row_key
from tessera.data.conversion.yolo import of_row
from tessera.data.source.annotations.coco import CocoImage
from tessera.data.source.annotations.voc import voc_objects
from tessera.data.source.listing import Listing, list_images
from tessera.data.source.refusals import unknown_classes
from tessera.data.source.scan import ClassNames, Scan, scan
from tessera.utils.errors import UserError
from tessera.utils.text import first_of
from tessera.utils.types import DatasetSpec

_SHOWN, _NEXT_LINE = 5, "\n  "
_LEFT_OUT = "; the image is left out"


@dataclass
class LabelledDataset:
    """A dataset with all that its labels say.

    Attributes:
        spec: the dataset.
        names: of all classes of the labels, by their numbers there; regions of every class have no name among them.
        splits: split → its images.
        figures: split → how many images, objects and ignored regions are read for training.
        categories: name → category of COCO.
        notes: what was found beside, a line each.
    """

    spec: DatasetSpec
    names: tuple[str, ...]
    splits: dict[str, list[LabelledImage]] = field(default_factory=dict)
    figures: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    categories: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add_categories(self, named: Mapping[str, Mapping[str, Any]]) -> None:
        """Take the categories of a file; where two files differ in an id, all are numbered anew."""
        together = {**self.categories, **named}
        pairs = {(name, own[name]["id"]) for own in (self.categories, named) for name in own}
        if len({number for _, number in pairs}) < len(pairs) or len(together) < len(pairs):
            self.notes.append("categories have other ids in one COCO file than in another: they are numbered anew")
            together = {name: {**record, "id": number} for number, (name, record) in enumerate(together.items(), 1)}
        self.categories = together


def read_dataset(spec: DatasetSpec) -> LabelledDataset:
    """Read all splits.

    Raises:
        UserError: training would leave an image out, or does not know a class: nothing is to be lost on the way.
    """
    label_names = spec.label_names or spec.names
    if ANY_NAME in label_names and ANY_NAME not in spec.ignore:
        raise UserError(f"{spec.yaml_path}: a class is named '{ANY_NAME}', as regions of every class are. Rename it.")
    found = LabelledDataset(spec, tuple(name for name in label_names if name != ANY_NAME))
    kept = read_kept(spec.yaml_path.parent)
    found.add_categories(kept.categories)
    listings = []
    for split in spec.splits:
        if spec.held_out and split == "val":  # images of train
            continue
        listing = list_images(spec, split)
        listings.append(listing)
        scanned = scan(listing, ClassNames.of(spec, False))
        _refuse_losses(spec, split, listing, scanned)
        found.notes += [*listing.problems, *listing.notes, *scanned.problems, *scanned.notes]
        found.figures[split] = len(scanned.sizes_hw), len(scanned.classes), len(scanned.ignored_classes)
        found.splits[split] = list(_images(found, split, listing, scanned, kept))
    return found


def _refuse_losses(spec: DatasetSpec, split: str, listing: Listing, scanned: Scan) -> None:
    lost = [*filter(None, listing.ownerless), *(line for line in scanned.problems if line.endswith(_LEFT_OUT))]
    lines = [*unknown_classes(spec, split, scanned), *(line.removesuffix(_LEFT_OUT) for line in lost)]
    if lines:
        raise UserError(
            f"{spec.yaml_path}: {split}: what cannot be read would be lost, so nothing is written:\n  "
            f"{first_of(lines, _SHOWN, _NEXT_LINE)}\nCorrect it first; train.py --check-data lists everything."
        )


def _images(found: LabelledDataset, split: str, listing: Listing, scanned: Scan, kept: Kept) -> Iterator[LabelledImage]:
    """The images of a split in the order of their paths."""
    files: dict[Path, ExactCoco] = {}
    for file, _, categories in listing.coco.values():
        if file not in files:
            files[file] = read_exactly(file, categories)
            found.add_categories(files[file].categories)
    base, known = _base(found.spec, split, listing), {*found.names, ANY_NAME}
    is_one_file = len(files) == 1 and len(listing.coco) == len(listing.images)
    for at, (path, (height, width)) in enumerate(zip(listing.images, scanned.sizes_hw.tolist(), strict=True)):
        place, has_labels = os.path.relpath(path, base).replace(os.sep, "/"), True
        more: Mapping[str, Any]
        if at in listing.coco:
            file, image, _ = listing.coco[at]
            stated = files[file].place(image.id)
            place = stated if stated and is_one_file else place
            objects, more = _of_coco(files[file], image, known), files[file].more(image.id)
            if len(objects) < len(image.annotations):
                found.notes.append(f"{listing.label_place(at)(None)}: crowds without a box or a class are left out")
        else:
            key, label = f"{split}/{place}", listing.labels[at]
            has_labels = bool(listing.label_stats[at, 0] >= 0)
            own = _own_objects(found, label, (height, width)) if has_labels else []
            objects, more = kept.instead(key, own), kept.images.get(key, {})
        yield LabelledImage(path, place, (height, width), has_labels, tuple(objects), more)


def _of_coco(file: ExactCoco, image: CocoImage, known: Collection[str]) -> list[Labelled]:
    """The objects of an image that are of a known class, and have a box."""
    objects = []
    for number, _ in image.annotations:
        name = file.name(number)
        labelled = of_record(file.annotations[number], name) if name is not None and name in known else None
        objects += [labelled] if labelled else []
    return objects


def _own_objects(found: LabelledDataset, label: str, size_hw: Size) -> list[tuple[str, Labelled]]:
    """The objects of a label file, each with the text that tells it from others."""
    raw = Path(label).read_bytes()
    if label.endswith(".xml"):
        if b"<part>" in raw:
            found.notes.append(f"{label}: its objects have parts (<part>), which are left out")
        return [(row_key(fields), of_fields(fields)) for fields in voc_objects(raw)]
    names = found.spec.label_names or found.spec.names
    rows = [" ".join(line.decode().split()) for line in raw.removeprefix(codecs.BOM_UTF8).splitlines()]
    return [(row, of_row(row, size_hw, names)) for row in rows if row]


def _base(spec: DatasetSpec, split: str, listing: Listing) -> str:
    """The folder that the images of a split are named from: that of its entry, else the one that all of them are in."""
    entry = str(spec.splits[split][0])
    if len(spec.splits[split]) == 1 and all(image.startswith(f"{entry}/") for image in listing.images):
        return entry
    return os.path.commonpath([os.path.dirname(image) for image in listing.images])
