"""A split as the checks see it, what they found, and how it is printed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera.data.source.scan import Scan
from tessera.data.source.split_files import Listing
from tessera.utils.text import counted, first_of, one_line
from tessera.utils.types import DatasetSpec


@dataclass(frozen=True, eq=False)
class SplitData:
    """One split; N images listed, n of them kept, m objects."""

    spec: DatasetSpec
    split: str  # "train", "val" or "test"
    listing: Listing
    scanned: Scan
    single_cls: bool  # all classes are one

    @cached_property
    def places(self) -> NDArray[np.int64]:
        """The place in the listing of each image that is kept, int64 (n,)."""
        return np.flatnonzero(self.scanned.kept)

    @cached_property
    def owners(self) -> NDArray[np.int64]:
        """The place in the listing of each object's image, int64 (m,)."""
        return np.repeat(self.places, self.scanned.counts)


class NearDuplicates(NamedTuple):
    """Two images of different files that look the same: splits, paths, names in messages; bits of 144 that differ."""

    splits: tuple[str, str]
    paths: tuple[str, str]
    shown: tuple[str, str]
    bits: int


class Moved(NamedTuple):
    """A share of the images of two splits, such as that of a class, which differs by more than chance (p)."""

    name: str
    shares: tuple[float, float]
    p: float


class Drift(NamedTuple):
    """How a family of shares, such as those of the classes, differs between two splits."""

    family: str  # what the shares are of
    splits: tuple[str, str]  # two
    pictures: tuple[int, int]  # of both, that were compared
    p: float  # that chance does as much, adjusted for all families
    distance: float  # half the sum of all differences of the shares, 0 … 1; of classes the largest difference
    moved: tuple[Moved, ...]  # shares that differ, the most certain first; () where nothing does


class Remark(NamedTuple):
    """An image that is unusual in some way (`kind`), its name in messages, and what was measured."""

    kind: str
    split: str
    path: str
    shown: str
    detail: str


class SplitCounts(NamedTuple):
    """A split in numbers: its images, those without an object, its objects; images and objects of each class."""

    split: str
    images: int
    empty: int
    objects: int
    class_images: tuple[int, ...]
    class_objects: tuple[int, ...]


PROBLEMS_CODE = 3  # exit code where there are problems, but no error


@dataclass
class DatasetCheck:
    """Findings, one line each ("file:line: what"), in three weights: errors, problems and notes."""

    errors: list[str] = field(default_factory=list)  # training refuses the dataset, or would learn something wrong
    problems: list[str] = field(default_factory=list)  # cost labels or images, or trust in the metrics
    notes: list[str] = field(default_factory=list)  # worth knowing; they cost nothing
    facts: list[str] = field(default_factory=list)  # what the dataset holds, wrong or not
    left_out: list[str] = field(default_factory=list)  # images that training would do without
    images: int = 0  # that can be used
    objects: int = 0  # in these
    names: tuple[str, ...] = ()  # of the classes
    counts: list[SplitCounts] = field(default_factory=list)  # of each split
    twins: list[NearDuplicates] = field(default_factory=list)  # in other splits first, each with the one most like it
    drifts: list[Drift] = field(default_factory=list)  # how the other splits differ from train
    remarks: list[Remark] = field(default_factory=list)  # unusual images

    @property
    def exit_code(self) -> int:
        """Exit code of `--check-data`: 1 with errors, else 3 with problems, else 0."""
        return 1 if self.errors else PROBLEMS_CODE if self.problems else 0

    def verdict(self) -> str:
        """How bad the errors and problems are, and how many notes there are."""
        errors, problems, notes = map(len, (self.errors, self.problems, self.notes))
        parts = ["no errors, no problems" if not errors + problems else "no errors"]
        if errors:
            parts = [
                f"{counted(errors, 'error')} make{'s' * (errors == 1)} training refuse the dataset, or learn something "
                "wrong"
            ]
        if problems:
            parts.append(f"{counted(problems, 'problem')} cost{'s' * (problems == 1)} labels or trust in the metrics")
        return "; ".join([*parts, *([counted(notes, "note")] if notes else [])])

    def as_dict(self) -> dict[str, Any]:
        """Plain values by name, for JSON."""
        named = {
            "counts": [one._asdict() for one in self.counts],
            "twins": [one._asdict() for one in self.twins],
            "drifts": [
                one._asdict() | {"moved": [fraction_text._asdict() for fraction_text in one.moved]}
                for one in self.drifts
            ],
            "remarks": [one._asdict() for one in self.remarks],
        }
        return {**dataclasses.asdict(self), **named}

    def lines(self) -> list[str]:
        """Everything, the worst first, and the verdict."""
        left_out = ""
        if self.left_out:
            named = first_of([one_line(name, 70) for name in self.left_out], 3)
            left_out = f"; {counted(len(self.left_out), 'image')} left out ({named})"
        return [
            *(f"error: {line}" for line in self.errors),
            *(f"problem: {line}" for line in self.problems),
            *(f"note: {line}" for line in self.notes),
            *self.facts,
            f"{counted(self.images, 'image')} with {counted(self.objects, 'object')} can be used{left_out}: "
            f"{self.verdict()}",
        ]


def fraction_text(part: int, whole: int, noun: str) -> str:
    """Such as `3 of 60 boxes (5 %)`."""
    percent = f"{100 * part / whole:.2g}" if whole and part < whole else str(100 * bool(whole))
    return f"{part:,} of {counted(whole, noun)} ({percent} %)"
