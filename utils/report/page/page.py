"""Joins the sections of the page, and writes it."""

from __future__ import annotations

import math
import os
import platform
import shlex
from typing import Any

import numpy as np
import torch
from markupsafe import Markup

from tessera.utils.checkpoints.provenance import written_by
from tessera.utils.diagnosis.files import EXPLAINED, NAMES
from tessera.utils.diagnosis.gains import ERROR_KINDS
from tessera.utils.evaluation.matching import FALSE_KINDS, Kind
from tessera.utils.evaluation.tally import Errors
from tessera.utils.files import atomic_write
from tessera.utils.flags.program import started
from tessera.utils.report.page import sentences
from tessera.utils.report.page.breakdown import breakdowns, calibration, calibration_error
from tessera.utils.report.page.classes import class_table
from tessera.utils.report.page.confusion import heat_map
from tessera.utils.report.page.dataset import glance, pictures_by_class, splits_of
from tessera.utils.report.page.facts import Facts, readable
from tessera.utils.report.page.gallery import gallery, kinds_shown
from tessera.utils.report.page.shell import own_file, rendered
from tessera.utils.report.page.svg import bar
from tessera.utils.report.page.threshold import curves_of
from tessera.utils.report.page.training import data_wait, panels, times, validation_loss

NAME = "report.html"


def write_page(facts: Facts) -> None:
    """Write report.html into the run's folder, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    with atomic_write(facts.run / NAME) as file:
        file.write(page(facts).encode())


def page(facts: Facts) -> str:
    """The page: the same text for the same facts."""
    return rendered(own_file(__package__, "page.html"), **_sections(facts))


def _sections(facts: Facts) -> dict[str, Any]:
    """What the template fills in."""
    found, origin = facts.found, facts.origin
    errors, counts = found.errors, found.errors.counts()
    shown = gallery(facts)
    pairs = frozenset((int(p), int(t)) for p, t in (error.pair.split() for error in shown))
    trust = calibration(found.ranking)
    results = facts.results
    return {
        "title": f"{facts.run.name}: {'training' if results is not None else 'validation'} report",
        "metrics": found.metrics,
        "interval": facts.interval.map,
        "answers": answers(facts),
        "speed": _speed(facts),
        "panels": [] if results is None else panels(results, origin.best_epoch),
        "times": [] if results is None else times(results, origin.best_epoch),
        "curves": curves_of(facts),
        "classes": class_table(facts),
        "confidence": errors.confidence,
        "is_taken": facts.is_taken,
        "correct": counts[Kind.CORRECT],
        "objects": len(errors.outcomes),
        "false_finds": sum(counts[kind] for kind in FALSE_KINDS),
        "kinds": _kinds(facts),
        "errors": sum(counts[kind] for kind in ERROR_KINDS),
        "breakdowns": breakdowns(facts),
        "trust": trust,
        "trust_error": calibration_error(trust),
        "heat": heat_map(facts, pairs),
        "gallery": shown,
        "gallery_kinds": kinds_shown(shown),
        "dataset": glance(facts),
        "origin": origin,
        "command": readable(origin.command, 2000),
        "flags": {name: readable(str(value), 200) for name, value in origin.config.as_dict().items()},
        "given": origin.config.given,
        "versions": _versions(facts),
        "usage": _usage(facts),
    }


def answers(facts: Facts) -> list[tuple[str, list[str]]]:
    """Questions with what was measured, in words; rules that have nothing to say are left out."""
    found, origin, results = facts.found, facts.origin, facts.results
    metrics, counts = found.metrics, found.errors.counts()
    names = [facts.name(c) for c in range(len(facts.index.names))]
    false = sum(counts[kind] for kind in FALSE_KINDS)
    went = [
        sentences.outcome(metrics.map, facts.interval.map, metrics.images),
        sentences.found_share(
            found.errors.confidence, counts[Kind.CORRECT], metrics.objects, false, is_taken=facts.is_taken
        ),
    ]
    longer, skipped = [], ""
    if results is not None:
        maps = results["metrics/mAP_0.5:0.95"].to_numpy(float)
        went.insert(0, sentences.best_epoch(origin.best_epoch, len(results)))
        longer = [sentences.more_epochs(maps), sentences.overfits(validation_loss(results))]
        skipped = sentences.skipped_steps(origin.skipped)
    split, pictures = next(iter(splits_of(facts).items()))
    classes = [
        sentences.lacking(names, pictures_by_class(pictures), split),
        sentences.worst_class(names, metrics.class_ids, metrics.per_class[:, 3]),
    ]
    following = [
        sentences.costliest(facts.gains, counts, _second_finds(found.errors)) if metrics.objects else "",
        skipped,
        sentences.too_small(facts.interval.map, metrics.images),
        sentences.problems(len(facts.index.problems), readable(shlex.quote(origin.config.data), 100)),
    ]
    asked = {
        "Did it go well?": went,
        "Would more epochs help?": longer,
        "Which class lacks pictures?": classes,
        "What to do next?": following,
    }
    said = {question: [sentence for sentence in told if sentence] for question, told in asked.items()}
    return [(question, told) for question, told in said.items() if told]


def _speed(facts: Facts) -> list[str]:
    """Whether it was fast, in words."""
    wait = math.nan if facts.results is None else data_wait(facts.results)
    told = [sentences.waits(wait), sentences.speed(facts.found.metrics.speed_ms)]
    return [sentence for sentence in told if sentence]


def _second_finds(errors: Errors) -> int:
    """Detections of a wrong class that are beside the confusion matrix's pairs: their objects have another one."""
    pairs = errors.confusion.matrix[:-1, :-1]
    return errors.counts()[Kind.WRONG_CLASS] - int(pairs.sum() - pairs.trace())


def _kinds(facts: Facts) -> list[tuple[str, int, float, str, Markup]]:
    """Kinds of errors, the costliest first: name, count, gain, what it is, bar."""
    counts, gains = facts.found.errors.counts(), facts.gains
    most = max(*gains.values(), 1e-9)
    ordered = sorted(ERROR_KINDS, key=lambda kind: -gains[kind])
    return [
        (NAMES[kind], counts[kind], gains[kind], EXPLAINED[kind], bar([("gain", gains[kind] / most)]))
        for kind in ordered
    ]


def _versions(facts: Facts) -> dict[str, str]:
    program = {name: version for name, version in written_by().items() if version}
    return {
        **program,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors",
        "device": readable(facts.origin.device) + (f", {facts.origin.ranks} ranks" if facts.origin.ranks > 1 else ""),
        "size of the pictures": f"{facts.origin.imgsz} pixels",
        "folder": readable(str(facts.run), 200),
    }


def _usage(facts: Facts) -> list[tuple[str, str]]:
    """What can be done with the result: a heading and a command each."""
    weights, data = (readable(shlex.quote(text), 200) for text in (facts.origin.weights, facts.origin.config.data))
    given = f" --data {data}" if facts.origin.config.data else ""
    tiles = f" --tile {facts.origin.config.tile}" if facts.origin.config.tile else ""
    return [
        ("Find objects", f"{started('detect.py')} --weights {weights} --source your/pictures{tiles}"),
        ("Measure again", f"{started('val.py')} --weights {weights}{given}{tiles} --verbose"),
        ("Export", f"{started('export.py')} --weights {weights} --include onnx"),
    ]
