"""Hyperparameter search: many whole trainings, of which Optuna chooses the sets; the best are made sure of at the end.

The search is its journal, to which any number of processes may work. `--resume` continues a search, or joins it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from tessera.utils.config import Hyp, TrainConfig
from tessera.utils.errors import Diverged, Interrupted, tolerate
from tessera.utils.flags.objective import parse_objective
from tessera.utils.ranks.world import World
from tessera.utils.search.plan import Job, Plan
from tessera.utils.search.search_directory import open_search
from tessera.utils.search.trial import Pruned, Watch

T = TypeVar("T")
log = logging.getLogger(__name__)

# Of each training, of which nothing stays.
_OWN: dict[str, Any] = {"evolve": 0, "resume": "", "objective": TrainConfig.objective}
_OWN |= {"nosave": True, "noplots": True, "loggers": "none"}


def evolve(config: TrainConfig, start: Hyp, world: World, train: Callable[..., T]) -> T | None:
    """`--evolve N`: N trainings, some of them ended early, then those that make sure of the best; every rank.

    The ranks of a job are one worker; further jobs may work at the same search. The set to use is hyp_evolved.yaml:
    the best so far, and in the end one that is better than the start, or the start.

    Args:
        config: of the search; each training has its own, without pictures, trackers and files that stay.
        start: hyperparameters of the first trial.
        world: this rank.
        train: one training, of flags, hyperparameters, world, folder and watch.

    Returns:
        What the last training that ended here returned; None where there was none left to do.
    """
    ended: T | None = None
    with open_search(config, world) as folder, ExitStack() as stack:
        plan = Plan(folder, config, start)
        world.from_main(lambda: stack.enter_context(plan))
        while job := _next(plan, world):
            log.info(job.title)
            own = dataclasses.replace(config, **_OWN, project=str(folder), name=job.run.name, seed=job.seed)
            watch = Watch(world, parse_objective(config.objective), plan.report)
            with _training(plan, watch, world, folder):
                ended = train(own, job.hyp, world, folder=job.run, watch=watch)
        log.info(world.from_main(plan.conclude))
    return ended


def _next(plan: Plan, world: World) -> Job | None:
    """The next training; None once the search is over, everywhere."""
    said = ""
    while isinstance(found := world.from_main(plan.next), str):
        if found != said:
            log.info(found)
        said = found
    return found


@contextmanager
def _training(plan: Plan, watch: Watch, world: World, folder: Path) -> Iterator[None]:
    """Around a training: its result goes to the journal, and what is cut off is left to whoever comes next."""
    end = "measured"
    try:
        yield
    except Pruned:
        end = "pruned"
        log.info("Ended early: others were better by this epoch.")
    except Diverged as error:
        end = "diverged"
        log.warning(f"It counts as worse than all that were measured: {error}")
    except Interrupted as error:
        message = f"Stopped as asked. Continue the search with the same command and --resume {folder}"
        raise Interrupted(message, error.exit_code - 128, saved=error.saved, reporter=error.reporter) from error
    except Exception:
        if world.is_main:
            with tolerate("noting the failure"):
                plan.study.fail()
        raise
    world.from_main(lambda: plan.finish(watch, end))
