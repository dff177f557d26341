"""What a search trains next: its trials, then the best of them and the start once more, with other seeds."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tessera.utils.checkpoints.folder import write_yaml
from tessera.utils.config import Hyp, TrainConfig
from tessera.utils.files import write_whole
from tessera.utils.search.folder import BEST, JOURNAL, REPORT, TABLE
from tessera.utils.search.knobs import knobs
from tessera.utils.search.report import Report
from tessera.utils.search.space import hyp_of, ranges
from tessera.utils.search.study import SharedStudy, load_optuna
from tessera.utils.search.table import Row, best_first, rows, write_rows
from tessera.utils.search.verdict import judge
from tessera.utils.search.watch import Watch
from tessera.utils.search.worker import Worker

SETS, SEEDS = 3, 3  # the best sets that are trained again, and how often each
_WAIT_S = 5.0


class Job(NamedTuple):
    """One training.

    Attributes:
        name: of its folder.
        title: for the log.
        hyp, seed: of it.
    """

    name: str
    title: str
    hyp: Hyp
    seed: int


class Plan:
    """The trainings of a search, which this worker takes one by one; rank 0 alone.

    Args:
        folder: of the search.
        config: of the search.
        start: hyperparameters of the first trial; those of the search that is continued count instead.
        worker: this process.

    Raises:
        UserError: Optuna is not installed, or the journal cannot be read.
    """

    def __init__(self, folder: Path, config: TrainConfig, start: Hyp, worker: Worker) -> None:
        self._folder, self._config, self._worker = folder, config, worker
        self._optuna = load_optuna()
        self._trials = self._study = SharedStudy(folder, "trial", "trials", worker, config.epochs)
        self._again: SharedStudy | None = None
        self._sets: list[Row] = []  # that are trained again
        self._trial: Any = None
        with self._trials.turn():
            study = self._trials.study
            if "start" not in study.user_attrs:
                study.set_user_attr("start", start.as_dict())
            self.start = Hyp.from_dict(study.user_attrs["start"], str(folder / JOURNAL))
            self._ranges = ranges(self.start, self._optuna)
            study.enqueue_trial({key: getattr(self.start, key) for key in self._ranges}, skip_if_exists=True)
        self._record()

    def next(self) -> Job | str | None:
        """The next training; what there is to wait for, after a while of waiting; None when the search is over."""
        config = self._config
        self._study = self._trials
        if (trial := self._claim(config.evolve, self._ranges)) is not None:
            hyp = hyp_of(self.start, trial.params)
            return Job(self._study.name_of(trial), f"Trial {trial.number}, of {config.evolve}", hyp, config.seed)
        if running := self._trials.trials("RUNNING"):
            return self._wait(running)
        if not self._begin_again():
            return None
        sets, axes = (
            self._sets,
            {
                "set": self._optuna.distributions.IntDistribution(0, len(self._sets)),
                "seed": self._optuna.distributions.IntDistribution(1, SEEDS),
            },
        )
        if (trial := self._claim(SEEDS * (len(sets) + 1), axes)) is not None:
            number, seed = trial.params["set"], trial.params["seed"]
            which = f"trial {sets[number - 1].number}" if number else "the start"
            hyp = sets[number - 1].hyp if number else self.start
            return Job(self._study.name_of(trial), f"Again {which}, seed {seed}", hyp, (config.seed + seed) % 2**63)
        if running := self._study.trials("RUNNING"):
            return self._wait(running)
        return None

    def report(self, epoch: int, value: float) -> bool:
        """Take in an epoch's value of the training under way; return whether it is to end. Never of the last epoch."""
        prunes = self._study is self._trials and epoch + 1 < self._config.epochs
        return self._study.report(self._trial, epoch, value, prunes=prunes)

    def finish(self, watch: Watch, end: str) -> None:
        """Take in the result of the training under way.

        Args:
            watch: what was seen of it.
            end: as in Row; without a finite value it counts as "diverged".
        """
        value = watch.value if end == "measured" and math.isfinite(watch.value) else None
        end = "diverged" if end == "measured" and value is None else end
        self._study.finish(self._trial, value, {"figures": watch.figures, "end": end})
        self._record()

    def give_back(self) -> None:
        """Leave the training under way to whoever comes next."""
        self._study.give_back(self._trial)

    def conclude(self) -> str:
        """Judge the sets, write the report and the set to use; return it in a line."""
        again = self._study.trials("COMPLETE") if self._sets else []
        standings = judge({(t.params["set"], t.params["seed"]): t.value for t in again}, len(self._sets))
        ended = self._ended()
        report = Report(self._config.objective, ended, self._sets, standings, knobs(ended))
        with self._trials.turn():
            write_yaml(self._folder / BEST, (report.winner.hyp if report.winner else self.start).as_dict())
            write_whole(self._folder / REPORT, report.text().encode())
        return report.summary()

    def _begin_again(self) -> bool:
        """Turn to the trainings with other seeds; whether there are any."""
        if self._again is None:
            self._again = SharedStudy(
                self._folder, "again", f"the best of {self._config.evolve}", self._worker, self._config.epochs
            )
            with self._again.turn():
                study, best = self._again.study, [row.number for row in self._best()]
                if "sets" not in study.user_attrs:
                    study.set_user_attr("sets", best)
                numbers = study.user_attrs["sets"]
                for seed, number in itertools.product(range(1, SEEDS + 1), range(len(numbers) + 1)):
                    study.enqueue_trial({"set": number, "seed": seed}, skip_if_exists=True)
            self._sets = [row for number in numbers for row in self._ended() if row.number == number]
        self._study = self._again
        return bool(self._sets)

    def _claim(self, budget: int, axes: Mapping[str, Any]) -> Any | None:
        self._trial = self._study.claim(budget, axes, self._config.seed)
        return self._trial

    def _wait(self, running: list[Any]) -> str:
        time.sleep(_WAIT_S)
        return f"Waiting for {len(running)} training(s) of other workers"

    def _ended(self) -> list[Row]:
        return rows(self._trials.trials("COMPLETE", "PRUNED"), self.start)

    def _best(self) -> list[Row]:
        """The best sets that are not the start."""
        return [row for row in best_first(self._ended()) if row.hyp != self.start][:SETS]

    def _record(self) -> None:
        """Write the table and the best set so far; while sets are trained again there is nothing new in them."""
        with self._trials.turn():
            ended = self._ended()
            write_rows(self._folder / TABLE, ended)
            if best := best_first(ended):
                write_yaml(self._folder / BEST, best[0].hyp.as_dict())
