"""Hyperparameter search (`--evolve`): trainings with hyperparameters from Optuna, then repetitions of the best.

Any number of workers share the journal of a search. They access it in turn, and each locks the run directory of its
trial. The system releases both locks of a killed worker, whose trial the next free one trains again.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import os
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tessera.analysis.search_report import BEST, SEEDS, judge, page, verdict, write_table
from tessera.models.heads.criterion import LOSS_HYPS
from tessera.models.heads.head import Head
from tessera.utils.checkpoints.run_directory import new_run, write_flags, write_yaml
from tessera.utils.config import RENAMED, Hyp, TrainConfig, given_hyp
from tessera.utils.engine.optimizer import Schedule
from tessera.utils.engine.recipe import UNKNOWN_BATCH
from tessera.utils.errors import Diverged, Interrupted, UserError, warn_on_error
from tessera.utils.evaluation.evaluate import Evaluation
from tessera.utils.files import absolute_path, locked, write_whole
from tessera.utils.machine.optional_packages import import_extra
from tessera.utils.ranks.run_lock import RunLock
from tessera.utils.ranks.world import World
from tessera.utils.report.console import TrainingResult
from tessera.utils.report.observers import Observer
from tessera.utils.seeding import sample_rng
from tessera.utils.text import one_line, plural, shown
from tessera.utils.training.setup import resolve
from tessera.utils.types import DatasetIndex, Metrics
from tessera.utils.yaml_file import read_yaml

T = TypeVar("T")
log = logging.getLogger(__name__)

JOURNAL, TABLE, FLAGS, REPORT = "journal.log", "evolve.csv", "opt.yaml", "search.md"  # the first is Optuna's
SETS = 3  # best sets, which are trained again
FACTOR = 2.0  # the range of a value is its start divided and multiplied by this, on a logarithmic scale
_ENDED = ("COMPLETE", "PRUNED")  # states of a trial
_MOST_FAILURES = 3  # of one training
_WAIT_S = 5.0
# Flags of each training, which leaves no files.
_TRIAL_FLAGS: dict[str, Any] = {"evolve": 0, "resume": ""}
_TRIAL_FLAGS |= {"nosave": True, "noplots": True, "loggers": "none"}
# Flags without effect on the result of a training, which may change between trainings of a search.
_FREE = frozenset(
    {
        *("evolve", "resume", "hyp", "project", "name", "exist_ok", "nosave", "noplots", "noreport", "loggers"),
        *("device", "workers", "cache", "local_rank", "profile", "compile"),
    }
)
_MOMENTA = frozenset({"momentum", "warmup_momentum"})  # for these the distance to 1 is scaled
_SCHEDULED = (  # read through `Schedule` or the number of epochs without mosaic alone
    *("warmup_epochs", "warmup_min_batches", "warmup_fraction", "warmup_max_fraction"),
    *("lrf", "flat_fraction", "cosine", "close_mosaic"),
)
# Without effect on a training, choices of the model or of its trained part, and texts.
_FIXED = frozenset({"iou_t", "anchors", "frozen_layers", "fixed_norms", "optimizer", "class_weights"})


class Pruned(Exception):
    """The end of a pruned training, on every rank."""


class TrialObserver(Observer):
    """Observer of the validations of one training.

    Attributes:
        metrics, value: of the last validation, and the value of `--metric`.
    """

    every_rank = True

    def __init__(self, world: World, report: Callable[[int, float], bool]) -> None:
        """`report` takes an epoch and its value on rank 0, and returns whether the training ends."""
        self._world, self._report = world, report
        self.metrics: Metrics | None = None
        self.value = math.nan

    def validation(self, epoch: int, evaluation: Evaluation, score: float) -> None:
        """Report the validation of an epoch.

        Raises:
            Pruned: on every rank, if the search ends the training.
        """
        self.metrics, self.value = evaluation.metrics, score
        if self._world.run_on_main(lambda: self._report(epoch, score)):
            raise Pruned


# ----------------------------------------------------------------------------------------------------- the search


def evolve(flags: TrainConfig, world: World, train: Callable[..., TrainingResult]) -> TrainingResult:
    """Run `--evolve N`: N trainings, some pruned, then repetitions of the best; every rank calls this.

    The ranks of a job are one worker; other jobs may work on the same search. hyp_evolved.yaml has the best
    hyperparameters so far, and at the end those that are significantly better than the start, or the start.
    `train` runs one training of flags, hyperparameters, world, folder and trial; its last result here is returned.
    """
    result = run_search(*start_of_search(flags, world), world, train) or TrainingResult()
    return dataclasses.replace(result, run=result.run and result.run.parent)


def start_of_search(flags: TrainConfig, world: World) -> tuple[TrainConfig, Hyp, frozenset[str]]:
    """Return flags and hyperparameters for the first training, and those hyperparameters that none reads."""
    given_hyp(flags.hyp)  # names its errors before the dataset is read
    recipe = resolve(flags, None, world)
    config, data = dataclasses.replace(recipe.config, freeze=flags.freeze), recipe.data
    return config, recipe.hyp, unread_keys(recipe.hyp, config, recipe.head, data.train, data.images_per_epoch)


def run_search(
    config: TrainConfig, start: Hyp, unread: frozenset[str], world: World, train: Callable[..., T]
) -> T | None:
    """Run the trainings; a new search does not vary the hyperparameters `unread`."""
    folder = open_directory(config, world)
    search, result = Search(folder, config), None
    try:
        log.info(world.run_on_main(lambda: search.open(start, unread)))
        while training := _next(search, world):
            log.info(training.title)
            own: dict[str, Any] = {"project": str(folder), "name": training.folder.name, "seed": training.seed}
            watch = TrialObserver(world, search.report)
            with _recording(search, watch, world):
                flags = dataclasses.replace(config, **_TRIAL_FLAGS, **own)
                result = train(flags, training.hyp, world, folder=training.folder, trial=watch)
        log.info(world.run_on_main(search.conclude))
    finally:
        search.release()
    return result


class NextTraining(NamedTuple):
    """The next training of a worker, whose run directory is locked."""

    title: str  # for the log
    folder: Path
    hyp: Hyp
    seed: int


def _next(search: Search, world: World) -> NextTraining | None:
    """Wait for the next training; return None when the search is over."""
    logged = ""
    while isinstance(training := world.run_on_main(search.next), str):
        if training != logged:
            log.info(training)
        logged = training
    return training


@contextmanager
def _recording(search: Search, watch: TrialObserver, world: World) -> Iterator[None]:
    """Write the result of a training to the journal; leave an interrupted one to another worker."""
    end = "measured"
    try:
        yield
    except Pruned:
        end = "pruned"
        log.info("Pruned: other trials were better at this epoch.")
    except Diverged as error:
        end = "diverged"
        log.warning(f"The trial diverged, and counts as the worst: {error}")
    except Interrupted as error:
        message = f"Stopped by a signal. Continue the search with the same command and --resume {search.folder}"
        raise Interrupted(message, error.exit_code - 128, saved=error.saved, reporter=error.reporter) from error
    except Exception:
        if world.is_main:
            with warn_on_error("recording the failure"):
                search.fail()
        raise
    world.run_on_main(lambda: search.finish(watch, end))


class Search:
    """Trainings of a search for this worker, in an Optuna journal; only rank 0 opens it.

    A journal that cannot be read or written is a UserError.
    """

    def __init__(self, folder: Path, config: TrainConfig) -> None:
        self.folder, self._config = folder, config
        self._again: Any = None  # study of the repetitions
        self._sets: list[Any] = []  # trials whose sets are trained again
        self._lock: RunLock | None = None  # on the run directory of the current trial

    def open(self, start: Hyp, unread: frozenset[str]) -> str:
        """Open the journal, where the first worker writes the start and what is varied; return the plan in words."""
        self._optuna = load_optuna()
        self._trials = self._shared("trials")
        with turn(self.folder):
            attributes = self._trials.user_attrs
            if "start" not in attributes:
                self._trials.set_user_attr("unread", sorted(unread))
                self._trials.set_user_attr("start", start.as_dict())
                attributes = self._trials.user_attrs
            self._start = Hyp.from_dict(attributes["start"], str(self.folder / JOURNAL))
            self._ranges = ranges(self._start, attributes.get("unread", ()), self._optuna)
            self._trials.enqueue_trial({key: getattr(self._start, key) for key in self._ranges}, skip_if_exists=True)
            self._record()
            done = len(self._in_state(self._trials, *_ENDED))
        config, again = self._config, ""
        sets = min(SETS, config.evolve - 1)
        if sets:
            again = f"; then the best {plural(sets, 'set')} and the start, each with {SEEDS} other seeds"
        trials = f"{plural(config.evolve, 'trial')}, the first with the start ({done:,} done)"
        most = plural(config.evolve + (SEEDS * (sets + 1) if sets else 0), "training")
        return (
            f"Search: {trials}{again}: at most {most} of {plural(config.epochs, 'epoch')}.\n"
            f"Varied: {', '.join(self._ranges) or 'nothing'}. The others are 0, optional and at their default, or not "
            "read by this model, recipe or dataset."
        )

    def next(self) -> NextTraining | str | None:
        """Return the next training; after a wait for other workers a message; None when the search is over."""
        config = self._config
        if lock := self._claim(self._trials, "trial", config.evolve, self._ranges):
            title = f"Trial {self._trial.number} of {config.evolve}"
            return NextTraining(title, lock.run, hyp_of(self._start, self._trial.params), config.seed)
        running = self._in_state(self._trials, "RUNNING")
        if not running:
            again, whole = self._repetitions(), self._optuna.distributions.IntDistribution
            axes = {"set": whole(0, len(self._sets)), "seed": whole(1, SEEDS)}
            budget = SEEDS * (len(self._sets) + 1) if self._sets else 0
            if lock := self._claim(again, "again", budget, axes):
                number, seed = self._trial.params["set"], self._trial.params["seed"]
                repeated = self._sets[number - 1] if number else None
                title = f"Repeat {f'trial {repeated.number}' if repeated else 'the start'} with seed {seed}"
                hyp = hyp_of(self._start, repeated.params if repeated else {})
                return NextTraining(title, lock.run, hyp, (config.seed + seed) % 2**63)
            running = self._in_state(again, "RUNNING")
        if not running:
            return None
        time.sleep(_WAIT_S)
        return f"Waiting for {plural(len(running), 'training')} of other workers"

    def report(self, epoch: int, value: float) -> bool:
        """Report an epoch's value of the current training; return whether it is pruned, never at the last epoch."""
        with turn(self.folder):
            stored = self._study.get_trials(deepcopy=False)[self._trial.number]
            last = max(stored.intermediate_values, default=-1)  # perhaps of an earlier worker
            if epoch > last:
                self._trial.report(value, epoch)
            may_prune = self._study is self._trials and epoch + 1 < self._config.epochs
            return may_prune and epoch >= last and bool(self._trial.should_prune())

    def finish(self, watch: TrialObserver, end: str) -> None:
        """Record the current training; `end` is "measured", "pruned" or "diverged", as it is without a finite value."""
        value = watch.value if end == "measured" and math.isfinite(watch.value) else None
        with turn(self.folder):
            self._tell(value, "diverged" if end == "measured" and value is None else end, watch.metrics)
            self._record()
        self.release()

    def fail(self) -> None:
        """Count a failure of the current training, which is trained again; the third one records it as diverged."""
        with turn(self.folder):
            failures = self._trial.user_attrs.get("failures", 0) + 1
            self._trial.set_user_attr("failures", failures)
            if failures == _MOST_FAILURES:
                log.warning(f"Trial {self._trial.number} has failed {failures} times. It counts as diverged.")
                self._tell(None, "diverged", None)

    def release(self) -> None:
        """Remove the run directory and its lock; another worker may then claim an unfinished trial."""
        if self._lock is None:
            return
        with warn_on_error(f"removing {self._lock.run}"):  # network disks may keep files open
            shutil.rmtree(self._lock.run)
        self._lock.__exit__()
        self._lock = None

    def conclude(self) -> str:
        """Compare the sets, write the report and the best set; return the verdict."""
        again, sets = self._in_state(self._repetitions(), "COMPLETE"), self._sets
        standings = judge({(t.params["set"], t.params["seed"]): t.value for t in again}, len(sets))
        winner, summary = verdict(sets, standings)
        text = page(summary, self._config.metric, self._in_state(self._trials, *_ENDED), sets, standings)
        with turn(self.folder):
            write_yaml(self.folder / BEST, hyp_of(self._start, winner.params if winner else {}).as_dict())
            write_whole(self.folder / REPORT, text.encode())
        return summary

    def _repetitions(self) -> Any:
        """Return the study that repeats the start and the best sets with other seeds."""
        if self._again is None:
            self._again = self._shared(f"the best of {self._config.evolve}")
            with turn(self.folder):
                if "sets" not in self._again.user_attrs:
                    best = [t.number for t in self._best_first() if hyp_of(self._start, t.params) != self._start]
                    self._again.set_user_attr("sets", best[:SETS])
                trials = self._trials.get_trials(deepcopy=False)
                self._sets = [trials[number] for number in self._again.user_attrs["sets"]]
                for seed, number in itertools.product(range(1, SEEDS + 1), range(len(self._sets) + 1)):
                    self._again.enqueue_trial({"set": number, "seed": seed}, skip_if_exists=True)
        return self._again

    def _shared(self, name: str) -> Any:
        """Open a study of the journal."""
        # No pruning in the first third of a training, at least three epochs.
        pruner = self._optuna.pruners.MedianPruner(5, n_warmup_steps=max(3, self._config.epochs // 3))
        # Any lock does, as every write is in a turn. Optuna's lock file would outlive a killed worker.
        lock, storages = threading.Lock(), self._optuna.storages
        with turn(self.folder):
            mend(self.folder / JOURNAL)
            storage = storages.JournalStorage(storages.journal.JournalFileBackend(str(self.folder / JOURNAL), lock))
            return self._optuna.create_study(
                storage=storage, study_name=name, direction="maximize", load_if_exists=True, pruner=pruner
            )

    def _claim(self, study: Any, label: str, budget: int, axes: Mapping[str, Any]) -> RunLock | None:
        """Take a trial, first an unfinished one of a stopped worker; return its lock, None if `budget` is used up."""
        with turn(self.folder):
            left = next((t for t in self._in_state(study, "RUNNING") if self._hold(f"{label}{t.number}")), None)
            number = left.number if left else len(self._in_state(study, "RUNNING", *_ENDED))
            if left is None and number >= budget:
                return None
            seed = int(sample_rng(self._config.seed, number, 0, "evolve").integers(2**32))
            study.sampler = self._optuna.samplers.TPESampler(multivariate=True, constant_liar=True, seed=seed)
            if left:
                log.warning(f"Trial {number} was left unfinished by a worker. It is trained again from its start.")
                trial = self._optuna.trial.Trial(study, left._trial_id)
            else:
                trial = study.ask()
                self._hold(f"{label}{trial.number}")
            for name, axis in axes.items():
                is_whole = isinstance(axis, self._optuna.distributions.IntDistribution)
                (trial.suggest_int if is_whole else trial.suggest_float)(name, axis.low, axis.high, log=axis.log)
            self._study, self._trial = study, trial
            return self._lock

    def _hold(self, name: str) -> bool:
        """Lock a trial's run directory; return False if another worker has the lock."""
        lock = RunLock(self.folder / name)
        if lock.take() is None:
            self._lock = lock
        return self._lock is lock

    def _tell(self, value: float | None, end: str, metrics: Metrics | None) -> None:
        """End the current trial, as complete or without a value as pruned."""
        figures = (m.fitness, m.precision, m.recall, m.map50, m.map) if (m := metrics) else ()
        self._trial.set_user_attr("figures", figures if all(map(math.isfinite, figures)) else ())
        self._trial.set_user_attr("end", end)
        self._study.tell(self._trial, value, state=self._state("PRUNED" if value is None else "COMPLETE"))

    def _record(self) -> None:
        """Write the table of trials and the best set so far."""
        if ended := self._in_state(self._trials, *_ENDED):
            write_table(self.folder / TABLE, ended, [hyp_of(self._start, trial.params) for trial in ended])
        if best := self._best_first():
            write_yaml(self.folder / BEST, hyp_of(self._start, best[0].params).as_dict())

    def _best_first(self) -> list[Any]:
        return sorted(self._in_state(self._trials, "COMPLETE"), key=lambda trial: -trial.value)

    def _state(self, name: str) -> Any:
        return self._optuna.trial.TrialState[name]

    def _in_state(self, study: Any, *states: str) -> list[Any]:
        return list(study.get_trials(deepcopy=False, states=tuple(map(self._state, states))))


def load_optuna() -> Any:
    """Import Optuna with log level WARNING; raise MissingExtra if it is not installed."""
    optuna = import_extra("optuna", "tune", "--evolve")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    return optuna


def mend(journal: Path) -> None:
    """Remove a last line that a full disk has torn, as Optuna would append to it."""
    content = journal.read_bytes()
    if not content.endswith(b"\n") and content:
        log.warning(f"{journal}: removed an incomplete last line.")
        os.truncate(journal, content.rfind(b"\n") + 1)


# ---------------------------------------------------------------------------------------------- its directory


def open_directory(config: TrainConfig, world: World) -> Path:
    """Return the directory that `--evolve` writes to; every rank calls this.

    `--resume`, `--exist-ok` with the name of a search, or a restart by the launcher open an existing one.
    """
    if earlier := world.recall("search"):
        return Path(earlier)
    world.run_on_main(lambda: bool(load_optuna()))
    if config.resume:
        folder = world.run_on_main(lambda: _continued(config))
        log.info(f"Continuing the search in {folder}")
    else:
        with new_run(dataclasses.replace(config, project=_project(config)), world) as folder:
            world.run_on_main(lambda: _begin(config, folder))
    world.remember("search", str(folder))
    return folder


@contextmanager
def turn(folder: Path) -> Iterator[None]:
    """Exclude other workers; turn errors of the disk and of Optuna, which validates no journal, into UserError."""
    try:
        with locked(folder / ".turn"):
            yield
    except UserError:
        raise
    except OSError as error:
        raise UserError(
            f"{folder}: the journal of the search cannot be locked, read or written ({error.strerror or error}). Free "
            "disk space, fix permissions, or choose another --project; a network disk must support locks."
        ) from error
    except Exception as error:
        raise UserError(
            f"{folder / JOURNAL}: not a journal of a search, or damaged "
            f"({one_line(f'{type(error).__name__}: {error}', 120)}). Start another search with another --name, from "
            f"the best set with --hyp {folder / BEST}."
        ) from error


def _begin(config: TrainConfig, folder: Path) -> None:
    """Start a search in a directory, or join the one there."""
    with turn(folder):
        if (folder / JOURNAL).is_file():
            _require_same_training(config, folder)
            log.info(f"Joining the search in {folder}")
            return
        # Ignore locks, and temporary files with which other workers test whether they can write.
        ignored = (".", tempfile.gettempprefix(), FLAGS)
        if any(not path.name.startswith(ignored) for path in folder.iterdir()):
            raise UserError(
                f"--exist-ok: {folder} is not empty; a search needs its own directory. Give another --name, or "
                "leave --exist-ok out."
            )
        write_flags(folder / FLAGS, config)
        (folder / JOURNAL).touch()  # after the flags, which a search with a journal must have


def _project(config: TrainConfig) -> str:
    return config.project if config.project != TrainConfig.project else "runs/evolve"


def _continued(config: TrainConfig) -> Path:
    """Return the directory of the search that `--resume` names, or of the newest one."""
    project = absolute_path(Path(_project(config)).expanduser())
    if config.resume == "newest":
        journals = sorted(project.glob(f"*/{JOURNAL}"), key=lambda path: path.stat().st_mtime_ns)
        if not journals:
            raise UserError(
                f"--evolve with --resume: found no {project}/*/{JOURNAL}. Give the directory of a search, --resume "
                "path/to/search, or leave --resume out to start one."
            )
        folder = journals[-1].parent
    else:
        given = absolute_path(Path(config.resume).expanduser())
        folder = given.parent if given.name in (TABLE, JOURNAL) else given
        if not (folder / JOURNAL).is_file():
            raise UserError(
                f"--resume {shown(given)}: no directory of a search, which has a {JOURNAL}. Give one of --evolve, or "
                f"leave --resume out to start a search, from the best set of another one with --hyp {BEST}."
            )
    _require_same_training(config, folder)
    return folder


def _require_same_training(config: TrainConfig, folder: Path) -> None:
    """Raise UserError for flags with which trainings of the search are not comparable."""
    before: dict[str, Any] = dict(read_yaml(folder / FLAGS, "the flags of a search").values)
    before.setdefault("metric", before.pop("objective", TrainConfig.metric))  # its name up to 0.1
    differing = [key for key, now in config.as_dict().items() if key not in _FREE and before.get(key, now) != now]
    if differing:
        had, has = (
            ", ".join(f"--{key.replace('_', '-')} {shown(values[key])}" for key in differing)
            for values in (before, config.as_dict())
        )
        raise UserError(
            f"{folder}: this search has trainings with {had}; found {has}, which are not comparable. Give the same "
            "flags, or start another search with another --name and without --resume."
        )


# ------------------------------------------------------------------------------------------------------ its space


def unread_keys(start: Hyp, config: TrainConfig, head: type[Head], train: DatasetIndex, images: int) -> frozenset[str]:
    """Return the hyperparameters that no training of a search reads, or that change nothing in its schedule.

    Args:
        start, config, head: hyperparameters, flags and head of the trainings.
        train, images: training samples, and their number in an epoch.
    """
    unread = set(LOSS_HYPS - head.loss_hyps(len(train.names)))
    if config.rect or start.mosaic == 0:
        unread |= {"mosaic", "mixup", "copy_paste", "close_mosaic"}
    if not len(train.segment_offsets):
        unread.add("copy_paste")  # pastes polygons alone
    if not config.weights:
        unread.add("layer_decay")

    def schedule(**changed: float) -> Any:
        hyp = dataclasses.replace(start, **changed)  # type: ignore[arg-type]
        batch_size = config.batch_size if config.batch_size > 0 else UNKNOWN_BATCH
        found = Schedule(hyp, config.epochs, -(-images // batch_size), batch_size, config.cos_lr)
        closed = round(hyp.close_mosaic * config.epochs) if config.close_mosaic < 0 else 0
        return found.warmup_iterations, closed, [found.factor(epoch) for epoch in range(config.epochs)]

    for key in _SCHEDULED:
        low, high = _range(start, key)
        if schedule(**{key: low}) == schedule(**{key: high}) == schedule():
            unread.add(key)
    return frozenset(unread)


def ranges(start: Hyp, unread: Collection[str], optuna: Any) -> dict[str, Any]:
    """Return a distribution for each searched key, without `unread`.

    A value of 0 stays 0 (an augmentation that is off stays off), and so does an optional key at its default. Counts
    stay integers.
    """
    found = {}
    for f in dataclasses.fields(Hyp):
        if f.name in unread or f.name in _FIXED or f.name not in start.as_dict() or getattr(start, f.name) == 0:
            continue
        low, high = _range(start, f.name)
        if f.metadata["whole"]:
            found[f.name] = optuna.distributions.IntDistribution(max(int(low), 1), int(high), log=True)
        else:
            found[f.name] = optuna.distributions.FloatDistribution(low, high, log=f.name not in _MOMENTA)
    return found


def _range(start: Hyp, key: str) -> tuple[float, float]:
    """Return the lowest and the highest value of a key in a search."""
    (metadata,) = (f.metadata for f in dataclasses.fields(Hyp) if f.name == key)
    value = getattr(start, key)
    near, far = value / FACTOR, value * FACTOR
    if key in _MOMENTA:
        near, far = 1 - (1 - value) * FACTOR, 1 - (1 - value) / FACTOR
    return max(metadata["low"], near), min(metadata["high"], far)


def hyp_of(start: Hyp, values: Mapping[str, float]) -> Hyp:
    """Return the start with other values, rounded to five digits where they differ."""
    metadata = {f.name: f.metadata for f in dataclasses.fields(Hyp)}
    rounded = {
        key: min(max(float(f"{value:.5g}"), metadata[key]["low"]), metadata[key]["high"])
        for key, value in ((RENAMED.get(name, name), value) for name, value in values.items())
        if value != getattr(start, key)
    }
    return dataclasses.replace(start, **rounded)
