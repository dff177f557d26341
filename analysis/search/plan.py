"""Order of trainings in a search: its trials, then the best sets and the start again with other seeds."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tessera.analysis.search.report import Report, Row, best_first, write_rows
from tessera.analysis.search.search_directory import BEST, JOURNAL, REPORT, TABLE
from tessera.analysis.search.space import hyp_of, ranges
from tessera.analysis.search.study import SharedStudy, load_optuna
from tessera.analysis.search.trial import TrialObserver
from tessera.analysis.search.verdict import SEEDS, judge
from tessera.utils.checkpoints.run_directory import write_yaml
from tessera.utils.config import Hyp, TrainConfig
from tessera.utils.files import write_whole
from tessera.utils.text import plural

SETS = 3  # best sets, which are trained again
_WAIT_S = 5.0


class Job(NamedTuple):
    """One training."""

    title: str  # for the log
    run: Path  # its run directory, which is locked
    hyp: Hyp
    seed: int


def _repetitions(sets: int) -> int:
    """Return the number of trainings that repeat the start and the best sets."""
    return SEEDS * (sets + 1) if sets else 0


def _wait(running: Sequence[Any]) -> str:
    time.sleep(_WAIT_S)
    return f"Waiting for {plural(len(running), 'training')} of other workers"


class Plan:
    """Trainings of a search for this worker; a context manager that only rank 0 enters.

    Leaving it releases an unfinished training for another worker. `start` is the first trial of a new search, which
    does not vary the hyperparameters `unread`.

    Attributes:
        study: Optuna study of the current training.
    """

    def __init__(self, folder: Path, config: TrainConfig, start: Hyp, unread: frozenset[str]) -> None:
        self._folder, self._config, self._start, self._unread = folder, config, start, unread
        self._again: SharedStudy | None = None
        self._sets: list[Row] = []  # sets that are trained again

    def __enter__(self) -> None:
        """Open the journal; raise UserError without Optuna, or if it cannot be read."""
        self._optuna = load_optuna()
        self._trials = self.study = self._shared("trial", "trials")
        with self._trials.turn():
            study = self._trials.study
            if "start" not in study.user_attrs:
                study.set_user_attr("unread", sorted(self._unread))
                study.set_user_attr("start", self._start.as_dict())
            self._start = Hyp.from_dict(study.user_attrs["start"], str(self._folder / JOURNAL))
            self._ranges = ranges(self._start, study.user_attrs.get("unread", ()), self._optuna)
            study.enqueue_trial({key: getattr(self._start, key) for key in self._ranges}, skip_if_exists=True)
        self._record()

    def __exit__(self, *error: object) -> None:
        self.study.release()

    def describe(self) -> str:
        """Return the number and the length of the trainings, and what they vary."""
        config, ended = self._config, len(self._ended())
        sets, again = min(SETS, config.evolve - 1), ""
        if sets:
            again = f"; then the best {plural(sets, 'set')} and the start, each with {SEEDS} other seeds"
        trials = f"{plural(config.evolve, 'trial')}, the first with the start ({ended:,} done)"
        most = plural(config.evolve + _repetitions(sets), "training")
        return (
            f"Search: {trials}{again}: at most {most} of {plural(config.epochs, 'epoch')}.\n"
            f"Varied: {', '.join(self._ranges) or 'nothing'}. The others are 0, optional and at their default, or not "
            "read by this model, recipe or dataset."
        )

    def most_left(self) -> int:
        """Return how many trainings are left at most."""
        trials = max(self._config.evolve - len(self._ended()), 0)
        if self._again is None:
            return trials + _repetitions(min(SETS, self._config.evolve - 1))
        return trials + _repetitions(len(self._sets)) - len(self._again.trials("COMPLETE", "PRUNED"))

    def next(self) -> Job | str | None:
        """Return the next training; after a wait for other workers a message; None when the search is over."""
        config = self._config
        if trial := self._claim(self._trials, config.evolve, self._ranges):
            title = f"Trial {trial.number} of {config.evolve}"
            return Job(title, self.study.run, hyp_of(self._start, trial.params), config.seed)
        if running := self._trials.trials("RUNNING"):
            return _wait(running)
        again, whole = self._best_again(), self._optuna.distributions.IntDistribution
        axes = {"set": whole(0, len(self._sets)), "seed": whole(1, SEEDS)}
        if trial := self._claim(again, _repetitions(len(self._sets)), axes):
            number, seed = trial.params["set"], trial.params["seed"]
            name = f"trial {self._sets[number - 1].number}" if number else "the start"
            hyp = self._sets[number - 1].hyp if number else self._start
            return Job(f"Repeat {name} with seed {seed}", again.run, hyp, (config.seed + seed) % 2**63)
        running = again.trials("RUNNING")
        return _wait(running) if running else None

    def report(self, epoch: int, value: float) -> bool:
        """Report an epoch's value of the current training; return whether it is pruned, never at the last epoch."""
        prunes = self.study is self._trials and epoch + 1 < self._config.epochs
        return self.study.report(epoch, value, prunes=prunes)

    def finish(self, watch: TrialObserver, end: str) -> None:
        """Record the current training; `end` is as in Row, and "diverged" without a finite value."""
        value = watch.value if end == "measured" and math.isfinite(watch.value) else None
        end = "diverged" if end == "measured" and value is None else end
        self.study.finish(value, {"figures": watch.figures, "end": end})
        self._record()
        self.study.release()

    def conclude(self) -> str:
        """Compare the sets, write the report and the best set; return the verdict."""
        again = self._best_again().trials("COMPLETE")
        standings = judge({(t.params["set"], t.params["seed"]): t.value for t in again}, len(self._sets))
        report = Report(self._config.metric, self._ended(), self._sets, standings)
        with self._trials.turn():
            write_yaml(self._folder / BEST, (report.winner.hyp if report.winner else self._start).as_dict())
            write_whole(self._folder / REPORT, report.text().encode())
        return report.summary()

    def _shared(self, label: str, name: str) -> SharedStudy:
        return SharedStudy(self._optuna, self._folder, label, name, self._config.epochs)

    def _best_again(self) -> SharedStudy:
        """Return the study that repeats the start and the best sets with other seeds."""
        if self._again is None:
            self._again = self._shared("again", f"the best of {self._config.evolve}")
            with self._again.turn():
                study, ended = self._again.study, {row.number: row for row in self._ended()}
                if "sets" not in study.user_attrs:
                    best = [row.number for row in best_first(ended.values()) if row.hyp != self._start]
                    study.set_user_attr("sets", best[:SETS])
                self._sets = [ended[number] for number in study.user_attrs["sets"]]
                for seed, number in itertools.product(range(1, SEEDS + 1), range(len(self._sets) + 1)):
                    study.enqueue_trial({"set": number, "seed": seed}, skip_if_exists=True)
        return self._again

    def _claim(self, study: SharedStudy, budget: int, axes: Mapping[str, Any]) -> Any | None:
        self.study = study
        return study.claim(budget, axes, self._config.seed)

    def _ended(self) -> list[Row]:
        trials = self._trials.trials("COMPLETE", "PRUNED")
        return [Row.of(trial, hyp_of(self._start, trial.params)) for trial in trials]

    def _record(self) -> None:
        """Write the table of trials and the best set so far."""
        with self._trials.turn():
            if ended := self._ended():
                write_rows(self._folder / TABLE, ended)
            if best := best_first(ended):
                write_yaml(self._folder / BEST, best[0].hyp.as_dict())
