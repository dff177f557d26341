"""Class lists beside a dataset, such as classes.txt of a labelling tool, compared with the names of the YAML."""

from __future__ import annotations

import json
import os
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tessera.data.labels.classes import LONGEST_CLASS_NAME, parse_classes
from tessera.data.labels.label_files import NO_CLASS_LIMIT
from tessera.data.labels.yolo_labels import parse_labels
from tessera.data.source.dataset_root import DatasetRoot, path_texts
from tessera.utils.bit_depth import IMAGE_SUFFIXES
from tessera.utils.files import open_plain, suffix_of
from tessera.utils.text import first_of, shown
from tessera.utils.types import DatasetSpec
from tessera.utils.yaml_file import MAX_BYTES, read_yaml

# Of LabelImg, Darknet and CVAT, Label Studio, Roboflow and others.
_TEXTS = ("classes.txt", "obj.names", "classes.names", "predefined_classes.txt", "labels.txt", "_darknet.labels")
_LISTS = (*_TEXTS, "notes.json", "data.yaml", "dataset.yaml")
_NUMBERED, _NUMBER_LAST = re.compile(r"(\d+)\s*[:,\s]\s*(.+)"), re.compile(r"(.+?)\s*[:,\s]\s*(\d+)")
_BACKGROUND = {"background", "???"}  # as first of other programs' lists, whose numbers are one larger
_MOST_FOLDERS, _ABOVE = 100, 3  # folders to search; levels above a folder of labels


def contradictions(spec: DatasetSpec, labels: Iterable[str]) -> list[str]:
    """Return a message for each class list that gives a class number of the text labels `labels` another name.

    Only names that differ in more than case and separators count, and only numbers that both name.
    """
    own = spec.label_names or spec.names
    found: dict[tuple[int, str], list[Path]] = {}
    for path, names in _class_lists(spec, labels).items():
        first = next((n for n, name in sorted(names.items()) if n < len(own) and _plain(name) != _plain(own[n])), None)
        if first is not None:
            found.setdefault((first, names[first]), []).append(path)
    return [
        f"{first_of([_shown(path, spec) for path in paths], 3)}: class {number} is {shown(name)}, but "
        f"{spec.yaml_path.name} names it {shown(own[number])}. Label files hold numbers alone: correct `names`, or "
        "remove the list if it is wrong"
        for (number, name), paths in found.items()
    ]


def _shown(path: Path, spec: DatasetSpec) -> str:
    return shown(path.relative_to(spec.root) if path.is_relative_to(spec.root) else path)


def _class_lists(spec: DatasetSpec, labels: Iterable[str]) -> Mapping[Path, dict[int, str]]:
    """Return path → class number → name, of the lists beside text labels and above them, at most in the root."""
    of_labels = {label.rpartition("/")[0] for label in labels if label.endswith(".txt")}
    folders: set[Path] = set()
    for folder in map(Path, of_labels):
        above = [folder, *folder.parents][: _ABOVE + 1]
        folders |= {place for place in above if place.is_relative_to(spec.root)} or set(above[:_ABOVE])
    found = {}
    for folder in sorted(folders, key=lambda folder: (len(folder.parts), folder))[:_MOST_FOLDERS]:
        for path in (folder / name for name in _LISTS):
            if os.path.isfile(path) and (names := _read(path, spec)):  # noqa: PTH113 - False where it may not look
                found[path] = names
    return found


def _read(path: Path, spec: DatasetSpec) -> dict[int, str]:
    """Return class number → name of a class list; {} if it is none, or of another dataset."""
    with suppress(OSError, ValueError, LookupError, TypeError, RecursionError):  # files of others: UserErrors as well
        if path.suffix == ".yaml":
            return dict(enumerate(_names_of_yaml(path, spec)))
        with open_plain(path) as file:
            raw = file.read(MAX_BYTES)
        if path.suffix == ".json":
            return {int(category["id"]): str(category["name"]) for category in json.loads(raw)["categories"]}
        names = [name for line in raw.decode("utf-8-sig").splitlines() if (name := line.strip()) and name[0] != "#"]
        names = names[0].split(",") if len(names) == 1 else names
        if any(suffix_of(name) in {*IMAGE_SUFFIXES, ".txt"} or len(name) > LONGEST_CLASS_NAME for name in names):
            return {}
        if parse_labels(raw, NO_CLASS_LIMIT).classes:  # of an image of that name
            return {}
        found = _by_number(names)
        named = {_plain(name) for name in spec.label_names or spec.names}
        is_other_text = path.name == "labels.txt" and named.isdisjoint(map(_plain, found.values()))
        return {} if is_other_text or _plain(found.get(0, "")) in _BACKGROUND - named else found
    return {}


def _by_number(names: Sequence[str]) -> dict[int, str]:
    """Return class number → name of the lines of a list, such as `cat`, `0: cat` or `cat 0`."""
    for form, number, name in ((_NUMBERED, 1, 2), (_NUMBER_LAST, 2, 1)):
        rows = [row for text in names if (row := form.fullmatch(text))]
        found = {int(row[number]): row[name] for row in rows}
        if len(found) == len(names) and (form is _NUMBERED or [*found] == [*range(len(found))]):
            return found
    return dict(enumerate(names))


def _names_of_yaml(path: Path, spec: DatasetSpec) -> list[str]:
    """Return the names of another dataset YAML that shares images with `spec`; [] of any other."""
    if path.samefile(spec.yaml_path):
        return []
    found = read_yaml(path, "keys and values", ("names", "ignore", "classes"))
    stated = {split: found.values.get(split) for split in ("train", "val", "test")}
    texts = {split: path_texts(entry) for split, entry in stated.items()}
    place = DatasetRoot(path, str(path), found.values.get("path"), texts)
    root = place.locate()
    other = {place.resolve(root, text) for own in texts.values() for text in own}
    own = {entry for entries in spec.splits.values() for entry in entries}
    if not any(a == b or a in b.parents or b in a.parents for a in own for b in other):
        return []
    classes = parse_classes(found)
    return [*(classes.label_names or classes.names)]


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]+", " ", unicodedata.normalize("NFC", name).strip("_ '\"").casefold())
