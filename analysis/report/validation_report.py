"""Report of a validation: console tables, charts, report.html, error files; and of `--find-errors`, with its page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tessera.analysis.charts import plot_validation, read_results
from tessera.analysis.error_analysis import (
    ImageLabels,
    background_line,
    error_gains,
    error_items,
    error_table,
    locate_labels,
    write_errors,
    write_images,
)
from tessera.analysis.error_counts import count_errors
from tessera.analysis.label_errors import (
    EXPLAINED,
    FILE,
    LIKELY,
    NAMES,
    Evidence,
    LabelError,
    LabelErrorKind,
    counts,
    label_error_table,
    suspects,
    trust_line,
    write_label_errors,
)
from tessera.analysis.report.advice import interval_line, speed_line
from tessera.analysis.report.html_page import Crop, Subject, render_crops, render_page
from tessera.analysis.report.page import NAME, chosen, page, place_of
from tessera.analysis.report.page_data import ReportData, RunInfo
from tessera.utils.engine.state import Training
from tessera.utils.errors import warn_on_error
from tessera.utils.evaluation.average_precision import bootstrap_interval
from tessera.utils.evaluation.evaluate import Evaluation
from tessera.utils.files import write_whole
from tessera.utils.flags.val import ValConfig
from tessera.utils.image_size import size_hw_of
from tessera.utils.report.console import print_lines, table_header, validation_line
from tessera.utils.report.observers import Observer, RunResult
from tessera.utils.report.results_csv import ERRORS
from tessera.utils.seeding import sample_rng
from tessera.utils.text import one_line, table_row
from tessera.utils.types import DatasetIndex, DatasetSpec

if TYPE_CHECKING:
    import pandas as pd  # a validation does without

PAGE = "label_errors.html"


class TrainingReport(Observer):
    """Console tables, charts, report.html and error files of the best epoch of a training."""

    def begin(self, training: Training) -> None:
        self._training = training
        self._facts: ReportData | None = None

    def end(self, result: RunResult) -> None:
        context, data, state = self._training.context, self._training.data, self._training.state
        origin = RunInfo(
            context.config,
            str(result.best),
            context.imgsz,
            context.world.accelerator.name,
            context.world.size,
            trained_on=data.images,
            epochs=state.progress.epoch,
            best_epoch=state.stopper.best_epoch,
            skipped=state.progress.skipped_steps,
            unused_losses=self._training.criterion.unused,
        )
        self._facts = report_validation(
            result.evaluation,
            data.val,
            data.spec,
            context.folder,
            origin,
            verbose=len(data.val.names) <= 20,
            plots=not context.config.noplots,
            epochs=partial(read_results, context.folder / "results.csv"),
        )

    def close(self, *, failed: bool) -> None:
        """Write the error files last: they mark the best epoch as evaluated."""
        if self._facts and not failed:
            report_errors(self._facts)


def report_validation(
    found: Evaluation,
    index: DatasetIndex,
    spec: DatasetSpec,
    run: Path,
    origin: RunInfo,
    *,
    verbose: bool,
    plots: bool = True,
    epochs: Callable[[], pd.DataFrame] | None = None,
) -> ReportData:
    """Print metrics, plot charts and write the page of a validation, on rank 0.

    `epochs` reads the results.csv of a training. Returns the data of the page, for `report_errors`.
    """
    interval = bootstrap_interval(found.ranking, sample_rng(0, 0, 0, "bootstrap"))
    print_lines(
        table_header(),
        *((table_row(*row) for row in found.metrics.rows()) if verbose else [validation_line(found.metrics)]),
        interval_line(found.metrics, *interval.map),
        speed_line(found.metrics.speed_ms, (1, 3, *size_hw_of(origin.imgsz))),
    )
    errors, gains = count_errors(found.matches, index, found.metrics.confidence), error_gains(found.matches)
    if found.metrics.objects:
        print_lines(*error_table(errors, gains, found.max_det, is_best=not found.origin))
    if line := background_line(errors):
        print_lines(line)
    items = error_items(errors, gains, index)
    labels: dict[int, ImageLabels] = {}
    with warn_on_error("label lines"):
        images = sorted({item.image for item in items})
        labels = locate_labels(spec, index, images, single_cls=origin.config.single_cls)
    if plots:
        with warn_on_error("plots of the validation"):
            plot_validation(run, found.curves, errors.confusion, errors.confidence, index.names)
    facts = ReportData(found, errors, index, interval, gains, items, labels, origin, run)
    if not origin.config.noreport:
        with warn_on_error(NAME):
            write_whole(run / NAME, page(replace(facts, results=epochs and epochs())).encode())
            print_lines(f"Report: {run / NAME}")
    print_lines(f"Results in {run}")
    return facts


def report_errors(facts: ReportData) -> None:
    """Write images.csv and errors.jsonl, the last of a run's files, on rank 0."""
    with warn_on_error(f"images.csv and {ERRORS}"):
        write_images(facts.run / "images.csv", facts.errors, facts.index)
        write_errors(facts.run / ERRORS, facts.items, facts.index, facts.labels)


def report_label_errors(
    evidence: Evidence,
    map50: float,
    index: DatasetIndex,
    spec: DatasetSpec,
    run: Path,
    origin: RunInfo,
    config: ValConfig,
) -> dict[str, Any]:
    """Print the table of label errors, and write the list and the page, on rank 0; `map50` is that of the validation.

    Returns plain values for `--json`: counts by kind, and paths of the files.
    """
    listed = suspects(evidence, index, map50)
    kinds = [{"kind": name, "suspects": every, "likely": likely} for _, name, every, likely in counts(listed)]
    result: dict[str, Any] = {"kinds": kinds, "file": None, "page": None}
    judged = int(evidence.counts.supports.sum())
    print_lines(*label_error_table(listed, map50, judged, len(index), len(index.classes) - judged))
    labels: dict[int, ImageLabels] = {}
    with warn_on_error("label lines"):
        labels = locate_labels(spec, index, sorted({suspect.image for suspect in listed}))
    with warn_on_error(FILE):
        write_label_errors(run / FILE, listed, index, labels)
        result["file"] = str(run / FILE)
        print_lines(f"Suspects: {run / FILE}")
    if not config.noreport:
        with warn_on_error(PAGE):
            write_whole(run / PAGE, label_errors_page(run.name, listed, index, labels, origin, map50).encode())
            result["page"] = str(run / PAGE)
            print_lines(f"Page: {run / PAGE}")
    return result


def label_errors_page(
    name: str,
    suspects: Sequence[LabelError],
    index: DatasetIndex,
    labels: Mapping[int, ImageLabels],
    origin: RunInfo,
    map50: float,
) -> str:
    """Render the page; equal errors give equal text. `map50` is the detector's on these labels."""
    rows = chosen([suspect.kind for suspect in suspects])
    listed = [suspects[row] for row in rows]
    dashed = [
        None if one.kind is LabelErrorKind.WRONG_CLASS else one.suggested_box for one in listed
    ]  # beside the label's
    boxes = [Subject(one.image, one.box, box) for one, box in zip(listed, dashed, strict=True)]
    crops = zip(rows, render_crops(index, boxes), strict=True)
    return render_page(
        "label_errors.html",
        title=f"{name}: label errors",
        suspects=len(suspects),
        sure=sum(suspect.score >= LIKELY for suspect in suspects),
        likely=f"{LIKELY:g}",
        trust=trust_line(map50),
        labels=len(index.classes),
        images=len(index),
        kinds=[(name, every, likely, EXPLAINED[kind]) for kind, name, every, likely in counts(suspects)],
        shown=[_entry(row, suspects[row], index, labels, crop) for row, crop in crops],
        shown_kinds=list(NAMES.values()),
        command=one_line(origin.command, 2000),
    )


def _entry(
    row: int, suspect: LabelError, index: DatasetIndex, labels: Mapping[int, ImageLabels], crop: Crop
) -> dict[str, Any]:
    own, other = ("" if c is None else one_line(index.names[c]) for c in (suspect.labelled, suspect.suggested))
    figures = [f"score {suspect.score:.2f}", f"confidence {suspect.confidence:.2f}"]
    figures += [] if suspect.iou is None else [f"IoU {suspect.iou:.2f}"]
    says = {
        LabelErrorKind.MISSING: f"{other} without a label?",
        LabelErrorKind.SPURIOUS: f"no {own} here?",
        LabelErrorKind.SHIFTED: f"{own} lies beside its label?",
        LabelErrorKind.WRONG_CLASS: f"{own}: rather {other}?",
        LabelErrorKind.DUPLICATE: f"{own} labelled twice?",
    }
    return {
        "number": row + 1,
        "kind": NAMES[suspect.kind],
        "pair": f"{suspect.labelled} {suspect.suggested}",
        "classes": " → ".join(dict.fromkeys(text or "none" for text in (own, other))),
        "says": says[suspect.kind],
        "details": ", ".join(figures),
        "crop": crop,
        **place_of(index, labels, suspect.image, suspect.object),
    }
