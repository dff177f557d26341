"""Hyperparameter search: trainings with hyperparameters from Optuna; the best are trained again at the end.

Any number of processes may work on the journal of a search. `--resume` continues or joins it.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from tessera.analysis.search.plan import Job, Plan
from tessera.analysis.search.search_directory import open_search
from tessera.analysis.search.space import unread_keys
from tessera.analysis.search.trial import Pruned, TrialObserver
from tessera.utils.config import Hyp, TrainConfig, given_hyp
from tessera.utils.errors import Diverged, Interrupted, warn_on_error
from tessera.utils.ranks.world import World
from tessera.utils.text import duration, plural
from tessera.utils.training.resume_target import TrainingResult
from tessera.utils.training.setup import resolve

T = TypeVar("T")
log = logging.getLogger(__name__)

# Flags of each training, which leaves no files.
_TRIAL_FLAGS: dict[str, Any] = {"evolve": 0, "resume": ""}
_TRIAL_FLAGS |= {"nosave": True, "noplots": True, "loggers": "none"}


def evolve(flags: TrainConfig, world: World, train: Callable[..., TrainingResult]) -> TrainingResult:
    """Run `--evolve N`: N trainings, some pruned, then repetitions of the best; every rank calls this.

    The ranks of a job are one worker; other jobs may work on the same search. hyp_evolved.yaml has the best
    hyperparameters so far, and at the end those that are significantly better than the start, or the start.
    `train` runs one training of flags, hyperparameters, world, folder and trial; its last result here is returned.
    """
    return run_search(*start_of_search(flags, world), world, train) or TrainingResult()


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
    result: T | None = None
    with open_search(config, world) as folder, ExitStack() as stack:
        plan = Plan(folder, config, start, unread)
        world.run_on_main(lambda: stack.enter_context(plan))
        log.info(world.run_on_main(plan.describe))
        while job := _next(plan, world):
            log.info(job.title)
            flags = dataclasses.replace(config, **_TRIAL_FLAGS, project=str(folder), name=job.run.name, seed=job.seed)
            watch = TrialObserver(world, plan.report)
            began, earlier = time.perf_counter(), result
            with _training(plan, watch, world, folder):
                result = train(flags, job.hyp, world, folder=job.run, trial=watch)
            left = world.run_on_main(plan.most_left)
            if result is not None and earlier is None and left:
                pace = duration(left * (time.perf_counter() - began))
                log.info(f"At most {plural(left, 'more training')} at this pace: about {pace} for one worker")
        log.info(world.run_on_main(plan.conclude))
    return result


def _next(plan: Plan, world: World) -> Job | None:
    """Wait for the next training; return None when the search is over."""
    logged = ""
    while isinstance(job := world.run_on_main(plan.next), str):
        if job != logged:
            log.info(job)
        logged = job
    return job


@contextmanager
def _training(plan: Plan, watch: TrialObserver, world: World, folder: Path) -> Iterator[None]:
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
        message = f"Stopped by a signal. Continue the search with the same command and --resume {folder}"
        raise Interrupted(message, error.exit_code - 128, saved=error.saved, reporter=error.reporter) from error
    except Exception:
        if world.is_main:
            with warn_on_error("recording the failure"):
                plan.study.fail()
        raise
    world.run_on_main(lambda: plan.finish(watch, end))
