"""Listing of a split: its images and their label files, unread; COCO files are read with their annotations.

`val: 0.2` holds out a part of train (`select_images`). Images listed by paths of another machine are relocated.
"""

# Paths are strings: 100,000 Path objects would cost seconds at each start.
# ruff: noqa: PTH110, PTH112, PTH113, PTH114, PTH116, PTH118, PTH119, PTH120, PTH122
from __future__ import annotations

import hashlib
import itertools
import logging
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import compress, takewhile
from pathlib import Path
from urllib.parse import unquote

import numpy as np
from numpy.typing import NDArray

from tessera.data.labels.coco import CocoImage, read_coco
from tessera.data.labels.label_files import (
    AutoLabel,
    auto_labels,
    label_path,
    match_label_files,
    normalized_stem,
    voc_folder,
)
from tessera.data.source.class_lists import contradictions
from tessera.data.source.dataset_root import expand_entry, images_and_xmls, list_base_dir, read_path_list, stem_of
from tessera.utils.bit_depth import IMAGE_SUFFIXES, UNREAD_SUFFIXES, unread_images
from tessera.utils.environment import cache_dir
from tessera.utils.errors import UserError
from tessera.utils.files import (
    LONGEST_PATH,
    cached_content,
    files_below,
    is_address,
    open_plain,
    suffix_of,
    working_directory,
)
from tessera.utils.machine.host import in_chunks, usable_cpus
from tessera.utils.text import first_of, one_line, plural, shown
from tessera.utils.types import DatasetSpec

Stat = tuple[int, int, int]  # size in bytes; times of modification, which archives set, and of change, in ns
MISSING: Stat = (-1, -1, -1)
NOT_PLAIN: Stat = (-2, -2, -2)  # a folder, FIFO, device, socket or broken link
OFFER = "`val: 0.2` holds out a fifth of train, with copies of a file on one side."
_SPLIT = re.compile(  # folder names such as val2017, valid, images_train or obj_train_data
    r"(?:(?:data|images?|imgs?|obj)[-_]?)?(train|val|test)(?:id|idation|ing)?(?:[-_]?(?:\d{4}|data|images?|imgs?|set))?",
    re.IGNORECASE,
)
_SHOWN, _LONGEST = 3, 120  # images to name, and characters of each
_PROBLEMS = 3  # to name if there is no image
_FILES_AT_A_TIME = 1024
_IMAGES = IMAGE_SUFFIXES | UNREAD_SUFFIXES
_SLOW_S = 0.0001  # a file; from memory it takes a thirtieth of that
log = logging.getLogger(__name__)

CachedCocoListing = Mapping[str, tuple[Stat, Sequence[str]]]


@dataclass
class Listing:
    """Images of a split in the order of their paths, each once."""

    root: str  # dataset root, which messages name files relative to
    images: list[str] = field(default_factory=list)  # absolute paths, and URLs
    labels: list[str] = field(default_factory=list)  # expected .txt or .xml of each image; "" for COCO
    image_stats: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 3), np.int64))  # Stats
    label_stats: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 3), np.int64))
    # Index in `images` → COCO file, image with its annotations, category id → name.
    coco: dict[int, tuple[Path, CocoImage, dict[int, str]]] = field(default_factory=dict)
    labelled: list[tuple[str, ...] | None] = field(default_factory=list)  # classes labelled in each image; None = all
    coco_images: dict[str, tuple[Stat, Sequence[str]]] = field(default_factory=dict)  # COCO file → state, images
    is_complete: bool = True  # False if the annotations of a cached COCO file were not read
    problems: list[str] = field(default_factory=list)  # messages that cost images or labels
    notes: list[str] = field(default_factory=list)  # harmless messages
    unmatched_annotations: list[str] = field(default_factory=list)  # COCO annotations without an image: an error
    auto_labels: dict[str, AutoLabel] | None = None  # label file → its record; None if labels have no weights

    def shown(self, path: str) -> str:
        """Return a path as messages name it."""
        return one_line(path[len(self.root) + 1 :] if path.startswith(self.root + os.sep) else path, LONGEST_PATH)

    def subset(self, wanted: NDArray[np.bool_]) -> Listing:
        """Return the images where `wanted`, bool (N,), is True."""
        places = np.flatnonzero(wanted).tolist()
        images, labels = ([paths[place] for place in places] for paths in (self.images, self.labels))
        coco = {new: self.coco[old] for new, old in enumerate(places) if old in self.coco}
        return replace(
            self,
            images=images,
            labels=labels,
            image_stats=self.image_stats[places],
            label_stats=self.label_stats[places],
            coco=coco,
            labelled=[self.labelled[place] for place in places],
        )

    def label_location(self, index: int) -> Callable[[int | None], str]:
        """Return a function that formats a label line of image `index` for messages; None stands for all lines."""
        if index in self.coco:
            file, _, _ = self.coco[index]
            shown = self.shown(str(file))
            return lambda line: (
                f"{self.shown(self.images[index])} ({shown})" if line is None else f"{shown}: annotations[{line}]"
            )
        shown = self.shown(self.labels[index])
        return lambda line: shown if line is None else f"{shown}:{line}"


def list_images(spec: DatasetSpec, split: str, cached: CachedCocoListing | None = None) -> Listing:
    """List the images of a split.

    A COCO file with an unchanged state in `cached` is not read again.

    Raises:
        UserError: the split is not in the YAML, or an entry does not exist or holds no image.
    """
    if not spec.splits.get(split):
        have = ", ".join(spec.splits)
        offer = f" {OFFER}" if split == "val" else ""
        raise UserError(f"{spec.yaml_path}: found {have}, expected `{split}`. Add `{split}:` with its images.{offer}")
    listing = Listing(str(spec.root))
    collected = _Collector(spec, split, cached or {}, listing, tops={str(spec.root)})
    entries = spec.splits[split]
    classes_of = spec.labelled.get(split, (None,) * len(entries))
    empty = [entry for entry, own in zip(entries, classes_of, strict=True) if not collected.add_entry(entry, own)]
    unread = unread_images([*dict.fromkeys(collected.unread)])
    listing.problems += [f"{split}: {unread}"] if unread else []
    if not collected.labels:
        places = first_of([shown(path) + _other_files(path) for path in spec.splits[split]], 10, "\n  ")
        found = first_of(listing.problems, _PROBLEMS, "\n") + "\n" * bool(listing.problems)
        raise UserError(
            f"{spec.yaml_path}: {split}: no image found in\n  {places}\n{found}Expected files that end in "
            f"{' '.join(sorted(suffix[1:] for suffix in IMAGE_SUFFIXES))}."
        )
    listing.problems += [f"{split}: no image found in {collected.shown(path)}{_other_files(path)}" for path in empty]
    listing.images, listing.image_stats = collected.resolve_images()
    labels = [collected.labels[image] for image in listing.images]
    label_stats = stats(labels)
    if collected.resolve_voc(listing.images, label_stats[:, 0] == MISSING[0]):
        labels = [collected.labels[image] for image in listing.images]
        label_stats = stats(labels)
    missing = [labels[place] for place in np.flatnonzero(label_stats[:, 0] == MISSING[0]) if labels[place]]
    own, respelled, unused = match_label_files(collected.labels, missing, collected.orphans, collected.shown)
    listing.notes += respelled
    listing.problems += unused
    if respelled:
        labels = [own[image] for image in listing.images]
        label_stats = stats(labels)
    listing.labels, listing.label_stats = labels, label_stats
    is_there = label_stats[:, 0] != MISSING[0]
    listing.problems += contradictions(spec, itertools.compress(labels, is_there.tolist()))
    if spec.label_weights and split == "train":
        listing.auto_labels = auto_labels({label for label in labels if label}, listing.root, listing.problems)
    listing.labelled = [collected.labelled[image] for image in listing.images]
    listing.coco = {at: collected.coco[image] for at, image in enumerate(listing.images) if image in collected.coco}
    if collected.repeated:
        count, times = len(set(collected.repeated)), plural(len(collected.repeated), "further time")
        listing.notes.append(
            f"{spec.yaml_path.name}: {split} lists {plural(count, 'image')} repeatedly ({times}); each is used once"
            + (". To show rare classes more often, give --sampling balanced or --image-weights" * (split == "train"))
        )
    return listing


def stats(paths: Sequence[str]) -> NDArray[np.int64]:
    """Return the states (N, 3) of files, MISSING and NOT_PLAIN included."""

    def read(start: int, end: int) -> NDArray[np.int64]:
        return np.array([_stat(path) for path in paths[start:end]], np.int64)

    return np.concatenate([np.zeros((0, 3), np.int64), *in_chunks(read, len(paths), _FILES_AT_A_TIME, _SLOW_S)])


def _stat(path: str) -> Stat:
    if not path:
        return MISSING
    try:
        found = os.stat(path)
    except (OSError, ValueError):  # no file has such a name
        return NOT_PLAIN if os.path.islink(path) else MISSING
    if not stat.S_ISREG(found.st_mode):
        return NOT_PLAIN
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns


@dataclass
class _Collector:
    """Collector of the images of all entries of a split."""

    spec: DatasetSpec
    split: str
    cached: CachedCocoListing
    listing: Listing
    labels: dict[str, str] = field(default_factory=dict)
    labelled: dict[str, tuple[str, ...] | None] = field(default_factory=dict)
    coco: dict[str, tuple[Path, CocoImage, dict[int, str]]] = field(default_factory=dict)
    orphans: set[str] = field(default_factory=set)  # XML files without an image
    folders: list[str] = field(default_factory=list)  # of lists and COCO files
    tops: set[str] = field(default_factory=set)  # folders above which no XML of their images is searched
    all_missing: list[str] = field(default_factory=list)  # a message for each COCO file without existing images
    unread: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)  # an image for each further time that it is listed

    def add_entry(self, entry: Path, labelled: tuple[str, ...] | None) -> bool:
        """Add the images of an entry of the YAML, which labels some classes; return whether it has any."""
        listed, repeated, unread = len(self.labels), len(self.repeated), len(self.unread)
        for path in expand_entry(self.spec, self.split, entry):
            self._add(path)
        images = [*itertools.islice(self.labels, listed, None), *self.repeated[repeated:]]
        for image in images:
            if (before := self.labelled.setdefault(image, labelled)) != labelled:
                raise UserError(
                    f"{self.spec.yaml_path}: {self.split}: {self.listing.shown(image)} is in {shown(entry)} and in an "
                    f"entry that labels {'all' if before is None else list(before)}. Keep it in one with all classes."
                )
        return bool(images) or len(self.unread) > unread

    def _add(self, path: Path) -> None:
        suffix = path.suffix.lower()
        if os.path.isdir(path):
            self._add_folder(path)
        elif suffix in _IMAGES:
            self._put(str(path), label_path(str(path)))
        elif suffix == ".json":
            self._add_coco(path)
        elif suffix == ".txt":
            self._add_list(path)
        else:
            raise UserError(
                f"{self.spec.yaml_path}: found the entry {shown(path)}, expected a folder, an image, a list of "
                "images (.txt) or a COCO file (.json)."
            )

    def resolve_images(self) -> tuple[list[str], NDArray[np.int64]]:
        """Return all images and their states, with images listed by foreign paths relocated."""
        images = sorted(self.labels)
        states = stats(images)
        folders = [str(self.spec.root), *self.folders]
        splits = self.spec.splits
        split = next(own for own in splits if splits[own] == splits[self.split])  # val may be of train's entries
        places, note = relocate_images(split, images, (states[:, 0] == MISSING[0]).tolist(), folders)
        if self.all_missing and not places:
            raise UserError("\n".join(filter(None, [self.all_missing[0], note])))
        self.listing.notes += [note] if note else []
        for old, new in places.items():
            label, self.labelled[new] = self.labels.pop(old), self.labelled.pop(old)
            self.labels[new] = label_path(new) if label == label_path(old) else label
            if old in self.coco:
                self.coco[new] = self.coco.pop(old)
        images = sorted(self.labels)
        return images, stats(images) if places else states

    def resolve_voc(self, images: Sequence[str], is_missing: NDArray[np.bool_]) -> bool:
        """Give the images of folders without a text label the XML files beside or near them; return whether any has."""
        unlabelled: dict[str, list[str]] = {}
        labelled: set[str] = set()
        for image, missing in zip(images, is_missing.tolist(), strict=True):
            folder = os.path.dirname(image)
            if missing and self.labels[image].endswith(".txt"):
                unlabelled.setdefault(folder, []).append(image)
            else:
                labelled.add(folder)
        found = False
        for folder in unlabelled.keys() - labelled:
            stems = [os.path.splitext(image)[0] for image in unlabelled[folder]]
            above = [folder, *map(str, Path(folder).parents)]
            top = next((place for place in above if place in self.tops), folder)
            for place in above[: above.index(top) + 1]:
                names = [f"{stem[len(place) + 1 :]}.xml" for stem in stems]
                if annotations := voc_folder(place, names):
                    self.labels |= {
                        image: f"{annotations}/{name}" for image, name in zip(unlabelled[folder], names, strict=True)
                    }
                    found = True
                    break
        return found

    def _put(self, image: str, label: str) -> None:
        if _suffix(image) in UNREAD_SUFFIXES:
            self.unread.append(image)
            return
        if image in self.labels:
            self.repeated.append(image)
        self.labels.setdefault(image, label)

    def _add_folder(self, folder: Path) -> None:
        images, xmls = images_and_xmls(folder)
        self.tops.add(str(folder))
        # Text labels take precedence: XML beside them is left over from a conversion.
        if xmls and not any(os.path.exists(label_path(image)) for image in images):
            self._add_voc(folder, images, xmls)
            return
        for image in images:
            self._put(image, label_path(image))

    def _add_voc(self, folder: Path, images: list[str], xmls: list[str]) -> None:
        """Add a folder of annotations; images are beside them or in a neighbouring JPEGImages or images folder."""
        places = [folder.parent / name for name in ("JPEGImages", "images", "data")]
        if folder.parent.name.lower() == "annotations":
            places += [folder.parent.parent / name / folder.name for name in ("JPEGImages", "images")]
        by_stem = {
            stem_of(image): image for place in reversed(places) if place.is_dir() for image in images_and_xmls(place)[0]
        }
        by_stem.update((stem_of(image), image) for image in images)
        annotated = {stem_of(xml) for xml in xmls}
        spelled = {normalized_stem(stem): stem for stem in by_stem.keys() - annotated}
        orphans = []
        for xml in xmls:
            if (stem := stem_of(xml)) in by_stem:
                self._put(by_stem[stem], xml)
            elif (stem := spelled.get(normalized_stem(stem), "")) and stem not in annotated:
                annotated.add(stem)
                self._put(by_stem[stem], f"{Path(xml).parent}/{stem}.xml")  # `match_label_files` resolves the spelling
            else:
                orphans.append(xml)
        if orphans:
            named = first_of([one_line(os.path.relpath(xml, folder), 60) for xml in orphans], 3)
            looked = ", ".join(map(self.shown, (folder, *places)))
            count = plural(len(orphans), "XML file")
            self.listing.problems.append(
                f"{self.shown(folder)}: {count} without an image of that name in {looked}: {named}"
            )
            self.orphans.update(orphans)
        # Images without an annotation among others with one are background.
        for image in images:
            if stem_of(image) not in annotated:
                self._put(image, os.path.splitext(image)[0] + ".xml")

    def shown(self, folder: Path) -> str:
        inside = folder.is_relative_to(self.spec.root)
        return shown(folder.relative_to(self.spec.root) if inside else folder)

    def _add_list(self, file: Path) -> None:
        lines = read_path_list(file)
        self.folders.append(str(file.parent))
        if "ImageSets" in file.parts and lines and suffix_of(lines[0].split()[0]) not in _IMAGES:
            self._add_voc_ids(file, [line.split()[0] for line in lines])
            return
        bases = (file.parent, self.spec.root, working_directory() or file.parent)
        base = list_base_dir(lines, [*map(str, bases)])
        for line in lines:
            text = line if is_address(line) else line.replace("\\", "/")
            start = file.parent if text.startswith("./") else base
            path = text if is_address(line) else os.path.normpath(os.path.join(start, text))
            if _suffix(path) in _IMAGES:
                self._put(path, label_path(path))
            else:
                self.listing.problems.append(f"{shown(file)}: {shown(line)} is not the path of an image; skipped")

    def _add_voc_ids(self, file: Path, ids: Sequence[str]) -> None:
        """Add an ImageSets list of the VOC development kit: file stems."""
        kit = Path(*file.parts[: len(file.parts) - 1 - file.parts[::-1].index("ImageSets")])
        by_stem = {stem_of(image): image for image in images_and_xmls(kit / "JPEGImages")[0]}
        for name in ids:
            image = by_stem.get(name, f"{kit}/JPEGImages/{name}.jpg")
            self._put(image, f"{kit}/Annotations/{name}.xml")

    def _add_coco(self, file: Path) -> None:
        self.folders.append(str(file.parent))
        state, known = _stat(str(file)), self.cached.get(str(file))
        if known is not None and known[0] == state:
            paths, self.listing.is_complete = known[1], False
        else:
            content = read_coco(file, self._coco_folders(file))
            if self.split == "train" and not content.has_annotations:
                raise UserError(
                    f"{file}: found no key 'annotations', expected a list to train on. Use [] if no image shows an "
                    "object."
                )
            self.listing.unmatched_annotations += content.unmatched_annotations
            self.all_missing += [content.all_missing] if content.all_missing else []
            for image in content.images:
                self.coco.setdefault(image.path, (file, image, content.categories))
            paths = [image.path for image in content.images]
        self.listing.coco_images[str(file)] = (state, paths)
        for path in paths:
            self._put(path, "")

    def _coco_folders(self, file: Path) -> list[Path]:
        """Return candidate image folders of a COCO file: beside it, or as in COCO and common exports."""
        part = file.stem.removeprefix("instances_")
        bases = dict.fromkeys((file.parent, file.parent.parent, self.spec.root))
        return [base / below for base in bases for below in (".", f"images/{part}", part, "images", "data")]


def _other_files(entry: Path) -> str:
    """Return a remark on an entry without images, such as labels/val in the place of images/val; "" if none helps."""
    folder = entry if entry.is_dir() else entry.parent
    before, is_labels, after = str(folder).rpartition("labels")
    images = Path(f"{before}images{after}")
    if is_labels and images.is_dir() and any(files_below(images, _IMAGES)):
        return f": label files are there; give {shown(images)}, whose images find them"
    kinds = sorted(
        {suffix_of(path) for path in files_below(folder, {".txt", ".json", ".csv"})} if entry == folder else ()
    )
    return f": {' and '.join(kinds)} files are there" if kinds else ""


def _suffix(path: str) -> str:
    """Return the suffix of an image path or URL."""
    return suffix_of(path.partition("?")[0] if is_address(path) else path)


def select_images(spec: DatasetSpec, split: str, listing: Listing) -> Listing:
    """Return the images of `split`: all listed ones, unless a fraction of train is held out.

    Then "val" has the images with the lowest hashes of content and `split_seed`: the same ones on all ranks and hosts,
    wherever the files are. Copies of a file stay on one side, near-duplicates need not.
    """
    if spec.held_out is None or split not in ("train", "val"):
        return listing
    fraction, seed = spec.held_out
    salt = (seed % 2**128).to_bytes(16, "little")
    keys = [hashlib.blake2b(own, digest_size=16, salt=salt).digest() for own in _content_hashes(spec, listing)]
    count = len(keys)
    left = min(max(round(count * fraction), 1), count - 1)
    chosen = set()
    for key, copies in sorted(Counter(keys).items()):
        if copies <= left:
            chosen.add(key)
            left -= copies
    is_val = np.array([key in chosen for key in keys])
    if not chosen:
        raise UserError(
            f"{spec.yaml_path}: val: {fraction:g}: train has too few different images ({count:,} files) to hold out "
            "that fraction. Set `val:` to a folder of other images."
        )
    if split == "val":
        log.info(
            f"val: {fraction:g} of train with split_seed {seed}: {int(is_val.sum()):,} of {count:,} images. "
            "--check-data lists near-duplicates in train."
        )
    return listing.subset(is_val == (split == "val"))


def _content_hashes(spec: DatasetSpec, listing: Listing) -> list[bytes]:
    """Return the hash of each image file, from the cache if no file has changed; of its path if it is unreadable."""

    def hashed(path: str) -> bytes:
        try:
            with open_plain(path) as file:
                return hashlib.blake2b(file.read(), digest_size=16).digest()
        except OSError:  # training will skip it
            return hashlib.blake2b(os.fsencode(listing.shown(path)), digest_size=16).digest()

    def every() -> bytes:
        with ThreadPoolExecutor(usable_cpus()) as pool:
            return b"".join(pool.map(hashed, listing.images))

    key = "\0".join([str(spec.root), *map(str, spec.splits["train"])]).encode("utf-8", "surrogateescape")
    path = cache_dir() / "index" / f"{spec.name}-contents-{hashlib.blake2b(key, digest_size=10).hexdigest()}"
    state = "\0".join(listing.images).encode("utf-8", "surrogateescape") + listing.image_stats.tobytes()
    content = cached_content(path, state, every)
    return [content[at : at + 16] for at in range(0, len(content), 16)]


def relocate_images(
    split: str, images: Sequence[str], is_missing: Sequence[bool], folders: Sequence[str]
) -> tuple[dict[str, str], str]:
    """Locate images that do not exist at their listed paths.

    A missing image whose folder exists was deleted: it is not searched for, as other folders may reuse its name.

    Args:
        split: split of the images.
        images: listed paths, absolute, or URLs; relative paths start in one of `folders`.
        is_missing: whether each file is missing.
        folders: folders that are searched recursively.

    Returns:
        Listed path → new path, {} unless every image has exactly one match; and a note on the result.
    """
    missing = list(compress(images, is_missing))
    taken = set(images).difference(missing) if missing else set[str]()
    of_present = {os.path.dirname(path) for path in taken}
    lost = [path for path in missing if _is_spelled_otherwise(path) or not _is_here(path, folders, of_present)]
    if not lost:
        return {}, ""
    by_name: dict[str, dict[str, str]] = {}  # file name → path of each such image → its path below the folder
    try:
        for folder in dict.fromkeys(folders):
            for path in files_below(folder, IMAGE_SUFFIXES):
                by_name.setdefault(os.path.basename(path), {}).setdefault(path, path[len(folder) + 1 :])
    except UserError:  # with an unreadable folder, no match is known to be unique
        return {}, ""
    found = {path: _match_path_end(path, split, folders, by_name) for path in lost}
    places = {path: paths[0] for path, (paths, _) in found.items() if len(paths) == 1}
    if len(places) == len(lost) and not taken & set(places.values()) and len(set(places.values())) == len(lost):
        pair = f"{_shown_path(places[lost[0]], folders)} is used instead of {_shown_path(lost[0], folders)}"
        count = plural(len(lost), "image")
        return places, f"{split}: {count} missing at the listed path, relocated by the end of the path: {pair}"
    if not any(map(any, found.values())):
        return {}, ""
    several = {path: paths for path, paths in found.items() if len(paths[0]) != 1} or found
    named = []
    for path, candidates in several.items():
        own, of_others = (first_of([_shown_path(at, folders) for at in paths], _SHOWN, " or ") for paths in candidates)
        where = own or (f"only {of_others}, in the folder of another split" if of_others else "nowhere")
        named.append(f"{_shown_path(path, folders)} ({where})")
    note = f"{split}: {plural(len(lost), 'image')} missing at the listed path, without a unique match for each"
    return {}, f"{note}: {first_of(named, _SHOWN)}"


def _is_here(path: str, folders: Sequence[str], of_present: set[str]) -> bool:
    """Return whether the folder of a listed image exists in the dataset."""
    above = os.path.dirname(path.replace("\\", "/"))
    return above in of_present or (_inside(above, folders) is not None and os.path.isdir(above))


def _is_spelled_otherwise(path: str) -> bool:
    """Return whether the file exists without backslashes or URL escapes in its path."""
    slashed = path.replace("\\", "/")
    return any(form != path and os.path.isfile(form) for form in (slashed, unquote(slashed)))


def _shown_path(path: str, folders: Sequence[str]) -> str:
    """Return a path for messages, relative to the first folder."""
    return one_line(_inside(path, folders[:1]) or path, _LONGEST)


def _inside(path: str, folders: Sequence[str]) -> str | None:
    """Return the path relative to the longest matching folder; None if it is in none."""
    above = max((folder for folder in folders if f"{path}/".startswith(f"{folder}/")), key=len, default=None)
    return None if above is None else path[len(above) + 1 :]


def _match_path_end(
    listed: str, split: str, folders: Sequence[str], by_name: dict[str, dict[str, str]]
) -> tuple[list[str], list[str]]:
    """Return the images with the longest matching path ending, and matches in folders of other splits.

    The file name alone may match. The expected split is that of the listed path, else `split`. On a tie, images in a
    folder of the expected split win.
    """
    path = (listed.partition("?")[0] if is_address(listed) else listed).replace("\\", "/")
    path = path if os.path.basename(path) in by_name else unquote(path)
    inside = None if is_address(listed) else _inside(path, folders)
    stated = path if inside is None else inside
    parts, wanted = stated.split("/")[::-1], _split_of(stated) or split
    found: dict[tuple[int, bool], list[str]] = {}
    of_others: list[str] = []
    for place, below in by_name.get(parts[0], {}).items():
        own, ends = _split_of(below), below.split("/")[::-1]
        common = len([*takewhile(lambda pair: pair[0] == pair[1], zip(parts, ends, strict=False))])
        (of_others if own not in ("", wanted) else found.setdefault((common, own == wanted), [])).append(place)
    return sorted(found[max(found)]) if found else [], sorted(of_others)


def _split_of(path: str) -> str:
    """Return the split that the folders of a path name last; "" if they name none."""
    named = [match[1].lower() for folder in path.split("/")[:-1] if (match := _SPLIT.fullmatch(folder))]
    return named[-1] if named else ""
