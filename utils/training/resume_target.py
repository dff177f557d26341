"""Choice of the run to train: a new one, that of `--resume`, or the one the launcher restarted; and its result."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tessera.utils.checkpoints.format import load_any_checkpoint, load_checkpoint
from tessera.utils.checkpoints.resume import Conflict, ResumedRun, run_of_checkpoint, saved_config
from tessera.utils.checkpoints.run_directory import new_run, newest_last_checkpoint, run_path
from tessera.utils.config import AUTO, Hyp, TrainConfig, given_hyp
from tessera.utils.engine.state import EarlyStopping
from tessera.utils.errors import ConfigError, UserError
from tessera.utils.files import LOCK, absolute_path, reachable_path, user_path
from tessera.utils.ranks.launch import check_batch_size
from tessera.utils.ranks.run_lock import lock_run
from tessera.utils.ranks.world import World
from tessera.utils.report.console import TrainingResult
from tessera.utils.report.results_csv import ERRORS
from tessera.utils.text import one_line, plural, shown
from tessera.utils.types import Metrics

log = logging.getLogger(__name__)

NEWEST = "newest"
_ARRAYS = {
    **dict.fromkeys(("class_ids", "images_per_class", "objects_per_class"), np.int64),
    **dict.fromkeys(("per_class", "class_confidences"), np.float64),
}
_NUMBERED = re.compile(r"epoch([0-9]{1,9})\.pt")


class ResumeCheckpoint(NamedTuple):
    """Checkpoint to resume from."""

    path: Path  # of last.pt or its replacement, on the host that has it
    checkpoint: dict[str, Any]
    others: Sequence[Conflict] = ()  # given flags that name other files than the run's


class TrainTarget(NamedTuple):
    """Arguments of `train`."""

    config: TrainConfig
    hyp: Hyp | None  # None = not chosen yet
    resumed: ResumedRun | None  # None = a new run
    folder: Path | None  # run directory, whose lock is held; None = to be created


def resume_target(given: Mapping[str, Any], world: World, stack: ExitStack) -> TrainTarget | None:
    """Return a new run, the target of `--resume`, or the restarted run of this call; every rank calls this.

    None if the run of `--resume auto` is finished and evaluated. A checkpoint is read under the run's lock, as the
    process that held it before may have trained further.

    Args:
        given: flags by name; the other flags of a resumed run stay as saved.
        stack: releases the lock of the run directory.

    Raises:
        UserError: no such checkpoint, unknown saved flags, or another process writes there.
        ConfigError: a flag with which the run cannot be resumed.
    """
    flags, earlier = TrainConfig(**given), world.recall("run")  # the directory that this call had before a restart
    folder = stack.enter_context(lock_run(Path(earlier), world)) if earlier else None
    # Without "saved", a checkpoint there is older than this call.
    found = _after_restart(folder, world) if folder and world.recall("saved") else None
    restarted = found is not None
    auto = flags.resume == AUTO and not restarted
    if auto:
        if "name" not in given:
            raise ConfigError("--resume auto without --name: give the --name of the run, which every start looks for.")
        folder = folder or stack.enter_context(lock_run(run_path(flags), world))
        found = _own_checkpoint(folder, given, flags, world)
    elif flags.resume and not restarted:
        last = _given_checkpoint(given, flags.resume, world)
        if folder != last.parent.parent:
            instead = f"begin a new run from it with --weights {shown(last)}"
            folder = stack.enter_context(lock_run(last.parent.parent, world, instead=instead))
        found = ResumeCheckpoint(last, world.run_on_main(lambda: load_checkpoint(last)))
    if found is not None:
        config, hyp, resumed = run_of_checkpoint(
            given, found.path, found.checkpoint, world, restarted=restarted or auto, others=found.others
        )
        if not restarted and _is_finished(resumed, config, world, auto=auto):
            return None
        check_batch_size(config.batch_size, world.size)
        return TrainTarget(config, hyp, resumed, folder)
    if auto:
        check_batch_size(flags.batch_size, world.size)
        flags = dataclasses.replace(flags, resume="", exist_ok=True)
    if earlier and folder:
        flags = dataclasses.replace(flags, project=str(folder.parent), name=folder.name, exist_ok=True)
    if flags.exist_ok and folder is None:  # waiting would end in overwriting the other run
        folder = stack.enter_context(new_run(flags, world, waits=False))
    given_hyp(flags.hyp)  # names its errors before the dataset is read
    return TrainTarget(flags, None, None, folder)


def _is_finished(resumed: ResumedRun, config: TrainConfig, world: World, *, auto: bool) -> bool:
    """Return whether a run is trained and its best epoch evaluated: a UserError unless `auto`."""
    if not _has_ended(resumed.checkpoint, config):
        return False
    epochs = resumed.checkpoint["epoch"]
    if not world.run_on_main(lambda: (resumed.run / ERRORS).is_file()):
        log.info(f"--resume: {resumed.run} has finished its {plural(epochs, 'epoch')}; evaluating the best one.")
        return False
    early = epochs < config.epochs
    further = f"To train further, give a larger {'--patience, or 0 to disable it' if early else '--epochs'}."
    if not auto:
        end = f"stopped early by --patience {config.patience}" if early else f"--epochs {config.epochs}"
        raise UserError(f"--resume {resumed.run}: nothing left to train: finished epochs: {epochs}, {end}. {further}")
    log.info(f"--resume auto: the run in {resumed.run} is finished, after {plural(epochs, 'epoch')}. {further}")
    return True


def _after_restart(run: Path, world: World) -> ResumeCheckpoint | None:
    """Return the run's newest intact checkpoint after a restart by the launcher; None if there is none.

    The rank that has it on its disk sends it to all, as rank 0 may be on another host than before.

    Raises:
        UserError: this host has checkpoints of the run, but none is intact.
    """
    mine = _newest_intact(run, "Restarted by the launcher") if world.local_rank == 0 else None
    steps = world.all_gather(-1 if mine is None else int(mine.checkpoint["step"]))
    if max(steps) < 0:
        log.warning(f"Restarted by the launcher: no host has a checkpoint of {run}; the run starts from the beginning.")
        return None
    found = world.broadcast(mine, source=steps.index(max(steps)))
    assert found is not None
    log.info(f"Restarted by the launcher: resuming from {found.path}")
    return found


def _given_checkpoint(given: Mapping[str, Any], resume: str, world: World) -> Path:
    """Return the checkpoint that `--resume` names, on rank 0's host."""
    forbidden = " and ".join(f"--{flag}" for flag in ("weights", "cfg") if given.get(flag))
    if forbidden:
        raise ConfigError(
            f"{forbidden} with --resume: a resumed run keeps its model. Omit {forbidden}, or start a new run from its "
            "weights/best.pt with --weights."
        )

    def find() -> Path:
        project = given.get("project", TrainConfig.project)
        path = (
            newest_last_checkpoint(project) if resume == NEWEST else absolute_path(reachable_path(resume, "--resume"))
        )
        path = reachable_path(path / "weights" / "last.pt", "--resume") if path.is_dir() else path
        if path.parent.name != "weights" or not path.is_file():
            load_checkpoint(path)  # raises a more specific error
            raise UserError(
                f"--resume {path}: expected a checkpoint in the directory weights of its run. To start a new run from "
                "it, give it as --weights."
            )
        return path

    found = world.run_on_main(find)
    ignored = [flag for flag in ("project", "name") if flag in given and (flag, resume) != ("project", NEWEST)]
    if ignored:
        log.warning(f"--resume: the run stays in {found.parent.parent}; ignored: --{', --'.join(ignored)}.")
    return found


def _own_checkpoint(run: Path, given: Mapping[str, Any], flags: TrainConfig, world: World) -> ResumeCheckpoint | None:
    """Return the newest intact checkpoint of the run of `--resume auto`; None if the run has yet to start.

    Rank 0 reads it and compares the files that its flags name: their paths may differ on other hosts.
    """

    def read() -> ResumeCheckpoint | None:
        found = _newest_intact(run, "--resume auto")
        if found is None:
            _require_run_directory(run)
            return None
        before = saved_config(found.checkpoint, found.path)
        return found._replace(others=[*_other_files(given, flags, before)])

    found = world.run_on_main(read)
    if found is None:
        log.info(f"--resume auto: no checkpoint in {run}; starting the run.")
    return found


def _other_files(given: Mapping[str, Any], flags: TrainConfig, before: TrainConfig) -> list[Conflict]:
    """Return the given flags that name another model, weights or dataset than those of the run."""
    found = []
    for flag in ("weights", "cfg", "data"):
        now, was = getattr(flags, flag), getattr(before, flag)
        resolved = [name and user_path(name, f"--{flag}").resolve() for name in (now, was)]
        if flag in given and (flag, now) != ("weights", AUTO) and resolved[0] != resolved[1]:
            found.append(Conflict(f"--{flag} {shown(now)}", f"--{flag} {shown(was)}", ""))
    return found


def _newest_intact(run: Path, prefix: str) -> ResumeCheckpoint | None:
    """Return last.pt, or else the newest intact epochN.pt, with a warning that begins with `prefix`.

    None if the run has yet to start.

    Raises:
        UserError: the run had started, but none of its checkpoints is intact.
    """
    last, best, table = run / "weights" / "last.pt", run / "weights" / "best.pt", run / "results.csv"
    numbered = {int(found[1]): path for path in last.parent.glob("*.pt") if (found := _NUMBERED.fullmatch(path.name))}
    saved = [last] * last.exists() + [numbered[epoch] for epoch in sorted(numbered, reverse=True)]
    reasons: list[str] = []
    for path in saved:
        try:
            checkpoint = load_checkpoint(path)
        except UserError as error:
            reasons.append(one_line(str(error), 300))
            continue
        if path != last:
            log.warning(f"{prefix}: {' '.join(reasons) or f'{last} is missing.'} Continuing from {path}")
        return ResumeCheckpoint(path, checkpoint)
    has_rows = False
    if table.is_file():
        with table.open("rb") as file:
            has_rows = len(file.read(1 << 16).splitlines()) > 1
    if reasons or has_rows or _is_trained(best):
        why = " ".join(reasons[:2]) or "It has neither last.pt nor an epochN.pt."
        raise UserError(
            f"{prefix}: the run in {run} has results but no checkpoint to resume from, and starting again would "
            f"overwrite them. {why} Restore last.pt or epochN.pt (best.pt has weights alone), or give another --name."
        )
    return None


def _is_trained(best: Path) -> bool:
    """Return whether best.pt is of a trained epoch, not of the initial weights."""
    try:
        return best.exists() and load_any_checkpoint(best)["epoch"] > 0
    except UserError:
        return True  # the run would overwrite it


def _require_run_directory(run: Path) -> None:
    """Raise UserError for a directory with files but without opt.yaml, the first file of a run."""
    files = (path for path in run.rglob("*") if not path.is_dir() and path.suffix != ".tmp" and path.name != LOCK)
    if not (run / "opt.yaml").is_file() and (first := next(files, None)):
        raise UserError(
            f"--resume auto: {run} is no run directory: it has {shown(first.relative_to(run))}, but no opt.yaml and no "
            "checkpoint. Give another --name or --project."
        )


def _has_ended(checkpoint: Mapping[str, Any], config: TrainConfig) -> bool:
    """Return whether a run has finished all of its epochs, or has stopped early."""
    stopper = EarlyStopping(config.patience)
    stopper.load_state_dict(checkpoint["stopper"])
    stopped = checkpoint["step_in_epoch"] == 0 and stopper.has_stopped(checkpoint["epoch"])
    return checkpoint["epoch"] >= config.epochs or stopped


def remember_result(ended: TrainingResult, world: World) -> None:
    """Store the result of this call with the launcher: a restarted call must not train again."""
    plain = {**vars(ended), "metrics": ended.metrics and vars(ended.metrics), "run": ended.run and str(ended.run)}
    world.remember("ended", json.dumps(plain, default=np.ndarray.tolist))


def recall_result(world: World) -> TrainingResult | None:
    """Return the result that this call had before the launcher restarted the ranks, or None. Every rank calls this."""
    stored = world.recall("ended")
    if stored is None:
        return None
    log.info("Restarted by the launcher: this training had ended; returning its result.")
    plain = json.loads(stored)
    run = plain["run"] and Path(plain["run"])
    return TrainingResult(**{**plain, "run": run, "metrics": plain["metrics"] and _metrics(plain["metrics"])})


def _metrics(values: dict[str, Any]) -> Metrics:
    values |= {name: np.array(values[name], dtype) for name, dtype in _ARRAYS.items()}
    values |= {name: tuple(values[name]) for name in ("losses", "speed_ms", "names")}
    return Metrics(**{**values, "per_class": values["per_class"].reshape(-1, 4)})
