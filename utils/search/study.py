"""Trials that workers on any number of hosts share: an Optuna study in the journal of a search.

Optuna has the samplers, the pruner and the format of the journal. Here is who takes which trial: workers take turns,
and each holds the lock on the run directory of its trial. The system takes both locks from a worker that is killed.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tessera.utils.errors import UserError, tolerate
from tessera.utils.machine.optional_packages import import_extra
from tessera.utils.ranks.run_lock import RunLock
from tessera.utils.search.search_directory import BEST, JOURNAL, turn
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
        epochs: of a training.

    Attributes:
        trial: the one that this worker trains; None before the first.

    Raises:
        UserError: the journal cannot be read.
    """

    def __init__(self, optuna: Any, folder: Path, label: str, name: str, epochs: int) -> None:
        self._optuna, self._folder, self._label = optuna, folder, label
        # A third of the training, and at least three epochs, are too early to tell.
        pruner = optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=max(3, epochs // 3))
        with self.turn():
            backend = optuna.storages.journal.JournalFileBackend(str(folder / JOURNAL), lock_obj=_InTurn())
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
        """Run directory of the trial."""
        return self._folder / f"{self._label}{self.trial.number}"

    @contextmanager
    def turn(self) -> Iterator[None]:
        """While inside, no other worker decides or writes anything."""
        with turn(self._folder), _readable(self._folder / JOURNAL):
            _mend(self._folder / JOURNAL)
            yield

    def trials(self, *states: str) -> list[Any]:
        """The trials in some of Optuna's states ("COMPLETE", "PRUNED", "RUNNING"), by number."""
        wanted = tuple(self._optuna.trial.TrialState[state] for state in states)
        return list(self.study.get_trials(deepcopy=False, states=wanted))

    def claim(self, budget: int, ranges: Mapping[str, Any], seed: int) -> Any | None:
        """A trial for this worker, with values; None where `budget` trials are done, or are with other workers.

        One that was left unfinished comes first: by a worker that was stopped, or killed at whatever it did.
        """
        with self.turn():
            left = next((trial for trial in self.trials("RUNNING") if self._hold(trial.number)), None)
            number = left.number if left else len(self.trials("RUNNING", "COMPLETE", "PRUNED"))
            if left is None and number >= budget:
                return None
            self.study.sampler = self._optuna.samplers.TPESampler(
                multivariate=True, constant_liar=True, seed=int(sample_rng(seed, number, 0, "evolve").integers(2**32))
            )
            if left:
                log.warning(f"Trial {number} was left unfinished; it is trained again, from its beginning.")
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
        """Take in the value of an epoch; return whether the training is to end here."""
        with self.turn():
            known = self._frozen()
            if known.state.is_finished():
                log.warning(f"Trial {self.trial.number}: another worker has taken it over; it ends here.")
                return True
            seen = max(known.intermediate_values, default=-1)  # of a worker that left it
            if epoch > seen:
                self.trial.report(value, epoch)
            return prunes and epoch >= seen and bool(self.trial.should_prune())

    def finish(self, value: float | None, attributes: Mapping[str, Any]) -> None:
        """End the trial, with its value or as one that was pruned; not where another worker has done so."""
        with self.turn():
            if not self._frozen().state.is_finished():
                for key, attribute in attributes.items():
                    self.trial.set_user_attr(key, attribute)
                state = self._optuna.trial.TrialState["PRUNED" if value is None else "COMPLETE"]
                self.study.tell(self.trial, value, state=state)

    def fail(self) -> None:
        """Count a failure of the trial, which whoever comes next trains again; the third one ends it, as diverged."""
        failures = self.trial.user_attrs.get("failures", 0) + 1
        if failures == _MOST_FAILURES:
            log.warning(f"Trial {self.trial.number} has failed {failures} times: it counts as diverged from now on.")
            self.finish(None, {"end": "diverged"})
            return
        with self.turn():
            if not self._frozen().state.is_finished():
                self.trial.set_user_attr("failures", failures)

    def release(self) -> None:
        """Remove the run directory and its lock: a trial that has not ended is left to whoever comes next."""
        if self._lock is None:
            return
        with tolerate(f"removing {self._lock.run}"):  # what a network's disk holds on to does not end a search
            shutil.rmtree(self._lock.run)
        self._lock.__exit__()
        self._lock = None

    def _frozen(self) -> Any:
        """The trial as the journal has it now."""
        return self.study.get_trials(deepcopy=False)[self.trial.number]

    def _hold(self, number: int) -> bool:
        """Take the lock on a trial's run directory; False where a worker has it."""
        lock = RunLock(self._folder / f"{self._label}{number}")
        if lock.take() is None:
            self._lock = lock
        return self._lock is lock


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
    """Optuna's lock on its journal: every write is in a turn, and a lock file would outlive a killed worker."""

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
