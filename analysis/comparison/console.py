"""Report of a comparison: console table, compare.json, and images of disagreements."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from tessera.analysis.comparison.comparison import Comparison, p_value
from tessera.analysis.comparison.differences import Difference
from tessera.analysis.comparison.disagreements import Disagreements, ImageDisagreements, ImageResult
from tessera.analysis.comparison.flags import CompareConfig, Requirement
from tessera.analysis.comparison.permutation_test import LEVEL
from tessera.data.source.decode import read_image
from tessera.utils.errors import warn_on_error
from tessera.utils.files import write_whole
from tessera.utils.flags.json_output import headed
from tessera.utils.report.console import print_lines
from tessera.utils.report.image_grid import Annotations, save_grid
from tessera.utils.text import one_line, plural, strict_json, table_row
from tessera.utils.types import DatasetIndex

log = logging.getLogger(__name__)

_CLASSES = 20  # that the table shows without --verbose


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


def _interval_row(name: str, one: Difference) -> str:
    return table_row(name, *_figures(*one[:5]), p_value(one.p).removeprefix("p "))


def _figures(a: float, b: float, *differences: float, digits: int = 4) -> list[str]:
    return [f"{a:.{digits}f}", f"{b:.{digits}f}", *(f"{one:+.{digits}f}" for one in differences)]


def write_disagreements(
    folder: Path, index: DatasetIndex, found: Disagreements, a: Mapping[int, ImageResult], b: Mapping[int, ImageResult]
) -> None:
    """Write `disagreements/worse_01.jpg` … and `better_01.jpg` …, the strongest disagreements first."""
    for kind, images in (("worse", found.worse), ("better", found.better)):
        for number, one in enumerate(images, 1):
            with warn_on_error(f"image of disagreements {kind}_{number:02}"):
                _write_image(
                    folder / "disagreements" / f"{kind}_{number:02}.jpg", index, found, one, a[one.image], b[one.image]
                )


def _write_image(
    target: Path, index: DatasetIndex, found: Disagreements, one: ImageDisagreements, a: ImageResult, b: ImageResult
) -> None:
    """Write one image three times: disagreeing objects, detections of A, detections of B."""
    path = index.path(one.image)
    image = read_image(path, rule=index.pixels)
    classes, boxes_xyxy = index.labels(one.image)
    changed = np.concatenate((one.lost, one.gained))
    panels = [
        Annotations(boxes_xyxy[changed], classes[changed].astype(np.int64)),
        *(
            Annotations(side.boxes_xyxy, side.classes.astype(np.int64), side.scores, threshold=threshold)
            for side, threshold in ((a, found.threshold_a), (b, found.threshold_b))
        ),
    ]
    captions = [
        f"{len(one.lost)} lost, {len(one.gained)} gained: {path.name}",
        f"A: {a.found.sum()} of {len(a.found)} detected, {a.wrong.sum()} false positives",
        f"B: {b.found.sum()} of {len(b.found)} detected, {b.wrong.sum()} false positives",
    ]
    save_grid([image] * len(panels), panels, index.names, captions, target)
