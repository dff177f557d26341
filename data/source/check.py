"""Everything that is wrong with a dataset, with file and line: what `--check-data` prints."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from data.source.decode import read_levels
from data.source.headers import TAIL, ends_early
from data.source.index import problem_report, refuse_unusable, unknown_class
from data.source.listing import Listing, list_images
from data.source.scan import ClassNames, Stretch, scan
from utils.errors import UserError
from utils.machine.limits import usable_cpus
from utils.pixels import PixelRule, to_uint8
from utils.text import first_of, shown
from utils.types import DatasetIndex, DatasetSpec

_DARK = 128  # a split whose deep pictures become no brighter uses seven bits of eight, or fewer


@dataclass
class DatasetCheck:
    """What was found, one line each: "file:line: what".

    Attributes:
        errors: training would stop, or learn something wrong.
        problems: images that are left out, rows that count once.
        notes: worth knowing, such as images that two splits share.
        left_out: images that training would do without.
        images, objects: totals of what can be used.
    """

    errors: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    images: int = 0
    objects: int = 0

    @property
    def safe(self) -> bool:
        """Whether training would run on what is left, and learn what the labels say."""
        return not self.errors

    def lines(self) -> list[str]:
        """Everything, the worst first, and a verdict."""
        verdict = "training is safe" if self.safe else "training would not be safe"
        if self.left_out:
            verdict += f", without {_count(len(self.left_out), 'image')} (left out): {first_of(self.left_out, 5)}"
        return [
            *(f"error: {line}" for line in self.errors),
            *(f"problem: {line}" for line in self.problems),
            *(f"note: {line}" for line in self.notes),
            f"{_count(self.images, 'image')} with {_count(self.objects, 'object')} can be used; "
            f"{_count(len(self.errors), 'error')}, {_count(len(self.problems), 'problem')}, "
            f"{_count(len(self.notes), 'note')}: {verdict}",
        ]


def _count(number: int, noun: str) -> str:
    """Such as `1 note` or `2 notes`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _boxes(number: int) -> str:
    """Such as `1 box` or `2 boxes`."""
    return f"{number:,} box{'' if number == 1 else 'es'}"


def check_dataset(spec: DatasetSpec, single_cls: bool = False, *, progress: bool = False) -> DatasetCheck:
    """Check all splits: what indexing checks, every place instead of the first ones, and every image decoded.

    Args:
        spec: the dataset.
        single_cls: all classes are one, so any class will do.
        progress: show a bar on stderr.
    """
    check = DatasetCheck()
    names = ClassNames({name: number for number, name in enumerate(spec.names)}, single_cls)
    owners: dict[bytes, dict[str, str]] = {}
    for split in spec.splits:
        try:
            listing = list_images(spec, split)
        except UserError as error:
            check.errors.append(str(error))
            continue
        scanned = scan(listing, names)
        check.problems += listing.notes + scanned.problems
        check.left_out += [
            listing.shown(image) for image, kept in zip(listing.images, scanned.kept, strict=True) if not kept
        ]
        check.errors += [unknown_class(spec, place, name) for place, name in scanned.unknown]
        if not scanned.unknown:  # else there are labels, all of which are in the errors
            try:
                refuse_unusable(spec, split, listing, scanned)
            except UserError as error:
                check.errors.append(str(error))
        if not single_cls:
            _check_categories(check, spec, listing)
        _check_boxes(check, listing, scanned)
        for path, content in _check_pixels(check, spec, split, listing, scanned, progress).items():
            owners.setdefault(content, {}).setdefault(split, path)
    for split in ("train", "val"):
        if split not in spec.splits:
            check.errors.append(f"{spec.yaml_path}: names no {split} images. Add '{split}:' with their folder.")
    _check_shared(check, owners)
    return check


def _check_categories(check: DatasetCheck, spec: DatasetSpec, listing: Listing) -> None:
    """Note classes that no category of a split's COCO files is named after, perhaps misspelled: they get no objects."""
    files = {listing.shown(str(file)): categories for file, _, categories in listing.coco.values()}
    named = {name for categories in files.values() for name in categories.values()}
    missing = [shown(name) for name in spec.names if name not in named]
    if missing and len(listing.coco) == len(listing.images):  # else labels of other kinds may have them
        check.notes.append(
            f"{first_of(list(files), 3)}: found no category named {first_of(missing, 8)}, which {spec.yaml_path.name} "
            "names as classes"
        )


def _check_boxes(check: DatasetCheck, listing: Listing, scanned: Stretch) -> None:
    """Note boxes without an area: they match no anchor, so nothing is learnt from them."""
    check.images += len(scanned.sizes_hw)
    check.objects += len(scanned.classes)
    owners = np.repeat(np.flatnonzero(scanned.kept), scanned.counts)[_flat(scanned.boxes_xyxy)]
    for index, count in zip(*np.unique(owners, return_counts=True), strict=True):
        check.notes.append(f"{listing.label_place(int(index))(None)}: {_boxes(count)} without width or height")


def _flat(boxes_xyxy: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Which boxes (n, 4) have no width or no height, (n,)."""
    flat: NDArray[np.bool_] = np.any(boxes_xyxy[:, 2:] <= boxes_xyxy[:, :2], axis=1)
    return flat


def doubts(index: DatasetIndex) -> list[str]:
    """What a run is warned of before it uses an index; it goes on all the same.

    Boxes without an area count in a validation as they do in COCO's metric: as objects that nothing can be matched to.
    """
    found = list(filter(None, [problem_report(index)]))
    flat = int(_flat(index.boxes_xyxy).sum())
    if flat:
        use = (
            "nothing is learnt from such a box"
            if index.split == "train"
            else "such a box is an object that is never found"
        )
        every = "all " if flat == len(index.classes) > 1 else ""
        found.append(f"{index.split}: {every}{_boxes(flat)} without width or height: {use}; --check-data says where")
    if not len(index.classes):
        found.append(
            f"{index.split}: no object in the labels of its {_count(len(index), 'image')}: no metric can be measured, "
            f"and mAP will be 0. Label some of them, or give a {index.split} set that has labels."
        )
    return found


class _Decoded(NamedTuple):
    """A decoded image; `brightest` is its largest level of more than 8 bits, and the byte that became of it."""

    digest: bytes
    size_hw: tuple[int, int]
    is_cut: bool
    brightest: tuple[float, int] | None


def _check_pixels(
    check: DatasetCheck, spec: DatasetSpec, split: str, listing: Listing, scanned: Stretch, progress: bool
) -> dict[str, bytes]:
    """Decode every image that would be used; path as shown → digest of the file."""
    digests: dict[str, bytes] = {}
    paths = [image for image, kept in zip(listing.images, scanned.kept, strict=True) if kept]
    deep: list[tuple[float, int]] = []
    with ThreadPoolExecutor(usable_cpus()) as pool:
        decoding = pool.map(partial(_decode, rule=spec.pixels), paths)
        results = tqdm(decoding, f"Decoding {split}", len(paths), disable=not progress)
        for path, size, decoded in zip(paths, scanned.sizes_hw.tolist(), results, strict=True):
            shown = listing.shown(path)
            if isinstance(decoded, str):
                check.errors.append(f"{shown}: {decoded}")
                continue
            height, width = decoded.size_hw
            if [height, width] != size:
                stated = f"{size[1]} x {size[0]}"
                check.errors.append(f"{shown}: decodes to {width} x {height} pixels, but its header says {stated}.")
            elif decoded.is_cut:
                check.notes.append(f"{shown}: the end of the file is missing; what decodes is used")
            digests[shown] = decoded.digest
            if decoded.brightest is not None:
                deep.append(decoded.brightest)
    level, byte = max(deep, default=(0.0, 0))
    if level > 0 and max(byte for _, byte in deep) < _DARK:
        check.notes.append(
            f"{split}: of {_count(len(deep), 'image')} with more than 8 bits, the brightest level is {level:g}, which "
            f"becomes {byte} of 255: they come dark. Give `pixels: {{range: [0, {level:g}]}}` in {spec.yaml_path.name}"
        )
    return digests


def _decode(path: str, rule: PixelRule | None) -> _Decoded | str:
    """Digest of the file, its decoded size and whether its end is missing; or why it cannot be used."""
    try:
        levels = read_levels(Path(path))
        raw = Path(path).read_bytes()
    except UserError as error:
        return str(error).removeprefix(f"{path}: ")
    except OSError as error:
        return f"cannot be read ({error.strerror})."
    digest = hashlib.blake2b(raw, digest_size=16).digest()
    brightest = None
    if levels.dtype != np.uint8:
        largest = float(np.max(levels, where=np.isfinite(levels), initial=0))
        brightest = largest, int(to_uint8(levels, rule).max())
    return _Decoded(digest, (levels.shape[0], levels.shape[1]), ends_early(raw, raw[-TAIL:]), brightest)


def _check_shared(check: DatasetCheck, owners: dict[bytes, dict[str, str]]) -> None:
    """Note equal files in two splits: metrics on images that were trained on mean nothing."""
    shared: dict[tuple[str, str], list[str]] = {}
    for places in owners.values():
        splits = list(places)
        for at, first in enumerate(splits):
            for second in splits[at + 1 :]:
                pair = dict.fromkeys((places[first], places[second]))
                shared.setdefault((first, second), []).append(" = ".join(pair))
    for (first, second), examples in shared.items():
        noun = "image is" if len(examples) == 1 else "images are"
        check.notes.append(f"{len(examples):,} {noun} both in {first} and in {second}, such as {examples[0]}")
