"""train.py with things going wrong: FAULT="rank where at what" in the environment, such as "1 loss 4 raise".

At call number `at` (from 1) of `where`, on that rank, in the job's first attempt:

    raise     an exception              kill   kill -9 of this process     stop   SIGSTOP to this process
    sleep     nothing for a minute      nan    its result is NaN           worker kill -9 of a loader worker
    prune     its result is True        SIGTERM, or another signal's name: this process gets it

`nan` may have a count: "1 loss 4 nan 3" makes three results in a row NaN. `where` is one of `PLACES`. Several faults
are joined by ";". ARGS_OF_RANK_1 are arguments that rank 1 alone is given.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import tessera.analysis.search
import tessera.data.feed.loader
import tessera.models.heads.anchor_loss
import tessera.utils.checkpoints.saver
import tessera.utils.engine.step
import tessera.utils.evaluation.evaluate
import tessera.utils.training.data
import tessera.utils.training.validation
from tessera.commands import train

PLACES: dict[str, tuple[Any, str]] = {
    "scan": (tessera.utils.training.data, "build_index"),
    "loader": (tessera.data.feed.loader.Loader, "_take"),
    "step": (tessera.utils.engine.step.TrainStep, "__call__"),
    "loss": (tessera.models.heads.anchor_loss.AnchorLoss, "__call__"),
    "validation": (tessera.utils.training.validation, "evaluate"),
    "batch": (tessera.utils.evaluation.evaluate.ShardEvaluation, "_finish"),
    "save": (tessera.utils.checkpoints.saver, "save_checkpoint"),
    "end": (tessera.utils.training.validation.Validation, "validate_best"),
    "report": (tessera.analysis.search.Search, "report"),
}


def strike(what: str) -> None:
    print(f"struck at {time.time():.2f}", file=sys.stderr, flush=True)
    if what == "raise":
        raise RuntimeError("broken on purpose")
    if what == "sleep":
        time.sleep(60)
    elif what == "worker":
        number = multiprocessing.active_children()[0].pid
        assert number is not None
        os.kill(number, signal.SIGKILL)
    else:
        name = {"kill": "SIGKILL", "stop": "SIGSTOP"}.get(what, what)
        os.kill(os.getpid(), signal.Signals[name])


def faulty(work: Callable[..., Any], at: int, what: str, count: int) -> Callable[..., Any]:
    """`work`, with the fault at its call number `at`."""
    calls = 0

    @functools.wraps(work)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        due = at <= calls < at + count
        if due and what not in ("nan", "prune"):
            strike(what)
        result = work(*args, **kwargs)
        if due and what == "prune":
            return True
        if due and what == "nan":
            loss, parts = result
            return loss * float("nan"), parts * float("nan")
        return result

    return wrapper


def main() -> int:
    me = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    sys.argv += os.environ.get(f"ARGS_OF_RANK_{me}", "").split()
    for fault in filter(None, os.environ.get("FAULT", "").split(";")):
        rank, where, at, what, *count = fault.split()
        if me == rank and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            owner, name = PLACES[where]
            setattr(owner, name, faulty(getattr(owner, name), int(at), what, int(count[0]) if count else 1))
    return train.main()


if __name__ == "__main__":
    sys.exit(main())
