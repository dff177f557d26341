"""A converted dataset: labels, links to the pictures, and a YAML that trains."""

# Paths of places are strings, as in data/source/listing.py.
# ruff: noqa: PTH122
from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tessera.data.conversion.coco import write_coco
from tessera.data.conversion.kept import kept_line, write_kept
from tessera.data.conversion.objects import ANY_NAME, Labelled, LabelledImage
from tessera.data.conversion.read import LabelledDataset
from tessera.data.conversion.voc import fields_of, of_fields, row_key, xml_of
from tessera.data.conversion.yolo import of_row, row_of
from tessera.data.source.annotations.classes import keys_of
from tessera.data.source.annotations.label_files import label_path
from tessera.utils.errors import UserError
from tessera.utils.files import write_whole
from tessera.utils.yaml_file import read_yaml

_AS_THEY_ARE = ("split_seed", "pixels")  # keys of the YAML that say nothing of files or classes


def write_dataset(found: LabelledDataset, folder: Path, target: str, *, copy_images: bool) -> dict[str, int]:
    """Write a dataset into an empty folder.

    Args:
        found: the dataset.
        folder: where to; it may be renamed afterwards.
        target: the format: "coco", "voc" or "yolo".
        copy_images: copies of the pictures instead of links to them.

    Returns:
        What the labels of the format have no place for, in words, and how often.

    Raises:
        UserError: two pictures would share a label file and differ in their objects.
        OSError: something cannot be written.
    """
    images = folder / ("JPEGImages" if target == "voc" else "images")
    regions = any(one.name == ANY_NAME for split in found.splits.values() for image in split for one in image.objects)
    entries: dict[str, Any] = {}
    losses, kept = Counter[str](), list[str]()
    for split, of_split in found.splits.items():
        for image in of_split:
            path = images / split / image.place
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(image.path, path) if copy_images else path.symlink_to(image.path)
        entries[split] = f"{images.name}/{split}"
        if target == "coco":
            entries[split] = f"annotations/instances_{split}.json"
            names = (*found.names, *([ANY_NAME] if regions else []))
            write_coco(folder / entries[split], of_split, names, found.categories)
            losses.update(
                ["images without a label file become labelled ones"] * sum(not i.has_labels for i in of_split)
            )
        else:
            kept += _write_labels(found, folder, images / split, of_split, split, target, losses)
        if target == "voc":  # what other readers of VOC begin with
            stems = "".join(f"{split}/{os.path.splitext(image.place)[0]}\n" for image in of_split)
            (folder / "ImageSets" / "Main").mkdir(parents=True, exist_ok=True)
            write_whole(folder / "ImageSets" / "Main" / f"{split}.txt", stems.encode(errors="surrogateescape"))
    if kept or (found.categories and target != "coco"):
        write_kept(folder, found.categories.values(), kept)
    write_spec(found, folder, entries, regions and target != "yolo")
    return losses


def _write_labels(
    found: LabelledDataset,
    folder: Path,
    images: Path,
    of_split: Sequence[LabelledImage],
    split: str,
    target: str,
    losses: Counter[str],
) -> list[str]:
    """Write the label files of a split; returns a line for each image of which something is to be kept beside."""
    names = found.spec.label_names or found.spec.names
    numbers = {name: number for number, name in enumerate(names)}
    owners: dict[Path, LabelledImage] = {}
    kept: list[str] = []
    for image in of_split:
        path = Path(label_path(str(images / image.place)))
        if target == "voc":
            path = (folder / "Annotations" / split / image.place).with_suffix(".xml")
        other = owners.setdefault(path, image)
        if other is not image and [*map(Labelled.fields, other.objects)] != [*map(Labelled.fields, image.objects)]:
            raise UserError(
                f"{other.path} and {image.path} would have one label file, {path.relative_to(folder)}, but have "
                "different objects. Rename one of the two."
            )
        rows: dict[str, list[Labelled]] = {}
        texts: list[str] = []
        of_voc = [fields_of(one) for one in image.objects] if target == "voc" else []
        for at, one in enumerate(image.objects):
            if target == "voc":
                text, back = row_key(of_voc[at]), of_fields(of_voc[at])
            else:
                text = row_of(one, image.size_hw, numbers)
                back = of_row(text, image.size_hw, names)
            texts.append(text)
            if back.fields() != one.fields():
                rows.setdefault(text, []).append(one)
                losses.update(_lost(one, back, target))
        if image.has_labels:
            path.parent.mkdir(parents=True, exist_ok=True)
            content = xml_of(image, of_voc) if target == "voc" else "".join(f"{text}\n" for text in texts)
            write_whole(path, content.encode())
        if rows or image.more:
            kept.append(kept_line(f"{split}/{image.place}", image.more, rows))
    return kept


def _lost(one: Labelled, back: Labelled, target: str) -> list[str]:
    """What a row says less than its object, of what a training would see."""
    found = []
    if back.name != one.name:
        found.append("crowds and difficult objects, regions of their class, become regions of every class (class -1)")
    if "segmentation" in one.more and not one.parts:
        found.append("masks become boxes")
    if one.parts and not back.parts:
        found.append("polygons become boxes")
    elif len(one.parts) > 1:
        found.append("polygons of several parts become one, part after part")
    if back.fields()["bbox"] != one.fields()["bbox"]:
        of_rows = "boxes are cut to the image, or become those around their polygons"
        found.append("boxes below one pixel become a pixel wide or high" if target == "voc" else of_rows)
    return found


def write_spec(found: LabelledDataset, folder: Path, entries: dict[str, Any], with_regions: bool) -> None:
    """Write the YAML, named as that of the source.

    Args:
        found: the dataset.
        folder: of the labels, where the YAML goes.
        entries: split → where its images or annotations are.
        with_regions: whether regions of every class are objects of a class to ignore.
    """
    spec, source = found.spec, read_yaml(found.spec.yaml_path, "a dataset").values
    keys = keys_of(spec)
    ignore = {number: name for number, name in keys.get("ignore", {}).items() if name != ANY_NAME}
    if with_regions:
        ignore[len(found.names)] = ANY_NAME
    values: dict[str, Any] = dict(entries)
    if spec.held_out:
        values["val"] = spec.held_out.share
    values |= {key: value for key, value in {**keys, "ignore": ignore}.items() if value}
    values |= {key: source[key] for key in _AS_THEY_ARE if key in source}
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, default_flow_style=None, width=120)
    note = f"# Labels of {spec.yaml_path}, by convert.py"
    write_whole(folder / f"{spec.name}.yaml", f"{note}\n{text}".encode())
