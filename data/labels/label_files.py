"""Label file of each image, also under escaped or Unicode-variant names; those without an image, or of a model."""

# Paths are strings, as in data/source/split_files.py.
# ruff: noqa: PTH112, PTH113, PTH118, PTH119, PTH120, PTH122, PTH206, PTH208
from __future__ import annotations

import json
import os
import unicodedata
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from tessera.data.labels.voc import parse_voc
from tessera.data.labels.yolo_labels import ALL_CLASSES, ParsedLabels, parse_labels
from tessera.utils.bit_depth import IMAGE_SUFFIXES, UNREAD_SUFFIXES
from tessera.utils.files import open_plain, sha256, suffix_of
from tessera.utils.text import first_of, one_line, plural, shown

UNBOUNDED = 1 << 24  # pixels, larger than any box; float64 fractions of it still resolve a pixel
NO_CLASS_LIMIT = 2**31 - 1
LONGEST = 1 << 26  # bytes of a label file; 100,000 polygons
AUTO_LABELS = "auto_labels.jsonl"
MOST_AUTO_LABELS = 1 << 30  # bytes
AUTO_LABELS_SCHEMA = "tessera-auto-labels 1"
_ANY_AUTO_LABELS = "auto_labels*.jsonl"
_IMAGES = ("images", "jpegimages")
_ANNOTATIONS = ("annotations", "annots", "annotation", "xml", "xmls", "labels")


@dataclass(frozen=True)
class AutoLabel:
    """A label file that a model wrote."""

    weights: str  # --weights of detect.py
    names: tuple[str, ...]  # class names of the model
    sha256: str  # of the file's content
    scores: tuple[float, ...]  # of its rows


def auto_labels(files: Collection[str], root: str, wrong: list[str]) -> dict[str, AutoLabel]:
    """Return the record of each of the label files in the lists `auto_labels*.jsonl`, those of several runs.

    Lists are in the folders of the files, and above up to `root`. One line describes the run and its classes. One line
    for each label file has its path below the folder, the digest of its content and the score of each row. A file whose
    digest differs has been edited since. Of several records that of the content counts. Messages on bad lines are
    appended to `wrong`.
    """
    own = {os.path.dirname(file) for file in files}
    above = {str(parent) for folder in own for parent in Path(folder).parents}
    folders = own | {folder for folder in above if folder == root or folder.startswith(f"{root}{os.sep}")}
    found = dict[str, AutoLabel]()
    for path in sorted(path for folder in folders for path in Path(folder).glob(_ANY_AUTO_LABELS)):
        weights, names = "", tuple[str, ...]()
        try:
            with open_plain(path, MOST_AUTO_LABELS) as file:
                lines = file.readlines()
        except OSError as error:
            wrong.append(f"{path}: cannot be read ({error.strerror}). Remove it, or write the labels again.")
            continue
        for number, line in enumerate(lines, 1):
            try:
                entry: dict[str, Any] = json.loads(line)
                if "schema" in entry:
                    weights, names = str(entry["weights"]), tuple(map(str, entry["names"]))
                else:
                    scores = tuple(map(float, entry["scores"]))
                    if not all(0 <= score <= 1 for score in scores):
                        raise ValueError
                    at = str(path.parent / entry["labels"])
                    label = AutoLabel(weights, names, str(entry["sha256"]), scores)
                    is_first = at in files and at not in found
                    if is_first or (at in found and os.path.isfile(at) and sha256(Path(at)) == label.sha256):
                        found[at] = label
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
                text = shown(line.decode(errors="replace").strip())
                wrong.append(
                    f"{path}:{number}: found {text}, expected a line as --auto-label writes it; the line is ignored. "
                    "Remove it, or write the labels again."
                )
    return found


class AnyClassName(dict[str, int]):
    """Mapping in which every missing name is class 0."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> int:
        return 0


def label_path(image: str) -> str:
    """Return the label file of an image: the last /images/ becomes /labels/, the suffix .txt."""
    return "/labels/".join(image.rpartition(".")[0].rsplit("/images/", 1)) + ".txt"


def parse_any_labels(path: str, ignore: Sequence[str] = ()) -> ParsedLabels:
    """Parse a label file without checking classes and without clipping boxes to the image.

    An unreadable file gives no labels. VOC boxes are fractions of UNBOUNDED, and VOC objects of classes in `ignore` are
    ignored regions.
    """
    try:
        with open_plain(path, LONGEST) as file:
            raw = file.read()
    except OSError:
        return ParsedLabels()
    if path.endswith(".xml"):
        return parse_voc(raw, (UNBOUNDED, UNBOUNDED), AnyClassName(dict.fromkeys(ignore, ALL_CLASSES)))
    return parse_labels(raw, NO_CLASS_LIMIT)


def match_label_files(
    labels: Mapping[str, str], missing: Sequence[str], accounted_for: Collection[str], shown: Callable[[Path], str]
) -> tuple[dict[str, str], list[str], list[str]]:
    """Return the label file of each image, notes on respelled names, and messages on unmatched label files.

    Args:
        labels: image → expected label file.
        missing: expected label files that do not exist.
        accounted_for: label files without an image that are reported elsewhere.
        shown: formats a path for messages.
    """
    spelled = respelled_label_files(missing, set(labels.values()))
    notes, unused = [], []
    if spelled:
        pairs = [_pair(shown(Path(at)), os.path.basename(label)) for label, at in spelled.items()]
        notes.append(f"{plural(len(pairs), 'label file')} matched by a differently spelled name: {first_of(pairs, 3)}")
    own = {image: spelled.get(label, label) for image, label in labels.items()}
    for folder, names in unmatched_label_files(own, accounted_for).items():
        where, first = shown(Path(folder)), first_of([one_line(name, 60) for name in names], 3)
        count = plural(len(names), "label file")
        unused.append(f"{where}: {count} without an image, objects not used: {first}")
    return own, notes, unused


def respelled_label_files(missing: Sequence[str], known: Collection[str]) -> dict[str, str]:
    """Return missing label file → the only file whose name is equal after URL-decoding and Unicode normalisation.

    Label Studio writes a%2Bb.txt for a+b.jpg, and macOS may decompose accents. Files in `known` have an image.
    """
    folders: dict[str, dict[str, list[str]]] = {}
    for label in dict.fromkeys(missing):
        folders.setdefault(os.path.dirname(label), {}).setdefault(_normalized_name(label), []).append(label)
    found: dict[str, str] = {}
    for folder, wanted in folders.items():
        there: dict[str, list[str]] = {}
        for name in _names(folder):
            if (plain := _normalized_name(f"{folder}/{name}")) in wanted and f"{folder}/{name}" not in known:
                there.setdefault(plain, []).append(f"{folder}/{name}")
        found |= {wanted[plain][0]: files[0] for plain, files in there.items() if len(files) == len(wanted[plain]) == 1}
    return found


def _normalized_name(path: str) -> str:
    stem, suffix = os.path.splitext(os.path.basename(path))
    return normalized_stem(stem) + suffix.lower()


def normalized_stem(stem: str) -> str:
    """Return a file stem URL-decoded and with composed accents."""
    return unicodedata.normalize("NFC", unquote(stem))


def unmatched_label_files(labels: Mapping[str, str], known: Collection[str]) -> dict[str, list[str]]:
    """Return folder → names of label files with objects that match no image, apart from those in `known`."""
    folders: dict[tuple[str, str], set[str]] = {}  # folder of labels, their suffix → folders of images
    for image, label in labels.items():
        if label:
            folders.setdefault((os.path.dirname(label), suffix_of(label)), set()).add(os.path.dirname(image))
    used = {*labels.values(), *known}
    unused: dict[str, list[str]] = {}
    for (folder, suffix), of_images in sorted(folders.items()):
        found = [name for name in _names(folder) if suffix_of(name) == suffix and f"{folder}/{name}" not in used]
        others = {  # label files of unlisted images: other splits, and formats that are not read
            _normalized_name(os.path.splitext(name)[0] + suffix)
            for place in of_images
            for name in (_names(place) if found else ())
            if suffix_of(name) in IMAGE_SUFFIXES | UNREAD_SUFFIXES and f"{place}/{name}" not in labels
        }
        lost = [name for name in found if _normalized_name(name) not in others]
        # Files without objects are class lists and notes.
        if lost := [name for name in lost if parse_any_labels(f"{folder}/{name}").classes]:
            unused[folder] = lost
    return unused


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _pair(found: str, label: str) -> str:
    """Return both names, escaped if composed and decomposed accents, which look alike, are the only difference."""
    same = unicodedata.normalize("NFC", os.path.basename(found)) == unicodedata.normalize("NFC", label)
    return ascii(f"{found} for {label}")[1:-1] if same else f"{found} for {label}"


def voc_folder(folder: str, names: Sequence[str]) -> str | None:
    """Return the folder with XML files of the images in `folder`: itself, or Annotations/ beside JPEGImages/; or None.

    `names` are XML paths relative to that folder, such as train/a.xml for images/train/a.jpg.
    """
    return next((place for place in _places(folder) if _has_any(place, names)), None)


def _has_any(place: str, names: Sequence[str]) -> bool:
    """Return whether a folder has any of the files, URL-escaped names included."""
    if not os.path.isdir(place):
        return False
    if any(os.path.isfile(f"{place}/{name}") for name in names):
        return True
    stems = {normalized_stem(Path(name).stem) for name in names}
    folders = {Path(place, name).parent for name in names}
    return any(normalized_stem(path.stem) in stems for folder in folders for path in folder.glob("*.xml"))


def _places(folder: str) -> Iterator[str]:
    """Yield the folder, then candidates beside the last path component named like images, then beside itself."""
    yield folder
    parts = folder.split(os.sep)
    of_images = [at for at, part in enumerate(parts) if part.lower() in _IMAGES][-1:]
    for at in dict.fromkeys([*of_images, len(parts) - 1]):
        parent = os.sep.join(parts[:at])
        if not os.path.isdir(parent):
            continue
        found = {name.lower(): name for name in sorted(os.listdir(parent), reverse=True)}
        for name in _ANNOTATIONS:
            if name in found:
                yield os.sep.join([parent, found[name], *parts[at + 1 :]])
