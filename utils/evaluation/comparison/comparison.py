"""Two sides beside each other: their figures, what differs, what was asked of the difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tessera.utils.evaluation.comparison.differences import Difference, Differences
from tessera.utils.evaluation.comparison.flips import Flips
from tessera.utils.evaluation.comparison.verdict import verdict
from tessera.utils.flags.compare import Requirement


class RunFigures(NamedTuple):
    """A run of a side.

    Attributes:
        file: of its weights.
        sha256: of the file; "" where it is several.
        source: what it says of itself.
        imgsz: long side of the images in pixels.
        threshold: the confidence that it detects with, where flips are counted.
        map, map50, precision, recall: as val.py measures them.
        ms: milliseconds an image: preparation, inference, suppression; measured once.
        mb: megabytes of its files.
        parameters: None of an exported file.
    """

    file: str
    sha256: str
    source: str
    imgsz: int
    threshold: float
    map: float
    map50: float
    precision: float
    recall: float
    ms: float
    mb: float
    parameters: int | None


@dataclass(frozen=True)
class Comparison:
    """What compare.py found; the same on every rank.

    Attributes:
        a, b: the runs of the sides.
        data: the dataset YAML.
        split: "val", "train" or "test".
        names: class names by index.
        differences: B − A, with intervals and p-values.
        flips: of one run of each side, the median by mAP50-95.
        requirements: what was asked of the differences.
    """

    a: tuple[RunFigures, ...]
    b: tuple[RunFigures, ...]
    data: str
    split: str
    names: tuple[str, ...]
    differences: Differences
    flips: Flips
    requirements: tuple[Requirement, ...] = ()

    @property
    def map(self) -> Difference:
        """Of mAP50-95."""
        return self.differences.map

    @property
    def map50(self) -> Difference:
        """Of mAP50."""
        return self.differences.map50

    @property
    def verdict(self) -> str:
        """In words."""
        return verdict(self.differences, self.names)

    @property
    def unmet(self) -> tuple[Requirement, ...]:
        """The requirements that the differences do not meet."""
        return tuple(one for one in self.requirements if not one.allows(self.value(one)))

    @property
    def exit_code(self) -> int:
        """Of the process."""
        return int(bool(self.unmet))

    def means(self, metric: str) -> tuple[float, float]:
        """A figure of `RunFigures`, the mean of each side."""
        return _mean(self.a, metric), _mean(self.b, metric)

    def value(self, asked: Requirement) -> float:
        """What a requirement is about."""
        if asked.end:
            return float(getattr(getattr(self, asked.metric), asked.end))
        a, b = self.means(asked.metric)
        return b - a

    def as_dict(self) -> dict[str, Any]:
        """Plain values with stable names, for compare.json and `--json`; docs/compare.md explains them."""
        found, flips = self.differences, self.flips
        others = {name: self.means(name) for name in ("precision", "recall", "ms", "mb")}
        plain = {name: {"a": a, "b": b, "difference": b - a} for name, (a, b) in others.items()}
        return {
            "data": self.data,
            "split": self.split,
            "images": found.images,
            "a": [run._asdict() for run in self.a],
            "b": [run._asdict() for run in self.b],
            "map": found.map._asdict(),
            "map50": found.map50._asdict(),
            **plain,
            "classes": [
                {"class": one.class_id, "name": self.names[one.class_id], "images": one.images, "objects": one.objects}
                | one.ap._asdict()
                | {"p_holm": one.p_holm}
                | {"lost": int(flips.lost_of_class[one.class_id]), "gained": int(flips.gained_of_class[one.class_id])}
                for one in found.classes
            ],
            "objects": {name: getattr(flips, name) for name in ("both", "lost", "gained", "neither")},
            "wrong_finds": {"both": flips.wrong_both, "a_alone": flips.wrong_a, "b_alone": flips.wrong_b},
            "requirements": [
                {"text": one.text, "value": self.value(one), "met": one not in self.unmet} for one in self.requirements
            ],
            "verdict": self.verdict,
        }


def _mean(side: Sequence[RunFigures], metric: str) -> float:
    return float(sum(getattr(run, metric) for run in side)) / len(side)


def median_run(maps: Sequence[float]) -> int:
    """The run that stands for a side where it must be one: the median by mAP50-95, of an even number the lower one."""
    return sorted(range(len(maps)), key=lambda run: maps[run])[(len(maps) - 1) // 2]
