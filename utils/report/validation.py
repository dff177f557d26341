"""The report of a validation: tables, interval, speed, charts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tessera.data.source.scan import ImageLabels, label_lines
from tessera.utils.diagnosis.files import ERRORS, ErrorItem, error_items, error_table, write_errors, write_images
from tessera.utils.diagnosis.gains import error_gains
from tessera.utils.errors import tolerate
from tessera.utils.evaluation.bootstrap import Intervals, bootstrap_interval
from tessera.utils.evaluation.evaluate import Evaluation
from tessera.utils.report.charts.validation import plot_validation
from tessera.utils.report.console import print_lines
from tessera.utils.report.page.facts import Facts, Origin
from tessera.utils.report.page.page import NAME, write_page
from tessera.utils.seeding import sample_rng
from tessera.utils.text import counted, table_row
from tessera.utils.types import DatasetIndex, DatasetSpec, Metrics

if TYPE_CHECKING:
    import pandas as pd  # a validation does without


class Reported(NamedTuple):
    """The worst errors by cost, by image where the lines of its labels are, and the 95 % intervals."""

    items: list[ErrorItem]
    labels: dict[int, ImageLabels]
    interval: Intervals


def report_validation(
    found: Evaluation,
    index: DatasetIndex,
    spec: DatasetSpec,
    run: Path,
    origin: Origin,
    *,
    verbose: bool,
    plots: bool = True,
    epochs: Callable[[], pd.DataFrame] | None = None,
) -> Reported:
    """Print the figures, plot the charts, and write the page of a validation; on rank 0.

    Args:
        found: what was measured.
        index, spec: the split, and the dataset that it is of.
        run: the folder to write to.
        origin: what was asked for.
        verbose: print every class.
        plots: make the charts.
        epochs: reads the results.csv of a training.

    Returns:
        The errors, for `report_errors`, and the intervals.
    """
    interval = bootstrap_interval(found.ranking, sample_rng(0, 0, 0, "bootstrap"))
    print_lines(
        table_header(),
        *((table_row(*row) for row in found.metrics.rows()) if verbose else [validation_line(found.metrics)]),
        interval_line(found.metrics, *interval.map),
        speed_line(found.metrics.speed_ms, (1, 3, origin.imgsz, origin.imgsz)),
    )
    gains = error_gains(found.ranking)
    if found.metrics.objects:
        print_lines(*error_table(found.errors, gains))
    items = error_items(found.errors, gains, index)
    labels: dict[int, ImageLabels] = {}
    with tolerate("lines of the labels"):
        images = sorted({item.image for item in items})
        labels = label_lines(spec, index, images, single_cls=origin.config.single_cls)
    if plots:
        with tolerate("plots of the validation"):
            plot_validation(run, found.curves, found.errors.confusion, index.names)
    if not origin.config.noreport:
        with tolerate(NAME):
            write_page(Facts(found, index, interval, gains, items, labels, origin, run, epochs and epochs()))
            print_lines(f"Report: {run / NAME}")
    print_lines(f"Results in {run}")
    return Reported(items, labels, interval)


def report_errors(found: Evaluation, listed: Reported, index: DatasetIndex, run: Path) -> None:
    """Write images.csv and errors.jsonl, which is the last of a run's files; on rank 0."""
    with tolerate(f"images.csv and {ERRORS}"):
        write_images(run / "images.csv", found.errors, index)
        write_errors(run / ERRORS, listed.items, index, listed.labels)


def table_header() -> str:
    """What the figures of a table of classes are."""
    return table_row("Class", "Images", "Instances", "P", "R", "mAP50", "mAP50-95")


def validation_line(metrics: Metrics) -> str:
    """All classes together, below `table_header`."""
    return table_row(*next(metrics.rows()))


def interval_line(metrics: Metrics, low: float, high: float) -> str:
    """mAP50-95 with its 95 % interval from `bootstrap_interval`, which is NaN where there is nothing to find."""
    if math.isnan(low):
        return f"mAP50-95 cannot be measured: no object in the labels of {counted(metrics.images, 'image')}"
    return (
        f"mAP50-95 {metrics.map:.3f}, 95 % interval {low:.3f} to {high:.3f} (bootstrap over "
        f"{counted(metrics.images, 'image')})"
    )


def speed_line(speed_ms: tuple[float, float, float], shape: Sequence[int]) -> str:
    """Milliseconds an image: preparation, inference, NMS; `shape` is the batch's (B, 3, H, W)."""
    preparation, inference, nms = speed_ms
    return (
        f"Speed: {preparation:.1f} ms preparation, {inference:.1f} ms inference, {nms:.1f} ms NMS per image "
        f"at shape ({', '.join(str(n) for n in shape)})"
    )
