"""Which hyperparameters decided how good the trials of a search were."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import numpy as np

FEWEST = 10  # finished trials
_SHUFFLES = 50
_CHANCE = 0.95


class Knob(NamedTuple):
    """A hyperparameter that mattered.

    Attributes:
        name: of it.
        share: of the importance of all hyperparameters.
    """

    name: str
    share: float


def knobs(study: Any, optuna: Any) -> list[Knob] | None:
    """The hyperparameters that mattered, most first: Optuna's PED-ANOVA (Watanabe et al. 2023), beyond chance.

    That measures something of every hyperparameter. So it is measured again with the values dealt out to other trials:
    what is not above the highest that any has in 95 % of these shuffles is chance. None with too few trials.
    """
    trials = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
    if len(trials) < FEWEST:
        return None
    values = np.array([trial.value for trial in trials])
    rng = np.random.default_rng(0)

    def importances(shuffled: np.ndarray) -> dict[str, float]:
        worth = {trial.number: -value for trial, value in zip(trials, shuffled.tolist(), strict=True)}
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        return dict(evaluator.evaluate(study, target=lambda trial: worth[trial.number]))  # the lower, the better

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a target of our own
        found = importances(values)
        chance = [max(importances(rng.permutation(values)).values()) for _ in range(_SHUFFLES)]
    bound, total = np.quantile(chance, _CHANCE), sum(found.values())
    mattered = [Knob(name, value / total) for name, value in found.items() if value > bound]
    return sorted(mattered, key=lambda knob: -knob.share)
