"""Input and results of the dataset checks, and their printed form."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera.data.source.scan import Scan
from tessera.data.source.split_files import Listing
from tessera.utils.text import first_of, one_line, plural
from tessera.utils.types import DatasetSpec


@dataclass(frozen=True, eq=False)
class SplitData:
    """A scanned split; N images listed, n of them usable, m objects."""

    spec: DatasetSpec
    split: str  # "train", "val" or "test"
    listing: Listing
    scanned: Scan
    single_cls: bool  # all classes are one

    @cached_property
    def places(self) -> NDArray[np.int64]:
        """Index in the listing of each usable image, int64 (n,)."""
        return np.flatnonzero(self.scanned.usable)

    @cached_property
    def owners(self) -> NDArray[np.int64]:
        """Index in the listing of each object's image, int64 (m,)."""
        return np.repeat(self.places, self.scanned.counts)


@dataclass(frozen=True)
class NearDuplicates:
    """A pair of similar images: splits, paths, names in messages, and different bits of 144."""

    splits: tuple[str, str]
    paths: tuple[str, str]
    shown: tuple[str, str]
    bits: int


@dataclass(frozen=True)
class ChangedFraction:
    """A fraction, such as that of a class, that differs significantly between two splits."""

    name: str
    fractions: tuple[float, float]
    p: float


@dataclass(frozen=True)
class Drift:
    """Comparison of a family of fractions, such as those of the classes, between two splits."""

    family: str
    splits: tuple[str, str]
    images: tuple[int, int]  # compared images of both
    p: float  # adjusted p-value
    distance: float  # half the sum of absolute differences, 0 … 1; for classes the largest difference
    changed: tuple[ChangedFraction, ...]  # significant differences, by p-value


@dataclass(frozen=True)
class UnusualImage:
    """An unusual image: kind, split, path, name in messages, and a measurement."""

    kind: str
    split: str
    path: str
    shown: str
    detail: str


@dataclass(frozen=True)
class SplitCounts:
    """Counts of a split: images, those without an object that label any class, objects; images and objects by class."""

    split: str
    images: int
    empty: int
    objects: int
    class_images: tuple[int, ...]
    class_objects: tuple[int, ...]


PROBLEMS_CODE = 3  # exit code with problems, but no error


@dataclass
class DatasetCheck:
    """Results of all checks, one line each ("file:line: what"), as errors, problems and notes."""

    errors: list[str] = field(default_factory=list)  # training refuses the dataset, or would learn wrong labels
    problems: list[str] = field(default_factory=list)  # cost labels, images, or trust in the metrics
    notes: list[str] = field(default_factory=list)  # harmless
    facts: list[str] = field(default_factory=list)  # statistics
    skipped_images: list[str] = field(default_factory=list)  # images that training would skip
    images: int = 0  # usable ones
    objects: int = 0  # in usable images
    names: tuple[str, ...] = ()  # of the classes
    counts: list[SplitCounts] = field(default_factory=list)  # of each split
    near_duplicates: list[NearDuplicates] = field(default_factory=list)  # pairs of different splits first
    drifts: list[Drift] = field(default_factory=list)  # differences from train
    unusual_images: list[UnusualImage] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """Exit code of `--check-data`: 1 with errors, else 3 with problems, else 0."""
        return 1 if self.errors else PROBLEMS_CODE if self.problems else 0

    def verdict(self) -> str:
        """Return a summary of errors, problems and notes."""
        errors, problems, notes = map(len, (self.errors, self.problems, self.notes))
        parts = ["no errors, no problems" if not errors + problems else "no errors"]
        if errors:
            make = "makes" if errors == 1 else "make"
            parts = [f"{plural(errors, 'error')} {make} training refuse the dataset or learn wrong labels"]
        if problems:
            parts.append(f"{plural(problems, 'problem')} cost{'s' * (problems == 1)} labels or trust in the metrics")
        return "; ".join([*parts, *([plural(notes, "note")] if notes else [])])

    def as_dict(self) -> dict[str, Any]:
        """Return plain values by name, for JSON."""
        return dataclasses.asdict(self)

    def lines(self) -> list[str]:
        """Return all lines, the most serious first, and the verdict."""
        skipped = ""
        if self.skipped_images:
            named = first_of([one_line(name, 70) for name in self.skipped_images], 3)
            skipped = f"; {plural(len(self.skipped_images), 'image')} skipped ({named})"
        return [
            *(f"error: {line}" for line in self.errors),
            *(f"problem: {line}" for line in self.problems),
            *(f"note: {line}" for line in self.notes),
            *self.facts,
            f"{plural(self.images, 'image')} with {plural(self.objects, 'object')} can be used{skipped}: "
            f"{self.verdict()}",
        ]


def fraction_text(part: int, whole: int, noun: str) -> str:
    """Return text such as `3 of 60 boxes (5 %)`."""
    percent = f"{100 * part / whole:.2g}" if whole and part < whole else str(100 * bool(whole))
    return f"{part:,} of {plural(whole, noun)} ({percent} %)"
