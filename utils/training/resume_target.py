"""Which run a training is: a fresh one, the one that `--resume` means, or the one that the launcher has restarted."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from tessera.utils.checkpoints.format import load_any_checkpoint, load_checkpoint
from tessera.utils.checkpoints.resume import Difference, ResumedRun, run_of_checkpoint, saved_config
from tessera.utils.checkpoints.run_directory import first_run, new_run, newest_last_checkpoint
from tessera.utils.config import Hyp, TrainConfig, load_hyp
from tessera.utils.engine.stopping import EarlyStopping
from tessera.utils.error_analysis.files import ERRORS
from tessera.utils.errors import ConfigError, UserError
from tessera.utils.files import user_path
from tessera.utils.flags.program import called
from tessera.utils.ranks.launch import check_batch_size
from tessera.utils.ranks.run_lock import LOCK, hold_run
from tessera.utils.ranks.world import World
from tessera.utils.text import counted, one_line, shown

log = logging.getLogger(__name__)

AUTO, NEWEST = "auto", "newest"
_NUMBERED = re.compile(r"epoch([0-9]{1,9})\.pt")


class Resumable(NamedTuple):
    """A checkpoint to continue from."""

    path: Path  # of last.pt, or of what takes its place, on the host that has it
    checkpoint: dict[str, Any]
    others: Sequence[Difference] = ()  # flags given now that name another file than those of the run


class Begun(NamedTuple):
    """What `train` begins with."""

    config: TrainConfig
    hyp: Hyp | None  # where they are known already
    resumed: ResumedRun | None  # None = a fresh run
    folder: Path | None  # of the run, whose lock is held; None = a new one, yet to be made


def start_of_run(given: Mapping[str, Any], world: World, stack: ExitStack) -> Begun | None:
    """A fresh run, or the one that `--resume` means or that this call was restarted in; every rank calls this.

    None where the run of `--resume auto` is done: its epochs, and the measurement of the best one. The state of a run
    that is there is read under its lock: the process that held it before may have trained further.

    Args:
        given: the flags that were given, by name; those of a resumed run that are not among them stay as saved.
        stack: releases the lock of the run's folder.

    Raises:
        UserError: there is no such checkpoint, this version does not know its flags, or another process writes there.
        ConfigError: a flag that would make another model of it.
    """
    asked, earlier = TrainConfig(**given), world.recall("run")
    folder = stack.enter_context(hold_run(Path(earlier), world)) if earlier else None
    # A checkpoint that was there before this call is not its own.
    found = _after_restart(folder, world) if folder and world.recall("saved") else None
    restarted = found is not None
    auto = asked.resume == AUTO and not restarted
    if auto:
        folder = folder or stack.enter_context(hold_run(_named_run(given, asked), world))
        found = _whole_or_none(folder, given, asked, world)
    elif found is None and asked.resume:
        last = _asked_for(given, asked.resume, world)
        if folder != last.parent.parent:
            instead = f"begin a new run from it with --weights {shown(last)}"
            folder = stack.enter_context(hold_run(last.parent.parent, world, instead=instead))
        found = Resumable(last, world.from_main(lambda: load_checkpoint(last)))
    if found is not None:
        config, hyp, resumed = run_of_checkpoint(
            given, found.path, found.checkpoint, world, restarted=restarted or auto, others=found.others
        )
        if not restarted and _has_ended(resumed.checkpoint, config):
            epochs = resumed.checkpoint["epoch"]
            if world.from_main(lambda: (resumed.run / ERRORS).is_file()):
                if not auto:
                    raise _nothing_left(resumed.run, epochs, config)
                log.info(
                    f"--resume auto: the run in {resumed.run} is done, after {counted(epochs, 'epoch')}. "
                    f"{called('val.py')} measures its weights/best.pt; a larger --epochs continues it where no "
                    "patience had run out."
                )
                return None
            log.info(f"--resume: {resumed.run} has trained its {counted(epochs, 'epoch')}; evaluating the best one.")
        check_batch_size(config.batch_size, world.size)
        return Begun(config, hyp, resumed, folder)
    if auto:
        check_batch_size(asked.batch_size, world.size)
        asked = dataclasses.replace(asked, resume="", exist_ok=True)
    if earlier and folder:
        asked = dataclasses.replace(asked, project=str(folder.parent), name=folder.name, exist_ok=True)
    if asked.exist_ok and folder is None:  # to wait would end in writing over what the other process leaves
        folder = stack.enter_context(new_run(asked, world, waits=False))
    return Begun(asked, load_hyp(asked.hyp) if asked.hyp else None, None, folder)


def _after_restart(run: Path, world: World) -> Resumable | None:
    """After the launcher has restarted the ranks: the newest whole checkpoint of their run; None where there is none.

    The rank that has it on its disk sends it to all, for rank 0 may be on another host than before.

    Raises:
        UserError: this host has checkpoints of the run, but none is whole.
    """
    mine = _newest_whole(run, "Restarted by the launcher") if world.local_rank == 0 else None
    steps = world.all_gather(-1 if mine is None else int(mine.checkpoint["step"]))
    if max(steps) < 0:
        log.warning(f"Restarted by the launcher: none of these hosts has a checkpoint of {run}; the run begins anew.")
        return None
    found = world.broadcast(mine, source=steps.index(max(steps)))
    assert found is not None
    log.info(f"Restarted by the launcher: resuming from {found.path}")
    return found


def _asked_for(given: Mapping[str, Any], asked: str, world: World) -> Path:
    """The checkpoint that `--resume` means, on rank 0's host: the others may lack it."""
    forbidden = " and ".join(f"--{flag}" for flag in ("weights", "cfg") if given.get(flag))
    if forbidden:
        raise ConfigError(
            f"{forbidden} with --resume: a resumed run keeps its model. Leave {forbidden} out, or start a new run "
            f"from the checkpoint: --weights {asked}."
        )

    def find() -> Path:
        path = newest_last_checkpoint(given.get("project", TrainConfig.project)) if asked == NEWEST else Path(asked)
        path = path.expanduser().absolute()
        path = path / "weights" / "last.pt" if path.is_dir() else path
        if path.parent.name != "weights" or not path.is_file():
            load_checkpoint(path)  # which has its own words for what is no checkpoint
            raise UserError(
                f"--resume {path}: expected a checkpoint in the folder weights of its run, where results are "
                f"continued. To start a new run from it, give it as --weights."
            )
        return path

    found = world.from_main(find)
    ignored = [flag for flag in ("project", "name") if flag in given and (flag, asked) != ("project", NEWEST)]
    if ignored:
        log.warning(f"--resume: the run stays in {found.parent.parent}; ignored: --{', --'.join(ignored)}.")
    return found


def _named_run(given: Mapping[str, Any], asked: TrainConfig) -> Path:
    """The folder of the run that `--resume auto` means."""
    if "name" not in given:
        raise ConfigError(
            "--resume auto: found no --name, expected that of the run: each start of the command looks for it, begins "
            "it where it is not there, and continues it where it is. Give a --name that no other run has."
        )
    return first_run(asked)


def _whole_or_none(run: Path, given: Mapping[str, Any], asked: TrainConfig, world: World) -> Resumable | None:
    """`--resume auto`: the newest whole checkpoint of that run; None where it has yet to begin.

    Rank 0 reads it, and compares its own flags: on other hosts the dataset may lie elsewhere.
    """

    def read() -> Resumable | None:
        found = _newest_whole(run, "--resume auto")
        if found is None:
            _require_no_other_folder(run)
            return None
        before = saved_config(found.checkpoint, found.path)
        return found._replace(others=[*_other_files(given, asked, before)])

    found = world.from_main(read)
    if found is None:
        log.info(f"--resume auto: no checkpoint in {run}; the run begins.")
    return found


def _other_files(given: Mapping[str, Any], asked: TrainConfig, before: TrainConfig) -> list[Difference]:
    """The flags given now that name another model, weights or dataset than those of the run."""
    found = []
    for flag in ("weights", "cfg", "data"):
        now, was = getattr(asked, flag), getattr(before, flag)
        resolved = [name and user_path(name, f"--{flag}").resolve() for name in (now, was)]
        if flag in given and resolved[0] != resolved[1]:
            found.append(Difference(f"--{flag} {shown(now)}", f"--{flag} {shown(was)}", ""))
    return found


def _newest_whole(run: Path, who: str) -> Resumable | None:
    """last.pt, or else the newest whole epochN.pt, with a warning that begins with `who`; None of a run yet to begin.

    Raises:
        UserError: the run had begun, but none of its checkpoints is whole.
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
            log.warning(f"{who}: {' '.join(reasons) or f'{last} is missing.'} Continuing from {path}")
        return Resumable(path, checkpoint)
    has_rows = table.is_file() and len(table.read_bytes().splitlines()) > 1
    if reasons or has_rows or _is_trained(best):
        why = " ".join(reasons[:2]) or "It has neither last.pt nor an epochN.pt."
        raise UserError(
            f"{who}: the run in {run} had begun, but has no checkpoint to continue from, and beginning anew would "
            f"replace its results. {why} Put a whole last.pt or epochN.pt there (a best.pt has weights alone), or give "
            "another --name."
        )
    return None


def _is_trained(best: Path) -> bool:
    """Whether there is a best.pt of an epoch: weights that a run measures before its first step are its best.pt too."""
    try:
        return best.exists() and load_any_checkpoint(best)["epoch"] > 0
    except UserError:
        return True  # whatever it is, this run would replace it


def _require_no_other_folder(run: Path) -> None:
    """Refuse a folder with files that no start of a run has left: the flags are the first that one writes."""
    files = (path for path in run.rglob("*") if not path.is_dir() and path.suffix != ".tmp" and path.name != LOCK)
    if not (run / "opt.yaml").is_file() and (first := next(files, None)):
        raise UserError(
            f"--resume auto: {run} is not the folder of a run: it has {shown(first.relative_to(run))}, but no opt.yaml "
            "and no checkpoint. Give another --name or --project."
        )


def _nothing_left(run: Path, epochs: int, config: TrainConfig) -> UserError:
    """The error for `--resume PATH` of a run that has ended and is evaluated."""
    end, remedy = f"--epochs {config.epochs}", "larger --epochs"
    if epochs < config.epochs:
        end, remedy = f"stopped early by --patience {config.patience}", "larger --patience, or 0 for no end"
    return UserError(
        f"--resume {run}: nothing is left to train: epochs done {epochs}, {end}. To train further give a {remedy}."
    )


def _has_ended(checkpoint: Mapping[str, Any], config: TrainConfig) -> bool:
    """Whether a run has done all of its epochs, or has stopped early."""
    stopper = EarlyStopping(config.patience)
    stopper.load_state_dict(checkpoint["stopper"])
    stopped = checkpoint["step_in_epoch"] == 0 and stopper.has_stopped(checkpoint["epoch"])
    return checkpoint["epoch"] >= config.epochs or stopped
