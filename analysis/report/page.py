"""report.html: the page of a training or a validation, with a gallery of the worst errors."""

from __future__ import annotations

import math
import os
import platform
import shlex
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tessera.analysis.charts import loss_names, most_confused
from tessera.analysis.error_analysis import ERROR_KINDS, NAMES, ErrorItem, ImageLabels, background_line, explained
from tessera.analysis.error_counts import Errors
from tessera.analysis.report import advice
from tessera.analysis.report.html_page import Crop, Subject, render_crops, render_page
from tessera.analysis.report.page_data import (
    MOST_CLASSES,
    ReportData,
    breakdowns,
    class_rows,
    confusion_table,
    dataset,
    images_by_class,
    in_words,
    scaled_sizes,
    splits_of,
    threshold_curves,
    training_charts,
)
from tessera.utils.evaluation.matching import CONFIDENCES, FALSE_KINDS, Kind
from tessera.utils.flags.program import called, program_version
from tessera.utils.image_size import size_hw_of
from tessera.utils.text import one_line
from tessera.utils.training.divergence import idle_losses
from tessera.utils.types import DatasetIndex, fitness

NAME = "report.html"
WORST = 60  # errors that are shown for their cost alone
OF_A_KIND = 15  # that are shown beside them
OF_A_CELL = 2  # of the confusion matrix that is shown
MOST = 140
_SIZES = ((32, "small"), (96, "medium"), (np.inf, "large"))  # COCO's, in the image as the model sees it
Pair = tuple[int, int]


def page(facts: ReportData) -> str:
    """Render the page; equal data gives equal text."""
    found, origin, gains = facts.found, facts.origin, facts.gains
    errors, counts = facts.errors, facts.errors.counts()
    panels, times = ({}, {}) if facts.results is None else training_charts(facts.results, origin.best_epoch)
    shown, classes = gallery(facts), class_rows(facts)
    most = max(*gains.values(), 1e-9)
    return render_page(
        "page.html",
        title=f"{facts.run.name}: {'training' if facts.results is not None else 'validation'} report",
        metrics=found.metrics,
        interval=facts.interval.map,
        answers=answers(facts),
        speed=_speed(facts),
        panels=panels,
        times=times,
        curves=threshold_curves(facts),
        classes=classes,
        classes_left=len(found.metrics.class_ids) - len(classes),
        confidence=errors.confidence,
        best=float(CONFIDENCES[found.curves.best]),
        threshold_origin=found.origin,
        is_taken=facts.is_taken,
        correct=counts[Kind.CORRECT],
        objects=len(errors.outcomes),
        false_positives=sum(counts[kind] for kind in FALSE_KINDS),
        kinds=[
            (NAMES[kind], counts[kind], gains[kind], explained(kind, errors, found.max_det), gains[kind] / most)
            for kind in sorted(ERROR_KINDS, key=lambda kind: -gains[kind])
        ],
        errors=sum(counts[kind] for kind in ERROR_KINDS),
        breakdowns=breakdowns(facts),
        heat=confusion_table(facts, {error["pair"] for error in shown}),
        gallery=shown,
        gallery_kinds=[NAMES[kind] for kind in ERROR_KINDS],
        dataset=dataset(facts),
        origin=origin,
        command=one_line(origin.command, 2000),
        flags={name: one_line(str(value), 200) for name, value in origin.config.as_dict().items()},
        versions=_versions(facts),
    )


def answers(facts: ReportData) -> dict[str, list[str]]:
    """Return questions with answers in words, without those that have none."""
    found, origin, results = facts.found, facts.origin, facts.results
    metrics, errors, counts = found.metrics, facts.errors, facts.errors.counts()
    names = [facts.name(c) for c in range(len(facts.index.names))]
    false = sum(counts[kind] for kind in FALSE_KINDS)
    why = f"which {called('detect.py')} uses with these weights" if facts.is_taken else "where F1 is best"
    why = f"that of {found.origin}" if found.origin else why
    went = [
        f"{advice.interval_line(metrics, *facts.interval.map)}.",
        advice.detected_fraction(errors.confidence, why, counts[Kind.CORRECT], metrics.objects, false),
        background_line(errors),
    ]
    faults = _faults(facts)
    longer, skipped = [], ""
    if results is not None:
        went.insert(0, advice.best_epoch(origin.best_epoch, origin.epochs, origin.weights))
        epochs = results["epoch"].to_numpy()
        losses = results.filter(regex="^val/.*_loss$").sum(axis=1, skipna=False).to_numpy(float)
        maps = results["metrics/mAP_0.5:0.95"].to_numpy(float)
        overfits = "" if faults else advice.overfits(epochs, losses)
        longer = [advice.more_epochs(epochs, maps, origin.best_epoch), overfits]
        skipped = advice.skipped_steps(origin.skipped)
    split = splits_of(facts)[0]
    sentences = {
        "Did it go well?": went,
        "Would more epochs help?": longer,
        "Which class lacks images?": [
            advice.lacking(names, images_by_class(split), split.split),
            advice.worst_class(names, metrics.class_ids, metrics.per_class[:, 3]),
        ],
        "What to do next?": [
            *faults,
            advice.main_errors(facts.gains, counts, errors.confidence, metrics.objects) if not faults else "",
            skipped,
            advice.too_small(facts.interval.map, metrics.images),
            advice.problems(len(facts.index.problems), _data(facts)),
        ],
    }
    answered = {question: list(filter(None, answer)) for question, answer in sentences.items()}
    return {question: answer for question, answer in answered.items() if answer}


def _faults(facts: ReportData) -> list[str]:
    """Return why the weights or the training are of no use, before which kinds of errors do not matter."""
    metrics, origin, results = facts.found.metrics, facts.origin, facts.results
    found = [""]
    if results is not None and origin.trained_on is not None:
        last = {name: value for name in loss_names(results) for value in results[f"train/{name}_loss"].tail(1)}
        fitnesses = fitness(results["metrics/mAP_0.5"], results["metrics/mAP_0.5:0.95"]).to_numpy(float)
        found = [
            advice.idle(idle_losses(last, origin.unused_losses, len(origin.trained_on.classes))),
            advice.collapsed(results["epoch"].to_numpy(), fitnesses, metrics.fitness, metrics.objects_per_class),
        ]
    if metrics.objects and not any(found):
        found = [advice.learned_nothing(metrics.map50, _data(facts))]
    return list(filter(None, found))


def _data(facts: ReportData) -> str:
    """Return the dataset as an argument of a command; "…" for that of the weights."""
    data = facts.origin.config.data
    return one_line(shlex.quote(data), 100) if data else "…"


def _speed(facts: ReportData) -> list[str]:
    share = math.nan  # of the time that training waited for images, over the epochs that have times
    if facts.results is not None:
        times = facts.results[["time/epoch_s", "time/data_wait"]].dropna().to_numpy(float)
        share = float(np.average(times[:, 1], weights=times[:, 0])) if times[:, 0].sum() > 0 else math.nan
    speed = advice.speed_line(facts.found.metrics.speed_ms, (1, 3, *size_hw_of(facts.origin.imgsz)))
    return [sentence for sentence in (advice.waits(share), f"{speed}.") if sentence]


def _versions(facts: ReportData) -> dict[str, str]:
    program = {name: version for name, version in program_version().items() if version}
    return {
        **program,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors",
        "device": one_line(facts.origin.device) + (f", {facts.origin.ranks} ranks" if facts.origin.ranks > 1 else ""),
        "image size": f"{facts.origin.imgsz} pixels",
        "folder": one_line(str(facts.run), 200),
    }


def chosen(kinds: Sequence[int], cells: Sequence[Pair] = (), classes: Collection[int] = ()) -> list[int]:
    """Select errors to show: the worst of all, of each kind and of each cell of the matrix; then the next worst.

    `kinds` and `cells` are of the errors, the worst first; `classes` those of the matrix shown, and background.
    """
    taken = dict.fromkeys(range(min(WORST, len(kinds))))
    shown = [frozenset(cell) <= frozenset(classes) for cell in cells] or [False] * len(kinds)
    cells = cells or [(-1, -1)] * len(kinds)
    of_kind, of_cell = Counter(kinds[: len(taken)]), Counter(cells[: len(taken)])
    for row in range(len(taken), len(kinds)):
        if of_kind[kinds[row]] < OF_A_KIND or (shown[row] and of_cell[cells[row]] < OF_A_CELL):
            taken[row] = None
            of_kind[kinds[row]] += 1
            of_cell[cells[row]] += 1
    taken |= dict.fromkeys(range(min(MOST, len(kinds))))
    return sorted(list(taken)[:MOST])


def cells_of(errors: Errors, items: Sequence[ErrorItem]) -> list[Pair]:
    """Return the cell of the confusion matrix of each error: predicted and true class, -1 for background.

    A pair of classes counts the most confident detection of another class on an object without a true positive.
    """
    places = dict(zip(errors.images.tolist(), errors.offsets[:-1].tolist(), strict=True))
    confused: dict[Pair, int] = {}
    for row in sorted(range(len(items)), key=lambda row: -items[row].score):
        item = items[row]
        own = places[item.image] + item.object
        if item.kind is Kind.WRONG_CLASS and errors.outcomes[own] == Kind.WRONG_CLASS:
            confused.setdefault((item.image, item.object), row)
    pairs = set(confused.values())
    cells = []
    for row, item in enumerate(items):
        predicted, true = (-1 if c is None else c for c in (item.predicted, item.true))
        cells.append((predicted, true if row in pairs or item.kind is Kind.MISSED else -1))
    return cells


def gallery(facts: ReportData) -> list[dict[str, Any]]:
    """Return the errors shown, by cost, as the macro `gallery` takes them."""
    cells = cells_of(facts.errors, facts.items)
    classes, _ = most_confused(facts.errors.confusion, MOST_CLASSES)
    rows = chosen([item.kind for item in facts.items], cells, {-1, *classes.tolist()})
    crops = render_crops(
        facts.index, [Subject(item.image, item.true_box, item.box) for item in map(facts.items.__getitem__, rows)]
    )
    return [_entry(facts, row, cells[row], crop) for row, crop in zip(rows, crops, strict=True)]


def _entry(facts: ReportData, row: int, cell: Pair, crop: Crop) -> dict[str, Any]:
    item = facts.items[row]
    predicted, true = ("" if c is None else facts.name(c) for c in (item.predicted, item.true))
    box = item.box if item.true_box is None else item.true_box
    assert box is not None, "an error has a box"
    (side,) = scaled_sizes(facts.index, np.array([item.image]), np.array([box], np.float32), facts.origin.imgsz)
    size = next(name for above, name in _SIZES if side < above)
    figures = [f"confidence {item.score:.2f}", *([] if item.iou is None else [f"IoU {item.iou:.2f}"]), size]
    also = "also " * (item.kind is Kind.WRONG_CLASS and cell[1] < 0)  # a more confident detection is in the cell
    says = {
        Kind.WRONG_CLASS: f"{true} {also}predicted as {predicted}",
        Kind.LOCALIZATION: f"{predicted}, localization error",
        Kind.BOTH: f"{predicted} near {true}",
        Kind.DUPLICATE: f"{predicted} detected twice",
        Kind.BACKGROUND: f"{predicted} where nothing is labelled",
        Kind.MISSED: f"{true} not detected",
    }
    return {
        "number": row + 1,
        "kind": NAMES[item.kind],
        "pair": f"{cell[0]} {cell[1]}",
        "classes": in_words(*(None if c < 0 else facts.name(c) for c in cell)),
        "size": size,
        "says": says[item.kind],
        "details": ", ".join(figures),
        "crop": crop,
        **place_of(facts.index, facts.labels, item.image, item.object),
    }


def place_of(index: DatasetIndex, labels: Mapping[int, ImageLabels], image: int, row: int) -> dict[str, str]:
    """Return the file names of an image and of its labels, with the line or id of one label."""
    place = ""
    if image in labels:
        line, own = labels[image].place(row)
        place = one_line(labels[image].file, 200)
        place += f":{line}" if line is not None else f", id {one_line(str(own))}" if own is not None else ""
    return {"image": one_line(index.path(image).name, 100), "label": place}
