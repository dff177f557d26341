"""Recipe of a run: choice of the hyperparameter file, its summary in the log, and warnings."""

from __future__ import annotations

import logging

from tessera.models.heads.head import Head, Words
from tessera.utils.config import AUTO, OWN_WEIGHTS, Hyp, TrainConfig, complete_hyp, load_hyp
from tessera.utils.engine.context import RunContext
from tessera.utils.engine.optimizer import Schedule, accumulation, rates_of
from tessera.utils.engine.state import ema_decay
from tessera.utils.text import one_line, plural, row
from tessera.utils.types import Pretraining

log = logging.getLogger(__name__)

_PRETRAININGS: dict[Pretraining, str] = {
    "scratch": "from scratch",
    "drawn": "from weights pretrained on synthetic shapes",
    "known": "from weights that know all of these classes",
    "new": "from weights of other classes, of unnamed classes, or of another model",
    "backbone": "from a classifier's backbone",
}

LONG_RUN = 10_000  # batches; threshold of a long run
UNKNOWN_BATCH = 64  # images a batch while AutoBatch has not chosen
FEW_STEPS = 400  # optimizer steps; below this, a model from scratch has hardly learned anything
RATE_RATIO = 3  # ratio of learning rates; files for one kind of optimizer differ by less
GAIN_RATIO = 20  # ratio of box gains; only files for another kind of head differ by more


def usual_recipe(head: type[Head], pretraining: Pretraining, batches: int) -> Words:
    """Return the recipe for a head's models and a run of `batches` batches."""
    recipes = head.recipes
    short = recipes.new if pretraining == "new" else recipes.short
    by_length = recipes.long if batches >= LONG_RUN else short
    return {"known": recipes.known, "backbone": recipes.backbone}.get(pretraining, by_length)


def choose_hyp(
    flags: TrainConfig, head: type[Head], pretraining: Pretraining, images: int
) -> tuple[tuple[str, ...], Hyp]:
    """Choose the hyperparameters that `--hyp` leaves out; return its completed words and all values."""
    recipe = usual_recipe(head, pretraining, _batches(flags, images))
    return complete_hyp(flags.hyp, recipe, load_hyp(*recipe))


def _batches(flags: TrainConfig, images: int) -> int:
    batch_size = flags.batch_size if flags.batch_size > 0 else UNKNOWN_BATCH
    return flags.epochs * -(-images // batch_size)


def chosen_weights(flags: TrainConfig, images: int) -> str:
    """Return `--weights`, or what "auto" means for a number of training images: the own weights in a short run."""
    if flags.weights != AUTO:
        return flags.weights
    return OWN_WEIGHTS if _batches(flags, images) < LONG_RUN and not flags.cfg else ""


def pretrained_hint(config: TrainConfig, images: int) -> str:
    """Return a hint at better weights for a short run from scratch or from the own weights; "" otherwise."""
    if config.weights not in ("", OWN_WEIGHTS) or _batches(config, images) >= LONG_RUN:
        return ""
    given = " instead of --cfg" if config.cfg else ""
    return (
        f"Training {f'from {OWN_WEIGHTS}' if config.weights else 'from scratch'} on {plural(images, 'image')}; weights "
        f"pretrained on photographs usually do better: --weights yolox_nano.pth{given} (docs/models.md)."
    )


def report_recipe(context: RunContext, schedule: Schedule, head: Head) -> None:
    """Log the recipe and its schedule, and warn if they do not suit this run."""
    reason = _PRETRAININGS[context.pretraining]
    if context.pretraining not in ("known", "backbone"):
        reason += f", {'from' if schedule.iterations >= LONG_RUN else 'below'} {LONG_RUN:,} batches"
    usual = usual_recipe(type(head), context.pretraining, schedule.iterations)
    is_usual = not context.resumed and context.config.hyp[: len(usual)] == usual
    chosen = f" ({reason})" if is_usual else ""
    log.info(row("Recipe", _text(context.config.hyp) + chosen))
    log.info(row("Schedule", schedule_summary(context, schedule)))
    for warning in recipe_warnings(context, schedule, head):
        log.warning(warning)


def _text(words: Words) -> str:
    return one_line(" ".join(words), 120)


def schedule_summary(context: RunContext, schedule: Schedule) -> str:
    """Return one line on the optimization in the numbers of this run."""
    hyp, batches, steps = context.hyp, schedule.iterations, schedule.steps()
    horizon = 1 / (1 - ema_decay(steps, hyp.ema_fraction))
    flat = f"constant for {hyp.flat_fraction:.0%} of the epochs, then " if hyp.flat_fraction else ""
    fall = "cosine decay" if schedule.cosine_weight > 0.5 else "linear decay"
    closed = context.config.epochs - context.mosaic_epochs
    mosaic = (
        f"no mosaic in the last {closed} of {context.config.epochs} epochs" if closed > 0 else "mosaic in every epoch"
    )
    mosaic = mosaic if context.mosaic_epochs > 0 else "no mosaic"
    by_layer = f" at the head, × {context.layer_decay:g} a layer before it" if context.layer_decay != 1 else ""
    fixed = (
        f"; BatchNorm statistics of the first {hyp.fixed_norms:g} layers fixed"
        if context.config.weights and hyp.fixed_norms
        else ""
    )
    accumulated = accumulation(hyp, context.batch_size)
    images = f"{'up to ' if accumulated > 1 else ''}{plural(context.batch_size * accumulated, 'image')}"
    return (
        f"{plural(batches, 'batch')}, {plural(steps, 'step')} of {images}; "
        f"{context.optimizer}, learning rate {hyp.lr0:g}{by_layer}, warm-up {schedule.warmup_iterations:,} batches, "
        f"{flat}{fall} to {hyp.lr0 * hyp.lrf:g}; EMA over the last {horizon:,.1f} steps; {mosaic}{fixed}"
    )


def recipe_warnings(context: RunContext, schedule: Schedule, head: Head) -> list[str]:
    """Return warnings about the hyperparameters in this run, each with a remedy."""
    found: list[str] = []
    own = usual_recipe(type(head), context.pretraining, schedule.iterations)
    gain = load_hyp(*own).box
    if not gain / GAIN_RATIO <= context.hyp.box <= gain * GAIN_RATIO:
        found.append(
            f"{_text(context.config.hyp)}: box gain {context.hyp.box:g}, expected about {gain:g} as in {_text(own)}. "
            "It may be for another kind of head. Omit --hyp, or give a file for this kind."
        )
    found += _learning_rate_warnings(context, head)
    steps = schedule.steps()
    warming = min(schedule.warmup_iterations, schedule.iterations)
    few, mostly_warm = not context.config.weights and steps < FEW_STEPS, 2 * warming > schedule.iterations
    if not context.resumed and (few or mostly_warm):
        helps = ["more --epochs or a smaller --batch-size"] if schedule.iterations < FEW_STEPS else []
        if accumulation(context.hyp, context.batch_size) > 1:
            short = usual_recipe(type(head), context.pretraining, 0)
            helps = [f"--hyp {_text(short)}, which makes a step of every batch (docs/recipes.md)", *helps]
        elif mostly_warm:
            helps += ["a lower warmup_epochs in --hyp"]
        found.append(
            f"{plural(steps, 'optimizer step')}, {warming} of {plural(schedule.iterations, 'batch')} in the warm-up: "
            f"{'too few for a model from scratch' if few else 'most of the run'}. Use {'; or '.join(helps)}."
        )
    return found


def _learning_rate_warnings(context: RunContext, head: Head) -> list[str]:
    """Warn if `--optimizer` is of another kind than the hyperparameters', and lr0 far from its usual rate."""
    rates = rates_of(context.optimizer)
    if rates == rates_of(context.hyp.optimizer):
        return []
    recipes = ((_text(recipe), load_hyp(*recipe)) for recipe in head.recipes)
    recipe, other = next(((r, hyp) for r, hyp in recipes if rates_of(hyp.optimizer) == rates), ("", context.hyp))
    if other.lr0 / RATE_RATIO < context.hyp.lr0 < other.lr0 * RATE_RATIO:
        return []
    return [
        f"--optimizer {context.optimizer}: lr0 {context.hyp.lr0:g} of {_text(context.config.hyp)} is for "
        f"{context.hyp.optimizer}; {recipe}, for {other.optimizer}, has {other.lr0:g}. Give --hyp {recipe}, or a file "
        "with a similar rate."
    ]
