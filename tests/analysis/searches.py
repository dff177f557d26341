"""Searches with synthetic trainings: a formula with noise.

python -m tests.analysis.searches PROJECT TRIALS SECONDS      # a worker, with seconds per epoch
"""

from __future__ import annotations

import csv
import dataclasses
import math
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tessera.analysis.search import TrialObserver
from tessera.analysis.search import run_search as evolve
from tessera.utils.config import Hyp, TrainConfig, load_hyp
from tessera.utils.evaluation.evaluate import Evaluation
from tessera.utils.ranks.world import World
from tessera.utils.report.console import setup_logging
from tessera.utils.types import Metrics

START = load_hyp("hyp.scratch-low.yaml")
NONE = np.zeros(0, np.int64)
MEASURED = Metrics(0.0, 0.0, 0.0, 0.0, NONE, np.zeros((0, 4)), NONE, NONE, 0, 0, 0.0, np.zeros(0))
NOISE = 0.01


def found(worth: float) -> Evaluation:
    """A validation whose fitness is `worth`."""
    metrics = dataclasses.replace(MEASURED, map50=worth, map=worth)
    return Evaluation(metrics, None, None, None)  # type: ignore[arg-type]


def distance(hyp: Hyp) -> float:
    """From the optimum: twice the learning rate and the box gain of the start."""
    return abs(math.log(hyp.lr0 / START.lr0 / 2)) + abs(math.log(hyp.box / START.box / 2))


def worth(hyp: Hyp, seed: int, slope: float = 0.1) -> float:
    """The best gains 2 × `slope` · log 2 over the start."""
    rng = np.random.default_rng([seed, *(int(value * 1e6) for value in (hyp.lr0, hyp.box, hyp.hsv_s))])
    return 0.5 - slope * distance(hyp) + rng.normal(0, NOISE)


def curve(
    config: TrainConfig,
    hyp: Hyp,
    world: World,
    folder: Path,
    trial: TrialObserver,
    seconds: float = 0.0,
    slope: float = 0.1,
) -> Metrics:
    """A training whose worth grows over its epochs."""
    final = worth(hyp, config.seed, slope)
    for epoch in range(config.epochs):
        time.sleep(seconds)
        (folder / "results.csv").write_text(f"{epoch}\n")
        score = final * (1 - 0.5 ** (epoch + 1))
        trial.validation(epoch, found(score), score)
    assert trial.metrics
    return trial.metrics


def nothing(config: TrainConfig, hyp: Hyp, world: World, folder: Path, trial: TrialObserver) -> Metrics:
    """A training of one epoch that is worth 0."""
    trial.validation(0, found(0.0), 0.0)
    return MEASURED


def search(tmp_path: Path, trials: int, train: Callable[..., Metrics] = nothing, **more: Any) -> Metrics | None:
    return evolve(TrainConfig(evolve=trials, project=str(tmp_path), **more), START, frozenset(), World(), train)


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "evolve.csv").open() as file:
        return list(csv.DictReader(file))


def main(project: str, trials: int, seconds: float) -> None:
    setup_logging(0, 1)
    config = TrainConfig(evolve=trials, epochs=4, project=project, name="shared", exist_ok=True)
    evolve(config, START, frozenset(), World(), partial(curve, seconds=seconds))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
