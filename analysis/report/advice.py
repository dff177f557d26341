"""Sentences of the report page: what happened, and what to do next. A rule without evidence returns ""."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tessera.analysis.error_analysis import NAMES
from tessera.utils.engine.state import INITIAL
from tessera.utils.evaluation.matching import Kind
from tessera.utils.flags.program import started
from tessera.utils.text import plural
from tessera.utils.training.divergence import COLLAPSE_REMEDY, IDLE_REMEDY, has_collapsed
from tessera.utils.types import Metrics

RISE = 0.005  # of mAP50-95 over the last fifth of the epochs: above it, the curve still rises
FEW = 1 / 3  # of the median class's images: below it, a class has few
WAITS = 0.2  # fraction of the time that training waits for images: above it, a change pays
WORSE = 1.1  # times its smallest value: above it, the loss of the validation has risen
WORTH = 0.005  # of mAP50: below it, a kind of error is not mentioned
MANY = 0.05  # of the objects: up to it, the most frequent kind of error at the confidence is not mentioned
LEARNED = 0.01  # mAP50: below it, almost nothing is detected, and kinds of errors do not matter

_HELPS = {
    Kind.WRONG_CLASS: "Add images of the confused classes, clarify the rules for their labels, or merge the classes: "
    "the confusion matrix names the pairs. For two boxes on one object, --agnostic-nms keeps the more confident one.",
    Kind.LOCALIZATION: "A larger --imgsz, tighter labels, or more epochs.",
    Kind.BOTH: "Clearer labels, or a larger --imgsz.",
    Kind.DUPLICATE: "A lower --iou-thres for detect.py, or a head without NMS.",
    Kind.BACKGROUND: "Look at the images first: many such detections are objects that lack a label. Then add images "
    "without objects.",
    Kind.MISSED: "Add images like those with missed objects; for small objects use a larger --imgsz, or --tile.",
}


def interval_line(metrics: Metrics, low: float, high: float) -> str:
    """Return mAP50-95 with its 95 % interval, which is NaN without objects."""
    if math.isnan(low):
        return f"mAP50-95 is undefined: no object in the labels of {plural(metrics.images, 'image')}"
    return (
        f"mAP50-95 {metrics.map:.3f}, 95 % interval {low:.3f} to {high:.3f} (bootstrap over "
        f"{plural(metrics.images, 'image')})"
    )


def speed_line(speed_ms: tuple[float, float, float], shape: Sequence[int]) -> str:
    """Return milliseconds per image: preprocessing, inference, NMS; `shape` is the batch's (B, 3, H, W)."""
    preprocessing, inference, nms = speed_ms
    return (
        f"Speed: {preprocessing:.1f} ms preprocessing, {inference:.1f} ms inference, {nms:.1f} ms NMS per image "
        f"at shape ({', '.join(str(n) for n in shape)})"
    )


def detected_fraction(confidence: float, why: str, correct: int, objects: int, false: int) -> str:
    """Describe the detected objects and false positives at a confidence, which is used for the reason `why`."""
    if not objects:
        return ""
    share, wrong = correct / objects, false / max(correct + false, 1)
    return (
        f"At confidence {confidence:.3f}, {why}, {correct:,} of {objects:,} objects are detected ({_percent(share)}), "
        f"and {false:,} of {correct + false:,} detections are false positives ({_percent(wrong)})."
    )


def best_epoch(best: int | None, epochs: int, weights: str) -> str:
    """Describe `EarlyStopping.best_epoch`, counted from 0 as in results.csv, and the epoch of the weights."""
    if best == INITIAL:
        return "No epoch was better than the initial weights, which best.pt holds."
    if best is None:
        return "No epoch has a finite fitness: the weights are those of the last one."
    last = "; the weights are those of the last one" if weights.endswith("last.pt") and best < epochs - 1 else ""
    return f"The best epoch is {best}, counted from 0, of {epochs} that were trained{last}."


def more_epochs(epochs: NDArray[np.int64], maps: NDArray[np.float64], best: int | None) -> str:
    """Judge whether more epochs would help, from their mAP50-95, NaN without validation, and the best epoch."""
    epochs, known = epochs[np.isfinite(maps)], maps[np.isfinite(maps)]
    if len(known) < 5:
        return f"Unknown: {len(known)} epochs were validated, at least five are needed."
    last = max(len(known) // 5, 2)
    rise = float(known[-last:].mean() - known[-2 * last : -last].mean())
    figures = f"the mean of the last {last} epochs is {rise:+.3f} from that of the {last} before"
    if rise > RISE:
        return f"Probably: the curve still rises ({figures}). Train again with more --epochs."
    later = 0 if best is None else int((epochs > best).sum())
    if later >= 2 * last:
        which = "the initial weights are the best" if best == INITIAL else f"the best was epoch {best}"
        return f"No: {which}, and {later} later {'epochs' if best == INITIAL else 'ones'} were not better."
    return f"Hardly: the curve is flat at its end ({figures})."


def overfits(epochs: NDArray[np.int64], losses: NDArray[np.float64]) -> str:
    """Judge whether the validation loss of the epochs rises while training continues."""
    epochs, known = epochs[np.isfinite(losses)], losses[np.isfinite(losses)]
    if len(epochs) < 5:
        return ""
    least = int(known.argmin())
    if known[-1] <= WORSE * known[least] or least > 0.6 * len(known):
        return ""
    return (
        f"The validation loss was lowest in epoch {epochs[least]} ({known[least]:.3f}) and has risen since, to "
        f"{known[-1]:.3f}: the model overfits. More images, stronger augmentation (--hyp) or "
        "pretrained weights (--weights) help."
    )


def lacking(names: Sequence[str], images: NDArray[np.int64], where: str) -> str:
    """Name classes with few images in a split; `images`: (C,), images that have an object of each."""
    none = np.flatnonzero(images == 0)
    if len(none):
        listed = _listed([names[c] for c in none.tolist()])
        return f"{listed} {'is' if len(none) == 1 else 'are'} in no image of the {where} split."
    if len(names) < 2:
        return ""
    median = float(np.median(images))
    few = [int(c) for c in np.argsort(images, kind="stable") if images[c] < FEW * median]
    if not few:
        return f"None: every class of the {where} split is in at least {int(images.min()):,} images."
    listed = _listed([f"{names[c]} ({images[c]:,})" for c in few])
    return f"Classes with few images in the {where} split: {listed}; the median class is in {median:,.0f}."


def worst_class(names: Sequence[str], class_ids: NDArray[np.int64], ap: NDArray[np.float64]) -> str:
    """Name the class with the lowest mAP50-95."""
    if len(class_ids) < 2:
        return ""
    least, mean = int(ap.argmin()), float(ap.mean())
    return f"{names[int(class_ids[least])]} has the lowest mAP50-95: {ap[least]:.3f}; the mean is {mean:.3f}."


def idle(losses: Sequence[str]) -> str:
    """Name losses that were exactly 0 in the last epoch, although there are objects."""
    if not losses:
        return ""
    return f"The loss {_listed(losses)} was exactly 0 in the last epoch: no object is matched. {IDLE_REMEDY}"


def collapsed(
    epochs: NDArray[np.int64], fitnesses: NDArray[np.float64], best: float, objects_per_class: NDArray[np.int64]
) -> str:
    """Say since which epoch the fitness has collapsed; NaN without validation, `best` is that of the weights."""
    epochs, known = epochs[np.isfinite(fitnesses)], fitnesses[np.isfinite(fitnesses)]
    best = float(known.max(initial=best))
    low = [has_collapsed(value, best, objects_per_class) for value in known.tolist()]
    if not low or not low[-1]:
        return ""
    since = len(low) - low[::-1].index(False) if False in low else 0
    return (
        f"The training has collapsed: from epoch {epochs[since]} on the fitness is at most "
        f"{known[since:].max():.3f}, after {best:.3f}. {COLLAPSE_REMEDY}"
    )


def learned_nothing(map50: float, data: str) -> str:
    """Say that almost nothing is detected."""
    if map50 >= LEARNED:
        return ""
    command = f"{started('train.py')} --data {data} --check-data"
    return (
        f"Almost nothing is detected (mAP50 {map50:.3f}), so kinds of errors do not matter yet. Check the labels and "
        f"the order of the classes (`{command}`); then train with more --epochs, or from pretrained --weights."
    )


def main_errors(gains: Mapping[Kind, float], counts: Mapping[Kind, int], confidence: float, objects: int) -> str:
    """Name the kind of error that costs most mAP50, and the most frequent one at the confidence, with their remedies.

    The first counts detections of any confidence, the second what detect.py shows; they need not be one kind.
    """
    costly = max(gains, key=lambda kind: gains[kind])
    often = max(gains, key=lambda kind: (counts[kind], gains[kind]))
    said = []
    if gains[costly] >= WORTH:
        said.append(
            f"Errors of the kind “{NAMES[costly]}” cost most: over all confidences, mAP50 would be {gains[costly]:.3f} "
            f"higher without them ({counts[costly]:,} at confidence {confidence:.3f}). {_HELPS[costly]}"
        )
    if (often != costly or not said) and counts[often] > MANY * objects:
        said.append(
            f"At confidence {confidence:.3f} most errors are of the kind “{NAMES[often]}”: {counts[often]:,}; over all "
            f"confidences they cost {gains[often]:.3f} mAP50. {_HELPS[often]}"
        )
    return " ".join(said)


def waits(share: float) -> str:
    """Describe the time that training waited for images; NaN = unknown."""
    if math.isnan(share):
        return ""
    helps = ": try --cache ram, or more --workers." if share > WAITS else "."
    return f"Training waited for images {_percent(share)} of its time{helps}"


def skipped_steps(steps: int) -> str:
    """Count the steps without a finite gradient."""
    text = f"{plural(steps, 'step')} skipped for a gradient that was not finite: see the log of the run."
    return text if steps else ""


def too_small(interval: tuple[float, float], images: int) -> str:
    """Judge whether the split is too small to show small changes."""
    half = (interval[1] - interval[0]) / 2
    if not half > 0.02:
        return ""
    return (
        f"With {plural(images, 'image')} mAP50-95 is known to ±\u00a0{half:.3f}: a smaller change "
        "may be chance. A larger validation set would show more."
    )


def problems(count: int, data: str) -> str:
    """Count the problems of the labels."""
    if not count:
        return ""
    command = f"{started('train.py')} --data {data} --check-data"
    return f"The labels have {plural(count, 'problem')}: `{command}` lists every one."


def _percent(share: float) -> str:
    """Return a fraction as a whole percentage, without a line break."""
    return f"{100 * share:.0f}\u00a0%"


def _listed(items: Sequence[str], most: int = 5) -> str:
    if len(items) > most:
        return f"{', '.join(items[:most])} and {len(items) - most:,} more"
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
