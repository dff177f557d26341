"""The recipe of a run: the file of hyperparameters for its length, a line on what they come to, and warnings."""

from __future__ import annotations

import dataclasses
import logging

from tessera.models.heads.head import Head
from tessera.utils.config import Hyp, TrainConfig, load_hyp
from tessera.utils.engine.context import RunContext
from tessera.utils.engine.ema import ema_decay
from tessera.utils.engine.schedule import Schedule, accumulation
from tessera.utils.text import counted, one_line
from tessera.utils.types import Start

log = logging.getLogger(__name__)

_STARTS: dict[Start, str] = {
    "scratch": "from scratch",
    "known": "from weights that know all of these classes",
    "new": "from weights of other classes, of classes without names, or of another model",
    "body": "from a classifier's body",
}

LONG_RUN = 10_000  # batches from which a run is long
UNKNOWN_BATCH = 64  # images that AutoBatch, which comes later, counts as
FEW_IMAGES = 200  # below which the body of a classifier was the better start in all that was measured
FEW_STEPS = 400  # optimizer steps below which a model from scratch has hardly learned anything
FAR = 3  # times another learning rate: more than a file for the same kind of optimizer differs by
FOREIGN = 20  # times another gain: no search comes to that, a file of another family does


def recipe_of(head: type[Head], start: Start, batches: int) -> str:
    """The hyperparameter file of a head's models for a run of so many batches."""
    by_length = head.recipes.long if batches >= LONG_RUN else head.recipes.short
    return {"known": head.recipes.known, "body": head.recipes.body}.get(start, by_length)


def with_recipe(config: TrainConfig, head: type[Head], start: Start, images: int) -> tuple[TrainConfig, Hyp]:
    """A run without `--hyp`: its flags with the head's own file, by start and images an epoch, and its values."""
    batch_size = config.batch_size if config.batch_size > 0 else UNKNOWN_BATCH
    batches = config.epochs * -(-images // batch_size)
    file = recipe_of(head, start, batches)
    length = f", {'from' if batches >= LONG_RUN else 'below'} {LONG_RUN:,} batches"
    log.info(f"--hyp {file}: {_STARTS[start]}{length if start in ('scratch', 'new') else ''}")
    return dataclasses.replace(config, hyp=file), load_hyp(file)


def better_starts(config: TrainConfig, pictures: int) -> str:
    """What a fresh run from scratch could begin with instead; "" where it has pictures enough."""
    if config.weights or pictures >= FEW_IMAGES:
        return ""
    other = " --cfg tessera-lite0.yaml" if config.cfg else ""
    return (
        f"{pictures:,} training images are few to begin with nothing: --weights imagenet{other} (ImageNet, Apache-2.0) "
        "was the better start where that was measured, and --weights yolox_tiny.pth (COCO, Apache-2.0) may be one; "
        "docs/models.md has more."
    )


def report_recipe(run: RunContext, schedule: Schedule, head: Head) -> None:
    """Log what the hyperparameters come to in this run, and warn where they do not suit it."""
    log.info(recipe_in_words(run, schedule))
    for warning in warnings(run, schedule, head):
        log.warning(warning)


def recipe_in_words(run: RunContext, schedule: Schedule) -> str:
    """One line: the file and its optimization, in this run's numbers."""
    hyp, batches, steps = run.hyp, schedule.iterations, schedule.steps()
    horizon = 1 / (1 - ema_decay(steps, hyp.ema_share))
    flat = f"constant for {hyp.flat:.0%} of the epochs, then " if hyp.flat else ""
    fall = "a cosine" if schedule.cosine_share > 0.5 else "a line"
    closed = run.config.epochs - run.mosaic_epochs
    mosaic = f"no mosaic in the last {closed} of {run.config.epochs} epochs" if closed > 0 else "mosaic in every epoch"
    mosaic = mosaic if run.mosaic_epochs > 0 else "no mosaic"
    by_layer = f" at the head, × {run.layer_decay:g} a layer before it" if run.layer_decay != 1 else ""
    fixed = f"; normalisations of the first {hyp.fixed_norms:g} layers fixed" if run.keeps_norms else ""
    accumulated = accumulation(hyp, run.batch_size)
    images = f"{'up to ' if accumulated > 1 else ''}{counted(run.batch_size * accumulated, 'image')}"
    return (
        f"Recipe {one_line(run.config.hyp, 60)}: {counted(batches, 'batch')}, {counted(steps, 'step')} of {images}; "
        f"{run.optimizer}, learning rate {hyp.lr0:g}{by_layer}, warm-up {schedule.warmup_iterations:,} batches, "
        f"{flat}{fall} to {hyp.lr0 * hyp.lrf:g}; EMA over the last {horizon:,.1f} steps; {mosaic}{fixed}"
    )


def warnings(run: RunContext, schedule: Schedule, head: Head) -> list[str]:
    """What is wrong with the hyperparameters in this run, and the flag that helps."""
    found: list[str] = []
    own = recipe_of(type(head), run.start, schedule.iterations)
    gain = load_hyp(own).box
    if not gain / FOREIGN <= run.hyp.box <= gain * FOREIGN:
        found.append(
            f"{one_line(run.config.hyp, 60)}: the gain of the box loss is {run.hyp.box:g}; in {own}, which is this "
            f"model's own, {gain:g}. A file for another kind of head? Leave --hyp out, or give one for this kind."
        )
    found += _rate_of_another_optimizer(run, head)
    steps = schedule.steps()
    warming = min(schedule.warmup_iterations, schedule.iterations)
    few, mostly_warm = not run.config.weights and steps < FEW_STEPS, 2 * warming > schedule.iterations
    if not run.resumed and (few or mostly_warm):
        helps = ["more --epochs or a smaller --batch-size"] if schedule.iterations < FEW_STEPS else []
        if accumulation(run.hyp, run.batch_size) > 1:
            short = recipe_of(type(head), run.start, 0)
            helps = [f"--hyp {short}, which makes one of every batch (docs/recipes.md: what that gave)", *helps]
        elif mostly_warm:
            helps += ["a lower warmup_epochs in --hyp"]
        found.append(
            f"{counted(steps, 'optimizer step')}, {warming} of {counted(schedule.iterations, 'batch')} for the "
            f"warm-up: {'few for a model from scratch' if few else 'it is most of the run'}. What helps: "
            f"{'; '.join(helps)}."
        )
    return found


def _rate_of_another_optimizer(run: RunContext, head: Head) -> list[str]:
    """A warning where `--optimizer` is of another kind than the hyperparameters', and their lr0 far from its own."""
    is_sgd = run.optimizer == "SGD"  # both Adams have the same rate
    if (run.hyp.optimizer == "SGD") == is_sgd:
        return []
    recipes = ((file, load_hyp(file)) for file in head.recipes)
    fitting = [(file, hyp) for file, hyp in recipes if (hyp.optimizer == "SGD") == is_sgd]
    if not fitting:
        return []
    file, other = fitting[0]
    if other.lr0 / FAR < run.hyp.lr0 < other.lr0 * FAR:
        return []
    return [
        f"--optimizer {run.optimizer}: lr0 {run.hyp.lr0:g} of {one_line(run.config.hyp, 60)} is for "
        f"{run.hyp.optimizer}; {file}, for {other.optimizer}, has {other.lr0:g}. Give --hyp {file}, or a file of your "
        "own with such a rate."
    ]
