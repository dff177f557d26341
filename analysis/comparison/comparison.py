"""Result of compare.py: metrics of both sides, differences, requirements, and a verdict in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tessera.analysis.comparison.differences import Difference, Differences
from tessera.analysis.comparison.disagreements import Disagreements
from tessera.analysis.comparison.flags import Requirement
from tessera.analysis.comparison.permutation_test import LEVEL, images_needed
from tessera.utils.text import first_of, plural

MATTERS = 0.01  # mAP50-95; a smaller difference does not matter in practice
_NAMED = 5  # classes


class RunMetrics(NamedTuple):
    """Metrics of a run of a side, as from val.py.

    Attributes:
        sha256: of the file; "" for several files.
        source: how the file describes itself.
        threshold: its confidence for detection, used for disagreements.
        ms: milliseconds per image: preprocessing, inference and NMS.
        mb: megabytes of its files.
        parameters: None for an exported file.
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
    """Result of a comparison, the same on every rank.

    Attributes:
        a, b: the runs of the sides.
        differences: B − A, with intervals and p-values.
        disagreements: of the median run of each side by mAP50-95.
        requirements: of `--require`.
    """

    a: tuple[RunMetrics, ...]
    b: tuple[RunMetrics, ...]
    data: str
    split: str
    names: tuple[str, ...]
    differences: Differences
    disagreements: Disagreements
    requirements: tuple[Requirement, ...] = ()

    @property
    def map(self) -> Difference:
        return self.differences.map

    @property
    def map50(self) -> Difference:
        return self.differences.map50

    @property
    def verdict(self) -> str:
        return verdict(self.differences, self.names)

    @property
    def unmet(self) -> tuple[Requirement, ...]:
        """Requirements that the differences do not meet."""
        return tuple(one for one in self.requirements if not one.allows(self.value(one)))

    @property
    def exit_code(self) -> int:
        return int(bool(self.unmet))

    def means(self, metric: str) -> tuple[float, float]:
        """Return the mean of a field of `RunMetrics` over each side."""
        a, b = (float(sum(getattr(run, metric) for run in side)) / len(side) for side in (self.a, self.b))
        return a, b

    def value(self, requirement: Requirement) -> float:
        """Return the value that a requirement constrains."""
        if requirement.end:
            return float(getattr(getattr(self, requirement.metric), requirement.end))
        a, b = self.means(requirement.metric)
        return b - a

    def as_dict(self) -> dict[str, Any]:
        """Return plain values with stable names for compare.json and `--json`; docs/compare.md explains them."""
        found, counts = self.differences, self.disagreements
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
                | {"lost": int(counts.lost_of_class[one.class_id]), "gained": int(counts.gained_of_class[one.class_id])}
                for one in found.classes
            ],
            "objects": {name: getattr(counts, name) for name in ("both", "lost", "gained", "neither")},
            "false_positives": {"both": counts.wrong_both, "a_only": counts.wrong_a, "b_only": counts.wrong_b},
            "requirements": [
                {"text": one.text, "value": self.value(one), "met": one not in self.unmet} for one in self.requirements
            ],
            "verdict": self.verdict,
        }


def median_run(maps: Sequence[float]) -> int:
    """Return the index of the median run by mAP50-95; of an even number, the lower one."""
    return sorted(range(len(maps)), key=lambda run: maps[run])[(len(maps) - 1) // 2]


def verdict(found: Differences, names: Sequence[str]) -> str:
    """Return whether B is better than A; if undecided, how many images it would take."""
    return f"{_overall(found)} {_of_classes(found, names)}"


def _overall(found: Differences) -> str:
    overall = found.map
    if not any(one.ap.difference or one.ap.high - one.ap.low for one in found.classes):
        return "A and B have equal metrics in every class."
    bounds = f"{overall.low:+.3f} to {overall.high:+.3f}"
    summary = f"mAP50-95 {overall.difference:+.3f} (95 % interval {bounds}, {p_value(overall.p)})"
    if overall.p < LEVEL and overall.low > 0:
        return f"B is better than A: {summary}."
    if overall.p < LEVEL and overall.high < 0:
        return f"B is worse than A: {summary}."
    if max(abs(overall.low), abs(overall.high)) <= MATTERS:
        return f"No difference of {MATTERS:g} or more: {summary}."
    return f"Undecided: {summary}. {_what_it_takes(found)}"


def p_value(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p {p:.2g}"


def _what_it_takes(found: Differences) -> str:
    sizes = [(MATTERS, f"a difference of {MATTERS:g}"), (abs(found.map.difference), "one as large as observed")]
    takes = []
    for size, named in sizes:
        needed = images_needed(size, found.images, found.image_variance, found.seed_variance) if size else None
        if needed is not None and needed > found.images:
            takes.append(f"about {float(f'{needed:.1e}'):,.0f} images to see {named}")
    few = f"{found.images:,} images are too few" if takes else "The trainings of a side differ by too much"
    needed = images_needed(MATTERS, found.images, found.image_variance, found.seed_variance)
    if found.seed_variance > 0 and needed is None:
        takes.append(f"more trainings a side to see {sizes[0][1]}, however many images")
    return f"{few}: it takes {', and '.join(takes)} (in four of five cases)." if takes else "It is a borderline case."


def _of_classes(found: Differences, names: Sequence[str]) -> str:
    beyond = sorted((one for one in found.classes if one.p_holm < LEVEL), key=lambda one: -abs(one.ap.difference))
    parts = []
    for word, sign in (("better", 1), ("worse", -1)):
        listed = [f"{names[one.class_id]} {one.ap.difference:+.3f}" for one in beyond if one.ap.difference * sign > 0]
        if listed:
            parts.append(f"{word} {first_of(listed, _NAMED)}")
    of = f"{plural(len(found.classes), 'class')}, Holm's correction"
    return f"Classes that differ significantly: {'; '.join(parts) or 'none'} ({of})."
