"""The report of a validation: tables, interval, speed, charts."""

from __future__ import annotations

from pathlib import Path

from tessera.utils.errors import tolerate
from tessera.utils.evaluation.bootstrap import bootstrap_interval
from tessera.utils.evaluation.evaluate import Evaluation
from tessera.utils.report.charts.validation import plot_validation
from tessera.utils.report.console import print_lines
from tessera.utils.report.tables import (
    class_table,
    interval_line,
    speed_line,
    table_header,
    table_lines,
    validation_line,
)
from tessera.utils.seeding import sample_rng
from tessera.utils.types import DatasetIndex


def report_validation(
    found: Evaluation, index: DatasetIndex, run: Path, *, imgsz: int, verbose: bool, plots: bool = True
) -> None:
    """Print the figures and plot the charts of a validation; on rank 0."""
    table = table_lines(class_table(found.metrics, index.names)) if verbose else [validation_line(found.metrics)]
    interval = bootstrap_interval(found.ranking, sample_rng(0, 0, 0, "bootstrap"))
    print_lines(
        table_header(),
        *table,
        interval_line(found.metrics, *interval.map),
        speed_line(found.metrics.speed_ms, (1, 3, imgsz, imgsz)),
    )
    if plots:
        with tolerate("plots of the validation"):
            plot_validation(run, found.curves, found.confusion, index.names)
    print_lines(f"Results in {run}")
