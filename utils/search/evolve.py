"""Hyperparameter search: mutations of the best sets so far, one whole training each.

Every training is a line of evolve.csv, written when it ends, from which `--resume` continues a search that was stopped;
the table is there, without a line, from the start.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import logging
import math
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tessera.utils.checkpoints.folder import write_flags, write_yaml
from tessera.utils.config import Hyp, TrainConfig
from tessera.utils.errors import Diverged, UserError
from tessera.utils.files import atomic_write, open_plain
from tessera.utils.ranks.world import World
from tessera.utils.search.folder import BEST, FLAGS, TABLE, open_search
from tessera.utils.seeding import sample_rng
from tessera.utils.text import one_line, shown
from tessera.utils.types import Metrics

log = logging.getLogger(__name__)

PARENTS = 5  # the best trials, of which one is sampled to be mutated
MUTATION_PROBABILITY = 0.8
MUTATION_SIGMA = 0.2
FACTOR_RANGE = (0.3, 3.0)
# No effect on a training; another model, or another part of it that is trained; words.
_FIXED = frozenset({"iou_t", "anchors", "frozen_layers", "fixed_norms", "optimizer", "class_weights"})
# Tables written before there were such keys lack them.
_OPTIONAL = frozenset(f.name for f in dataclasses.fields(Hyp) if f.default is not dataclasses.MISSING)
_LARGEST_TABLE = 64 << 20  # bytes; a search of 10,000 trainings has 3 MB
_FIGURES = ("generation", "fitness", "precision", "recall", "mAP_0.5", "mAP_0.5:0.95")


class HypTrial(NamedTuple):
    """One training of a search: its hyperparameters, and the figures of its final validation; 0 where there is none."""

    hyp: Hyp
    fitness: float = 0.0
    precision: float = 0.0
    recall: float = 0.0
    map50: float = 0.0
    map: float = 0.0

    @classmethod
    def of(cls, hyp: Hyp, metrics: Metrics) -> HypTrial:
        """A trial from the metrics of its training; without them where one of its figures is not finite."""
        figures = (metrics.fitness, metrics.precision, metrics.recall, metrics.map50, metrics.map)
        return cls(hyp, *figures) if all(map(math.isfinite, figures)) else cls(hyp)


def mutate(trials: Sequence[HypTrial], start: Hyp, rng: np.random.Generator) -> Hyp:
    """Hyperparameters of the next trial: `start` first, then mutations of the best.

    The parent is sampled from the best five, in proportion to how far its fitness is above the lowest of them. Each
    value changes with probability 0.8 by a factor normal around 1, clipped to 0.3–3 and to the range that the key
    allows; a count stays a whole number. A value of 0 stays 0: an augmentation that is off is not switched on. So
    does a key that may be left out and is at its default.

    Args:
        trials: so far.
        start: of the first trial.
        rng: source of all randomness.
    """
    if not trials:
        return start
    best = sorted(trials, key=lambda trial: -trial.fitness)[:PARENTS]
    above = np.array([trial.fitness - best[-1].fitness for trial in best]) + 1e-6
    parent = best[int(rng.choice(len(best), p=above / above.sum()))].hyp
    values = parent.as_dict()
    keys = [f for f in dataclasses.fields(Hyp) if f.name in values and f.name not in _FIXED]
    while values == parent.as_dict():
        factors = 1 + rng.normal(0, MUTATION_SIGMA, len(keys)) * (rng.random(len(keys)) < MUTATION_PROBABILITY)
        for f, factor in zip(keys, factors.clip(*FACTOR_RANGE), strict=True):
            mutated = getattr(parent, f.name) * float(factor)
            digits = 0 if f.metadata["whole"] else 5
            values[f.name] = round(min(max(mutated, f.metadata["low"]), f.metadata["high"]), digits)
    return dataclasses.replace(parent, **values)


def read_trials(path: Path) -> list[HypTrial]:
    """Trials of an evolve.csv, in order; [] where there is no file.

    Raises:
        UserError: a line that no search has written.
    """
    if not path.is_file():
        return []
    trials: list[HypTrial] = []
    try:
        with open_plain(path) as file:
            text = file.read(_LARGEST_TABLE).decode()
        for row in csv.DictReader(io.StringIO(text)):
            figures = [float(row[key]) for key in _FIGURES]
            values = {f.name: row[f.name] for f in dataclasses.fields(Hyp) if f.name in row or f.name not in _OPTIONAL}
            hyp = Hyp.from_dict(values, "hyperparameters")
            if not all(map(math.isfinite, figures)):
                raise ValueError("found nan or inf")
            trials.append(HypTrial(hyp, *figures[1:]))
    except OSError as error:
        raise UserError(f"{shown(path)}: cannot be read ({error.strerror}).") from error
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise UserError(
            f"{shown(path)}:{len(trials) + 2}: not a line that a search has written ({one_line(str(error), 120)}). "
            "Remove it, or move the file."
        ) from error
    return trials


def write_trials(path: Path, trials: Sequence[HypTrial]) -> None:
    """Write an evolve.csv whole or not at all."""
    keys = [f.name for f in dataclasses.fields(Hyp)]
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow((*_FIGURES, *keys))
    for number, (hyp, *figures) in enumerate(trials):
        table.writerow((number, *figures, *(getattr(hyp, key) for key in keys)))
    with atomic_write(path) as file:
        file.write(text.getvalue().encode())


def best_trial(trials: Sequence[HypTrial]) -> HypTrial:
    """The trial of the highest fitness, of at least one."""
    return max(trials, key=lambda trial: trial.fitness)


def evolve(
    config: TrainConfig, start_hyp: Hyp, world: World, train: Callable[[TrainConfig, Hyp, World], Metrics]
) -> Metrics | None:
    """`--evolve N`: N trainings with mutated hyperparameters; the best set ends in hyp_evolved.yaml.

    A training whose loss, or whose result, is not finite counts as a trial of fitness 0.

    Args:
        config: of the search; each training has its own, without plots and loggers.
        start_hyp: hyperparameters of the first trial.
        world: this rank.
        train: one training; returns its metrics.

    Returns:
        The metrics of the last training that ended; None where there was none left to do.
    """
    with open_search(config, world) as folder:
        trials = world.from_main(lambda: _begin(folder, config))
        metrics = None
        own: dict[str, Any] = {"evolve": 0, "resume": "", "project": str(folder), "exist_ok": True}
        own |= {"noval": True, "nosave": True, "noplots": True, "noreport": True, "loggers": "none"}
        for generation in range(len(trials), config.evolve):
            name = f"generation{generation}"
            hyp = mutate(trials, start_hyp, sample_rng(config.seed, generation, 0, "evolve"))
            log.info(f"Generation {generation + 1} of {config.evolve}")
            try:
                metrics = train(dataclasses.replace(config, **own, name=name), hyp, world)
                trials.append(HypTrial.of(hyp, metrics))
            except Diverged as error:
                log.warning(f"Generation {generation + 1} counts as a fitness of 0: {error}")
                trials.append(HypTrial(hyp))
            world.from_main(partial(_record, folder, config, trials))
            world.from_main(partial(shutil.rmtree, folder / name))
        best = best_trial(trials)
        log.info(f"Best of {len(trials)}: fitness {best.fitness:.4f}, in {folder / BEST}")
        return metrics


def _begin(folder: Path, config: TrainConfig) -> list[HypTrial]:
    """The trials so far. A new search gets its flags and its table at once, by which `--resume` finds it."""
    trials = read_trials(folder / TABLE)
    if not trials:
        _record(folder, config, trials)
    return trials


def _record(folder: Path, config: TrainConfig, trials: Sequence[HypTrial]) -> None:
    """Write the flags of a search, its table and its best set."""
    write_flags(folder / FLAGS, config)
    write_trials(folder / TABLE, trials)
    if trials:
        write_yaml(folder / BEST, best_trial(trials).hyp.as_dict())
