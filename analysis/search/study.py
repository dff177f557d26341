"""Optuna study in the journal of a search, shared by workers on any number of hosts.

Workers access the journal in turn, and each locks the run directory of its trial. The system releases both locks of a
killed worker, whose trial another worker then claims.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tessera.analysis.search.search_directory import BEST, JOURNAL, turn
from tessera.utils.errors import UserError, warn_on_error
from tessera.utils.files import no_link
from tessera.utils.machine.optional_packages import import_extra
from tessera.utils.ranks.run_lock import RunLock
from tessera.utils.seeding import sample_rng
from tessera.utils.text import one_line

log = logging.getLogger(__name__)

_MOST_FAILURES = 3  # of one training


def load_optuna() -> Any:
    """Import Optuna with log level WARNING; raise MissingExtra if it is not installed."""
    optuna = import_extra("optuna", "tune", "--evolve")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    return optuna


class SharedStudy:
    """A study in the journal of a search; raises UserError if that cannot be read.

    A trial's run directory is `label` and its number. `trial` is the current one of this worker; None before the first.
    """

    def __init__(self, optuna: Any, folder: Path, label: str, name: str, epochs: int) -> None:
        self._optuna, self._folder, self._label = optuna, folder, label
        # No pruning in the first third of a training, at least three epochs.
        pruner = optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=max(3, epochs // 3))
        with self.turn():
            # Any lock does, as every write is in a turn. Optuna's lock file would outlive a killed worker.
            backend = optuna.storages.journal.JournalFileBackend(str(folder / JOURNAL), lock_obj=threading.Lock())
            self.study = optuna.create_study(
                storage=optuna.storages.JournalStorage(backend),
                study_name=name,
                direction="maximize",
                load_if_exists=True,
                pruner=pruner,
            )
        self.trial: Any = None
        self._lock: RunLock | None = None  # on the trial's run directory

    @property
    def run(self) -> Path:
        """Run directory of the current trial."""
        return self._folder / f"{self._label}{self.trial.number}"

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Access the journal exclusively, with a torn last line removed."""
        with turn(self._folder), _readable(self._folder / JOURNAL):
            _mend(self._folder / JOURNAL)
            yield

    def trials(self, *states: str) -> list[Any]:
        """Return the trials in the given states ("COMPLETE", "PRUNED", "RUNNING"), by number."""
        wanted = tuple(self._optuna.trial.TrialState[state] for state in states)
        return list(self.study.get_trials(deepcopy=False, states=wanted))

    def claim(self, budget: int, ranges: Mapping[str, Any], seed: int) -> Any | None:
        """Return a trial with parameters, first an unfinished one of a stopped worker; None if `budget` is used up."""
        with self.turn():
            left = next((trial for trial in self.trials("RUNNING") if self._hold(trial.number)), None)
            number = left.number if left else len(self.trials("RUNNING", "COMPLETE", "PRUNED"))
            if left is None and number >= budget:
                return None
            self.study.sampler = self._optuna.samplers.TPESampler(
                multivariate=True, constant_liar=True, seed=int(sample_rng(seed, number, 0, "evolve").integers(2**32))
            )
            if left:
                log.warning(f"Trial {number} was left unfinished by a worker. It is trained again from its start.")
                self.trial = self._optuna.trial.Trial(self.study, left._trial_id)
            else:
                self.trial = self.study.ask()
                self._hold(self.trial.number)
            for name, axis in ranges.items():
                is_whole = isinstance(axis, self._optuna.distributions.IntDistribution)
                suggest = self.trial.suggest_int if is_whole else self.trial.suggest_float
                suggest(name, axis.low, axis.high, log=axis.log)
            self.trial.set_user_attr("worker", f"{socket.gethostname()}-{os.getpid()}")
            return self.trial

    def report(self, epoch: int, value: float, *, prunes: bool) -> bool:
        """Report the value of an epoch; return whether the training must end."""
        with self.turn():
            stored = self._stored()
            if stored.state.is_finished():
                log.warning(f"Trial {self.trial.number} was finished by another worker. It ends here.")
                return True
            last = max(stored.intermediate_values, default=-1)  # perhaps of an earlier worker
            if epoch > last:
                self.trial.report(value, epoch)
            return prunes and epoch >= last and bool(self.trial.should_prune())

    def finish(self, value: float | None, attributes: Mapping[str, Any]) -> None:
        """Record the trial as complete, or without a value as pruned, unless another worker has finished it."""
        with self.turn():
            if not self._stored().state.is_finished():
                for key, attribute in attributes.items():
                    self.trial.set_user_attr(key, attribute)
                state = self._optuna.trial.TrialState["PRUNED" if value is None else "COMPLETE"]
                self.study.tell(self.trial, value, state=state)

    def fail(self) -> None:
        """Count a failure of the trial, which is trained again; the third one records it as diverged."""
        failures = self.trial.user_attrs.get("failures", 0) + 1
        if failures == _MOST_FAILURES:
            log.warning(f"Trial {self.trial.number} has failed {failures} times. It counts as diverged.")
            self.finish(None, {"end": "diverged"})
            return
        with self.turn():
            if not self._stored().state.is_finished():
                self.trial.set_user_attr("failures", failures)

    def release(self) -> None:
        """Remove the run directory and its lock; another worker may then claim an unfinished trial."""
        if self._lock is None:
            return
        with warn_on_error(f"removing {self._lock.run}"):  # network disks may keep files open
            shutil.rmtree(self._lock.run)
        self._lock.__exit__()
        self._lock = None

    def _stored(self) -> Any:
        """Return the current trial as stored in the journal."""
        return self.study.get_trials(deepcopy=False)[self.trial.number]

    def _hold(self, number: int) -> bool:
        """Lock a trial's run directory; return False if another worker has the lock."""
        lock = RunLock(self._folder / f"{self._label}{number}")
        if lock.take() is None:
            self._lock = lock
        return self._lock is lock


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn errors of Optuna, which does not validate its journal, into a UserError."""
    try:
        yield
    except (OSError, UserError):
        raise
    except Exception as error:
        raise UserError(
            f"{path}: not a journal of a search, or damaged ({one_line(f'{type(error).__name__}: {error}', 120)}). "
            f"Start another search with another --name, from the best set with --hyp {path.with_name(BEST)}."
        ) from error


def _mend(path: Path) -> None:
    """Remove a last line that a full disk or a power cut has torn."""
    with open(path, "r+b", opener=no_link) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 1, 0))
        if file.read() in (b"", b"\n"):
            return
        log.warning(f"{path}: removed an incomplete last line.")
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
