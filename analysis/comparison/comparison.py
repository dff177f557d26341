"""Result of compare.py: metrics of both sides, differences, disagreements, a verdict in words; console and files.

Disagreements are objects that one side alone detects, and false positives of one alone, at IoU 0.5. Each side uses its
own confidence threshold.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tessera.analysis.comparison.differences import LEVEL, Differences, MetricDifference, images_needed
from tessera.analysis.comparison.flags import CompareConfig, Requirement
from tessera.data.source.decode import read_image
from tessera.deploy.inference.drawing import Annotations, save_grid
from tessera.utils.errors import warn_on_error
from tessera.utils.evaluation.matching import FALSE_KINDS, IOU_THRESHOLDS, Kind, Matches, pairwise_iou
from tessera.utils.files import write_whole
from tessera.utils.flags.json_output import headed
from tessera.utils.image_size import ImageSize
from tessera.utils.report.console import print_lines
from tessera.utils.text import first_of, one_line, plural, strict_json, table_row
from tessera.utils.types import DatasetIndex

log = logging.getLogger(__name__)

MATTERS = 0.01  # mAP50-95; a smaller difference does not matter in practice
_NAMED = 5  # classes
_CLASSES = 20  # that the table shows without --verbose
SHOWN = 8  # images that B worsens most, and as many that it improves most


class ImageResult(NamedTuple):
    """Detections of an image above the threshold, by descending score, in pixels of the original image."""

    boxes_xyxy: NDArray[np.float32]
    scores: NDArray[np.float32]
    classes: NDArray[np.int32]
    wrong: NDArray[np.bool_]  # (D,), false positives
    found: NDArray[np.bool_]  # (G,), detected objects


def detections_above(matches: Matches, threshold: float) -> dict[int, ImageResult]:
    """Return the detections of each image above a confidence threshold."""
    results, start = {}, 0
    sizes = zip(*(column.tolist() for column in matches[:3]), strict=True)
    for image, objects, detections in sizes:
        end = start + int((matches.scores[start : start + detections] >= threshold).sum())
        kinds, found = matches.kinds[start:end], np.zeros(objects, np.bool_)
        found[matches.objects[start:end][kinds == Kind.CORRECT]] = True
        results[image] = ImageResult(
            matches.boxes_xyxy[start:end],
            matches.scores[start:end],
            matches.classes[start:end],
            np.isin(kinds, FALSE_KINDS),
            found,
        )
        start += detections
    return results


class ImageDisagreements(NamedTuple):
    """Disagreements on one image of the dataset."""

    image: int
    lost: NDArray[np.int64]  # (k,), objects that A alone detects
    gained: NDArray[np.int64]  # and that B alone detects
    wrong_a: NDArray[np.int64]  # (k,), false positives of A alone
    wrong_b: NDArray[np.int64]  # and of B alone

    @property
    def cost(self) -> int:
        """Mistakes that B adds to the image, minus those it removes."""
        return len(self.lost) + len(self.wrong_b) - len(self.gained) - len(self.wrong_a)


class Disagreements(NamedTuple):
    """Disagreements on all images."""

    threshold_a: float
    threshold_b: float
    both: int  # objects detected by both
    lost: int  # by A alone
    gained: int  # by B alone
    neither: int
    wrong_both: int  # false positives of both sides: same class, IoU 0.5
    wrong_a: int
    wrong_b: int
    lost_of_class: NDArray[np.int64]  # (nc,)
    gained_of_class: NDArray[np.int64]
    worse: tuple[ImageDisagreements, ...]  # the images that B worsens most, the strongest first
    better: tuple[ImageDisagreements, ...]  # and improves most


def find_disagreements(
    a: Mapping[int, ImageResult],
    b: Mapping[int, ImageResult],
    index: DatasetIndex,
    threshold_a: float,
    threshold_b: float,
) -> Disagreements:
    """Compare the detections of both sides on the same images of the split `index`."""
    assert a.keys() == b.keys(), "both sides are of the same images"
    counts = dict.fromkeys(("both", "lost", "gained", "neither", "wrong_both", "wrong_a", "wrong_b"), 0)
    lost_of_class, gained_of_class = (np.zeros(len(index.names), np.int64) for _ in range(2))
    changed = []
    for image, of_a in a.items():
        of_b, classes = b[image], index.labels(image)[0]
        alone_a, alone_b, shared = _alone(of_a, of_b)
        one = ImageDisagreements(
            image, np.flatnonzero(of_a.found & ~of_b.found), np.flatnonzero(of_b.found & ~of_a.found), alone_a, alone_b
        )
        counts["both"] += int((of_a.found & of_b.found).sum())
        counts["neither"] += int((~of_a.found & ~of_b.found).sum())
        counts["wrong_both"] += shared
        for name in ("lost", "gained", "wrong_a", "wrong_b"):
            counts[name] += len(getattr(one, name))
        np.add.at(lost_of_class, classes[one.lost], 1)
        np.add.at(gained_of_class, classes[one.gained], 1)
        if one.cost:
            changed.append(one)
    changed.sort(key=lambda one: (-one.cost, one.image))
    worse = [one for one in changed[:SHOWN] if one.cost > 0]
    better = [one for one in changed[: -SHOWN - 1 : -1] if one.cost < 0]
    return Disagreements(
        threshold_a,
        threshold_b,
        **counts,
        lost_of_class=lost_of_class,
        gained_of_class=gained_of_class,
        worse=tuple(worse),
        better=tuple(better),
    )


def _alone(a: ImageResult, b: ImageResult) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Return the false positives of each side alone, and the number of pairs; confident ones of A choose first."""
    rows_a, rows_b = np.flatnonzero(a.wrong), np.flatnonzero(b.wrong)
    iou = pairwise_iou(a.boxes_xyxy[rows_a], b.boxes_xyxy[rows_b])
    iou[(a.classes[rows_a][:, None] != b.classes[rows_b]) | (iou < IOU_THRESHOLDS[0])] = 0
    paired_a, paired_b = np.zeros(len(rows_a), np.bool_), np.zeros(len(rows_b), np.bool_)
    for row in np.flatnonzero(iou.any(1)):
        offers = np.where(paired_b, 0.0, iou[row])
        if offers.any():
            paired_a[row] = paired_b[offers.argmax()] = True
    return rows_a[~paired_a], rows_b[~paired_b], int(paired_a.sum())


class RunMetrics(NamedTuple):
    """Metrics of a run of a side, as from val.py."""

    file: str
    sha256: str  # of the file; "" for several files
    source: str  # how the file describes itself
    imgsz: ImageSize
    threshold: float  # its confidence for detection, used for disagreements
    map: float
    map50: float
    precision: float
    recall: float
    ms: float  # milliseconds per image: preprocessing, inference and NMS
    mb: float  # megabytes of its files
    parameters: int | None  # None for an exported file


@dataclass(frozen=True)
class Comparison:
    """Result of a comparison, the same on every rank."""

    a: tuple[RunMetrics, ...]  # the runs of a side
    b: tuple[RunMetrics, ...]
    data: str
    split: str
    names: tuple[str, ...]
    differences: Differences  # B − A, with intervals and p-values
    disagreements: Disagreements  # of the median run of each side by mAP50-95
    requirements: tuple[Requirement, ...] = ()  # of `--require`

    @property
    def map(self) -> MetricDifference:
        return self.differences.map

    @property
    def map50(self) -> MetricDifference:
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


def report_comparison(found: Comparison, run: Path, *, verbose: bool) -> None:
    """Print a comparison and write compare.json, on rank 0."""
    write_whole(run / "compare.json", f"{strict_json(headed(CompareConfig.program, found.as_dict()))}\n".encode())
    print_lines(*_lines(found, verbose), f"Results in {run}")
    for requirement in found.unmet:
        log.error(f"{_named(requirement)}: not met, found {found.value(requirement):+.4f}")


def _lines(found: Comparison, verbose: bool) -> Iterator[str]:
    for side, runs in (("A", found.a), ("B", found.b)):
        for one in runs:
            size = f"{one.parameters:,} parameters, " if one.parameters is not None else ""
            yield f"{side}: {one.file}, {one.source}, {one.imgsz} px, {size}{one.mb:.2f} MB"
    yield table_row(f"{plural(found.differences.images, 'image')}", "A", "B", "B - A", "from", "to", "p")
    yield _interval_row("mAP50-95", found.map)
    yield _interval_row("mAP50", found.map50)
    named = {"precision": "P", "recall": "R", "ms": "ms an image, once", "mb": "MB"}
    for metric, name in named.items():
        a, b = found.means(metric)
        yield table_row(name, *_figures(a, b, b - a, digits=4 if metric in ("precision", "recall") else 2))
    beyond = [own for own in found.differences.classes if own.p_holm < LEVEL]
    strongest = sorted(beyond, key=lambda own: -abs(own.ap.difference))[:_CLASSES]
    for own in found.differences.classes if verbose else strongest:
        yield _interval_row(found.names[own.class_id], own.ap._replace(p=own.p_holm))
    counts = found.disagreements
    of = " (the median run of each side)" if len(found.a) + len(found.b) > 2 else ""
    yield (
        f"Objects, A at {counts.threshold_a:.3g} and B at {counts.threshold_b:.3g}{of}: {counts.both:,} detected by "
        f"both, {counts.lost:,} by A only, {counts.gained:,} by B only, {counts.neither:,} by none"
    )
    yield f"False positives: {counts.wrong_both:,} of both, {counts.wrong_a:,} of A only, {counts.wrong_b:,} of B only"
    yield found.verdict
    for requirement in found.requirements:
        if requirement not in found.unmet:
            yield f"{_named(requirement)}: met, found {found.value(requirement):+.4f}"


def _named(requirement: Requirement) -> str:
    return f'--require "{one_line(requirement.text, 80)}"'


def _interval_row(name: str, one: MetricDifference) -> str:
    return table_row(name, *_figures(*one[:5]), p_value(one.p).removeprefix("p "))


def _figures(a: float, b: float, *differences: float, digits: int = 4) -> list[str]:
    return [f"{a:.{digits}f}", f"{b:.{digits}f}", *(f"{one:+.{digits}f}" for one in differences)]


def write_disagreements(
    folder: Path, index: DatasetIndex, found: Disagreements, a: Mapping[int, ImageResult], b: Mapping[int, ImageResult]
) -> None:
    """Write `disagreements/worse_01.jpg` … and `better_01.jpg` …, the strongest disagreements first.

    Each shows its image three times: disagreeing objects, detections of A, detections of B.
    """
    for kind, images in (("worse", found.worse), ("better", found.better)):
        for number, one in enumerate(images, 1):
            with warn_on_error(f"image of disagreements {kind}_{number:02}"):
                path, (classes, boxes_xyxy) = index.path(one.image), index.labels(one.image)
                changed = np.concatenate((one.lost, one.gained))
                panels = [Annotations(boxes_xyxy[changed], classes[changed].astype(np.int64))]
                captions = [f"{len(one.lost)} lost, {len(one.gained)} gained: {path.name}"]
                sides = ("A", a[one.image], found.threshold_a), ("B", b[one.image], found.threshold_b)
                for name, side, threshold in sides:
                    of_side = side.boxes_xyxy, side.classes.astype(np.int64), side.scores
                    panels.append(Annotations(*of_side, threshold=threshold))
                    detected = f"{side.found.sum()} of {len(side.found)} detected"
                    captions.append(f"{name}: {detected}, {side.wrong.sum()} false positives")
                pixels = [read_image(path, rule=index.pixels)] * len(panels)
                target = folder / "disagreements" / f"{kind}_{number:02}.jpg"
                save_grid(pixels, panels, index.names, captions, target)
