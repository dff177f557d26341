"""report.html: the page of a training or a validation."""

from __future__ import annotations

import math
import os
import platform
import shlex

import numpy as np
import torch

from tessera.analysis.error_analysis.files import NAMES, background_line, explained
from tessera.analysis.error_analysis.tide_gains import ERROR_KINDS
from tessera.analysis.report import advice
from tessera.analysis.report.curves import loss_names, threshold_curves, training_charts
from tessera.analysis.report.error_gallery import gallery
from tessera.analysis.report.page_data import ReportData
from tessera.analysis.report.tables import breakdowns, class_rows, confusion_table, dataset, images_by_class, splits_of
from tessera.analysis.report.template import own_file, render_page
from tessera.utils.checkpoints.provenance import program_version
from tessera.utils.engine.learning import idle_losses
from tessera.utils.evaluation.matching import CONFIDENCES, FALSE_KINDS, Kind
from tessera.utils.flags.program import called
from tessera.utils.text import one_line
from tessera.utils.types import fitness

NAME = "report.html"


def page(facts: ReportData) -> str:
    """Render the page; equal data gives equal text."""
    found, origin, gains = facts.found, facts.origin, facts.gains
    errors, counts = found.errors, found.errors.counts()
    panels, times = ({}, {}) if facts.results is None else training_charts(facts.results, origin.best_epoch)
    shown, classes = gallery(facts), class_rows(facts)
    most = max(*gains.values(), 1e-9)
    return render_page(
        own_file(__package__, "page.html"),
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
    metrics, errors, counts = found.metrics, found.errors, found.errors.counts()
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
    speed = advice.speed_line(facts.found.metrics.speed_ms, (1, 3, facts.origin.imgsz, facts.origin.imgsz))
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
