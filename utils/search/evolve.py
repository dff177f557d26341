"""Hyperparameter search: many whole trainings, of which Optuna chooses the sets; the best are made sure of at the end.

The search is its journal, to which any number of processes may work. `--resume` continues a search, or joins it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tessera.utils.config import Hyp, TrainConfig
from tessera.utils.errors import Diverged, Interrupted, tolerate
from tessera.utils.flags.objective import parse_objective
from tessera.utils.ranks.world import World
from tessera.utils.search.folder import open_search
from tessera.utils.search.plan import Job, Plan
from tessera.utils.search.watch import Pruned, Watch
from tessera.utils.search.worker import Worker
from tessera.utils.types import Metrics

log = logging.getLogger(__name__)

# Of each training: its own folder, of which nothing stays.
_OWN: dict[str, Any] = {"evolve": 0, "resume": "", "objective": TrainConfig.objective, "exist_ok": True}
_OWN |= {"nosave": True, "noplots": True, "loggers": "none"}


def evolve(config: TrainConfig, start: Hyp, world: World, train: Callable[..., Metrics]) -> Metrics | None:
    """`--evolve N`: N trainings, some of them ended early, then those that make sure of the best; every rank.

    The ranks of a job are one worker; further jobs may work at the same search. The set to use is hyp_evolved.yaml:
    the best so far, and in the end one that is better than the start, or the start.

    Args:
        config: of the search; each training has its own, without pictures, trackers and files that stay.
        start: hyperparameters of the first trial.
        world: this rank.
        train: one training, of flags, hyperparameters, world and watch; returns its metrics.

    Returns:
        The metrics of the last training that ended here; None where there was none left to do.
    """
    metrics: Metrics | None = None
    with open_search(config, world) as folder, _Desk(folder, config, start, world) as desk:
        while job := desk.next():
            log.info(job.title)
            own = dataclasses.replace(config, **_OWN, project=str(folder), name=job.name, seed=job.seed)
            watch = Watch(world, parse_objective(config.objective), desk.report)
            with desk.training(watch):
                metrics = train(own, job.hyp, world, watch=watch)
        log.info(desk.conclude())
    return metrics


class _Desk:
    """The plan of a search as every rank sees it; a context manager, inside which rank 0 gives its sign of life."""

    def __init__(self, folder: Path, config: TrainConfig, start: Hyp, world: World) -> None:
        self._folder, self._config, self._start, self._world = folder, config, start, world
        self._stack = ExitStack()
        self._rank_0s: Plan | None = None

    def __enter__(self) -> _Desk:
        earlier = self._world.recall("worker") or ""

        def open_plan() -> str:
            worker = self._stack.enter_context(Worker(self._folder, earlier))
            self._rank_0s = Plan(self._folder, self._config, self._start, worker)
            return worker.name

        try:
            self._world.remember("worker", self._world.from_main(open_plan))
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def _plan(self) -> Plan:
        assert self._rank_0s is not None, "rank 0 has the plan"
        return self._rank_0s

    def next(self) -> Job | None:
        """The next training; None once the search is over, everywhere."""
        said = ""
        while isinstance(found := self._world.from_main(lambda: self._plan.next()), str):
            if found != said:
                log.info(found)
            said = found
        return found

    def report(self, epoch: int, value: float) -> bool:
        """On rank 0: take in an epoch's value; return whether the training ends."""
        return self._plan.report(epoch, value)

    @contextmanager
    def training(self, watch: Watch) -> Iterator[None]:
        """Around a training: its result goes to the journal, and what is cut off is left to whoever comes next."""
        end = "measured"
        try:
            yield
        except Pruned:
            end = "pruned"
            log.info("Ended early: others were better by this epoch.")
        except Diverged as error:
            end = "diverged"
            log.warning(f"It counts as the worst: {error}")
        except BaseException as error:
            if self._world.is_main:
                with tolerate("giving the training back"):
                    self._plan.give_back()
            if isinstance(error, Interrupted):
                message = f"Stopped as asked. Continue the search with the same command and --resume {self._folder}"
                raise Interrupted(message, error.exit_code - 128, saved=error.saved, reporter=error.reporter) from error
            raise
        self._world.from_main(lambda: self._plan.finish(watch, end))

    def conclude(self) -> str:
        """The verdict in a line; it and all else is in search.md."""
        return self._world.from_main(lambda: self._plan.conclude())
