"""Trials that workers on any number of hosts share: an Optuna study in the journal of a search.

Optuna has the samplers, the pruner and the format of the journal. Here is who takes which trial: all that is decided
is decided in turns, under one lock, which the system takes from a worker that is killed.
"""

from __future__ import annotations

import logging
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tessera.utils.errors import UserError, tolerate
from tessera.utils.machine.extras import import_extra
from tessera.utils.search.folder import BEST, JOURNAL, turn
from tessera.utils.search.worker import Worker
from tessera.utils.seeding import sample_rng
from tessera.utils.text import one_line

log = logging.getLogger(__name__)

_MOST_FAILURES = 3  # of one training


def load_optuna() -> Any:
    """Optuna, silent but for warnings.

    Raises:
        MissingExtra: it is not installed.
    """
    optuna = import_extra("optuna", "tune", "--evolve")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    return optuna


class SharedStudy:
    """A study of the journal in the folder of a search.

    Args:
        optuna: the module.
        folder: of the search.
        label: of its trials; with the number of one the name of the folder it is trained in.
        name: of the study in the journal.
        worker: this process.
        epochs: of a training; decides from when on it is compared with the others.

    Raises:
        UserError: the journal cannot be read.
    """

    def __init__(self, optuna: Any, folder: Path, label: str, name: str, worker: Worker, epochs: int) -> None:
        self._optuna, self._folder, self._label, self._worker = optuna, folder, label, worker
        # A third of the training, and at least three epochs, are too early to tell.
        pruner = optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=max(3, epochs // 3))
        with self.turn():
            backend = optuna.storages.journal.JournalFileBackend(str(folder / JOURNAL), lock_obj=_InTurn())
            storage = optuna.storages.JournalStorage(backend)
            self.study = optuna.create_study(
                storage=storage, study_name=name, direction="maximize", load_if_exists=True, pruner=pruner
            )

    @contextmanager
    def turn(self) -> Iterator[None]:
        """While inside, no other worker decides or writes anything."""
        with turn(self._folder), _readable(self._folder / JOURNAL):
            _mend(self._folder / JOURNAL)
            yield

    def name_of(self, trial: Any) -> str:
        """Of the folder that a trial is trained in."""
        return f"{self._label}{trial.number}"

    def trials(self, *states: str) -> list[Any]:
        """The trials in some of Optuna's states ("COMPLETE", "PRUNED", "RUNNING"), or in any, by number."""
        wanted = tuple(self._optuna.trial.TrialState[state] for state in states)
        return list(self.study.get_trials(deepcopy=False, states=wanted or None))

    def claim(self, budget: int, ranges: Mapping[str, Any], seed: int) -> Any | None:
        """A trial for this worker, with values; None where `budget` trials are done, or are with other workers.

        What a worker has left behind that is gone comes first.
        """
        with self.turn():
            for trial in self.trials("RUNNING"):
                worker = trial.user_attrs.get("worker")
                if worker is None or self._worker.is_gone(worker):  # None: it was killed in this turn
                    log.warning(f"Trial {trial.number} was left by a worker that is gone; it is done again.")
                    self._queue_again(trial)
            number = len(self.trials("RUNNING", "COMPLETE", "PRUNED"))
            if number >= budget:
                return None
            # By what is not done again: a search that was stopped samples what an undisturbed one would have.
            self.study.sampler = self._optuna.samplers.TPESampler(
                multivariate=True, constant_liar=True, seed=int(sample_rng(seed, number, 0, "evolve").integers(2**32))
            )
            trial = self.study.ask(dict(ranges))
            trial.set_user_attr("worker", self._worker.name)
            return trial

    def report(self, trial: Any, epoch: int, value: float, *, prunes: bool) -> bool:
        """Take in the value of an epoch; return whether the training is to end here."""
        with self.turn():
            if not self._is_running(trial):
                log.warning(f"Trial {trial.number}: others took this worker for gone, and do it again; it ends here.")
                return True
            trial.report(value, epoch)
            return prunes and bool(trial.should_prune())

    def finish(self, trial: Any, value: float | None, attributes: Mapping[str, Any]) -> None:
        """End a trial, with its value or as one that was pruned; not where others do it again meanwhile."""
        with self.turn():
            if self._is_running(trial):
                for key, attribute in attributes.items():
                    trial.set_user_attr(key, attribute)
                state = self._optuna.trial.TrialState["PRUNED" if value is None else "COMPLETE"]
                self.study.tell(trial, value, state=state)
        self._remove_files(trial)

    def give_back(self, trial: Any, *, failed: bool) -> None:
        """Leave a trial to whoever comes next; one that has `failed` for the third time ends, as diverged."""
        if failed and trial.user_attrs.get("failures", 0) + 1 == _MOST_FAILURES:
            log.warning(f"Trial {trial.number} has failed {_MOST_FAILURES} times: it counts as diverged from now on.")
            self.finish(trial, None, {"end": "diverged"})
            return
        with self.turn():
            if self._is_running(trial):
                self._queue_again(trial, failed=failed)

    def _is_running(self, trial: Any) -> bool:
        return trial.number in {other.number for other in self.trials("RUNNING")}

    def _queue_again(self, trial: Any, *, failed: bool = False) -> None:
        """Queue a copy of a trial, then end it: whoever is killed between the two leaves it for another turn."""
        trials = self.trials()
        left = trials[trial.number]
        if left.number not in {other.user_attrs.get("copy_of") for other in trials}:
            values = {**left.params, **left.system_attrs.get("fixed_params", {})}  # it may have been killed in between
            failures = left.user_attrs.get("failures", 0) + failed
            changed = {"copy_of": left.number, "failures": failures, "worker": None}
            self.study.enqueue_trial(values, user_attrs={**left.user_attrs, **changed})
        self.study.tell(left.number, state=self._optuna.trial.TrialState.FAIL)
        self._remove_files(trial)

    def _remove_files(self, trial: Any) -> None:
        """Nothing stays of a training; what a network's disk holds on to does not end a search."""
        folder = self._folder / self.name_of(trial)
        if folder.is_dir():
            with tolerate(f"removing {folder}"):
                shutil.rmtree(folder)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Whatever Optuna meets that trusts its journal is the user's error."""
    try:
        yield
    except (OSError, UserError):
        raise
    except Exception as error:
        raise UserError(
            f"{path}: not a journal that a search has written, or damaged "
            f"({one_line(f'{type(error).__name__}: {error}', 120)}). Begin another search, under another --name; "
            f"--hyp {path.with_name(BEST)} begins it with the best set so far."
        ) from error


class _InTurn:
    """Optuna's lock on its journal: every write is inside a turn, so there is nothing left to wait for."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        return None


def _mend(path: Path) -> None:
    """Remove a last line that a full disk or a power cut has torn, before another is written behind it."""
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 1, 0))
        if file.read() in (b"", b"\n"):
            return
        log.warning(f"{path}: its last line is torn, and removed.")
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
