"""Resuming a run: where a user asks for it, and where the launcher has restarted the ranks."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tessera.utils.checkpoints.fitting import moved_classes
from tessera.utils.checkpoints.folder import first_run, newest_last_checkpoint
from tessera.utils.checkpoints.format import load_any_checkpoint, load_checkpoint
from tessera.utils.checkpoints.saved_state import restore_state
from tessera.utils.config import Hyp, TrainConfig, load_hyp
from tessera.utils.engine.state import TrainState
from tessera.utils.engine.stopping import EarlyStopping
from tessera.utils.errors import ConfigError, UserError
from tessera.utils.ranks.launch import check_batch_size
from tessera.utils.ranks.world import World
from tessera.utils.text import one_line, shown
from tessera.utils.types import Metrics

log = logging.getLogger(__name__)

_NUMBERED = re.compile(r"epoch([0-9]{1,9})\.pt")
_ARRAYS = {
    **dict.fromkeys(("class_ids", "images_per_class", "objects_per_class"), np.int64),
    **dict.fromkeys(("per_class", "class_confidences"), np.float64),
}


@dataclass(frozen=True)
class ResumedRun:
    """A run to resume.

    Attributes:
        run: its directory, on rank 0's host.
        checkpoint: the content of its last.pt; `restore` empties it.
        restarted: by the launcher or with the same command (`--resume auto`), and not by a user who asks for more, for
            whom resuming a finished run is a mistake.
    """

    run: Path
    checkpoint: dict[str, Any]
    restarted: bool = False

    def check_classes(self, names: Sequence[str], config: TrainConfig) -> None:
        """Refuse data with other classes than the run's.

        Raises:
            UserError: `names`, those of the data now, are more or fewer, or in another order.
        """
        before = len(self.checkpoint["names"])
        if before != len(names):
            single = " with --single-cls" if config.single_cls else ""
            raise UserError(
                f"--resume {self.run}: {config.data}{single} has another number of classes, {len(names)}, than the "
                f"run, {before}. Give the data and flags that it began with, or start a new run from the checkpoint "
                f"with --weights."
            )
        moved = moved_classes(self.checkpoint["names"], names)
        if moved:
            raise UserError(
                f"--resume {self.run}: {config.data} has the classes in another order than the run ({moved}): what the "
                f"model has learned of one class would be taken for another. Put them in the run's order, or start a "
                f"new run from the checkpoint with --weights."
            )

    def restore(self, state: TrainState[Any], config: TrainConfig, images: int, data_hash: str, world: World) -> None:
        """Put `state` where the checkpoint has it, and release the checkpoint.

        Args:
            state: of this rank.
            config: of the resumed run.
            images, data_hash: how many images are trained on, and the digest of their index.
            world: this rank.

        Raises:
            UserError: the run is finished, or the checkpoint does not fit.
        """
        restore_state(state, self.checkpoint, rank=world.rank, size=world.size)
        progress = state.progress
        if progress.epoch >= config.epochs and not self.restarted:
            raise UserError(
                f"--resume {self.run}: nothing is left to train: epochs done {progress.epoch}, --epochs "
                f"{config.epochs}. To train further give a larger --epochs."
            )
        if self.checkpoint["dataset_hash"] != data_hash:
            log.warning("--resume: the training data has changed since the checkpoint; the run will not be the same.")
        before = saved_config(self.checkpoint, self.run).batch_size
        progress.convert_batches(before, config.batch_size, images)  # of the same size too: the data may have shrunk
        if before != config.batch_size:
            log.warning(
                f"--resume: batches of {config.batch_size} instead of {before} images; the schedule is rebuilt."
            )
        log.info(f"Resuming {self.run} in epoch {progress.epoch} after batch {progress.step_in_epoch}")
        self.checkpoint.clear()  # else two models and a gradient's moments would stay in memory for the whole run


def start_of_run(given: Mapping[str, Any], world: World) -> tuple[TrainConfig, Hyp | None, ResumedRun | None] | None:
    """What `train` begins with: a fresh run, or the one that `--resume` means or that this call was restarted in.
    None where the run of `--resume auto` is done.

    Args:
        given: the flags that were given, by name; those of a resumed run that are not among them stay as saved.
        world: this rank.

    Raises:
        UserError: there is no such checkpoint, or this version does not know its flags.
        ConfigError: a flag that would make another model of it.
    """
    asked, earlier = TrainConfig(**given), world.recall("run")
    # A checkpoint that was there before this call is not its own.
    found = _checkpoint_of_restart(Path(earlier), world) if earlier and world.recall("saved") else None
    restarted = found is not None
    auto = asked.resume == "auto" and not restarted
    if auto:
        found = _checkpoint_to_continue(given, asked, world)
    elif found is None and asked.resume:
        found = _checkpoint_asked_for(given, asked.resume, world)
    if found is not None:
        config, hyp, resumed = run_of_checkpoint(given, *found, world, restarted=restarted or auto)
        if auto and _is_done(resumed.checkpoint, config):
            log.info(
                f"--resume auto: the run in {resumed.run} is done, after {resumed.checkpoint['epoch']} epochs. val.py "
                f"measures its weights/best.pt; a larger --epochs continues it where no patience had run out."
            )
            return None
        check_batch_size(config.batch_size, world.size)
        return config, hyp, resumed
    if auto:
        check_batch_size(asked.batch_size, world.size)
        asked = dataclasses.replace(asked, resume="", exist_ok=True)
    if earlier:
        folder = Path(earlier)
        asked = dataclasses.replace(asked, project=str(folder.parent), name=folder.name, exist_ok=True)
    return asked, load_hyp(asked.hyp) if asked.hyp else None, None


def _checkpoint_of_restart(run: Path, world: World) -> tuple[Path, dict[str, Any]] | None:
    """After the launcher has restarted the ranks: the newest whole checkpoint of their run; None where there is none.

    The rank that has it on its disk sends it to all, for rank 0 may be on another host than before.
    """
    last = run / "weights" / "last.pt"
    mine = load_checkpoint(last) if world.local_rank == 0 and last.is_file() else None
    steps = world.all_gather(-1 if mine is None else int(mine["step"]))
    if max(steps) < 0:
        return None
    checkpoint = world.broadcast(mine, source=steps.index(max(steps)))
    assert checkpoint is not None
    log.info(f"Restarted by the launcher: resuming from {last}")
    return last, checkpoint


def _checkpoint_asked_for(given: Mapping[str, Any], asked: str, world: World) -> tuple[Path, dict[str, Any]]:
    """The checkpoint that `--resume` means; rank 0 reads it and sends it to the others, whose hosts may lack it."""
    for flag in ("weights", "cfg"):
        if given.get(flag):
            raise ConfigError(
                f"--{flag} with --resume: a resumed run keeps its model. Leave --{flag} out, or start a new run "
                f"from the checkpoint: --weights {asked}."
            )

    def read() -> tuple[Path, dict[str, Any]]:
        path = newest_last_checkpoint(given.get("project", TrainConfig.project)) if asked == "newest" else Path(asked)
        path = path.expanduser().absolute()
        path = path / "weights" / "last.pt" if path.is_dir() else path
        checkpoint = load_checkpoint(path)
        if path.parent.name != "weights":
            raise UserError(
                f"--resume {path}: expected a checkpoint in the folder weights of its run, where results are "
                f"continued. To start a new run from it, give it as --weights."
            )
        return path, checkpoint

    path, checkpoint = world.from_main(read)
    ignored = [flag for flag in ("project", "name") if flag in given and (flag, asked) != ("project", "newest")]
    if ignored:
        log.warning(f"--resume: the run stays in {path.parent.parent}; ignored: --{', --'.join(ignored)}.")
    return path, checkpoint


def _checkpoint_to_continue(
    given: Mapping[str, Any], asked: TrainConfig, world: World
) -> tuple[Path, dict[str, Any]] | None:
    """`--resume auto`: the newest whole checkpoint of that run, which rank 0 reads; None where it has yet to begin.

    Raises:
        ConfigError: no name is given, or other weights, model or data than the run has.
        UserError: as of `_newest_whole`.
    """
    if "name" not in given:
        raise ConfigError(
            "--resume auto: found no --name, expected that of the run: each start of the command looks for it, begins "
            "it where it is not there, and continues it where it is. Give a --name that no other run has."
        )
    run = first_run(asked)
    found: tuple[Path, dict[str, Any]] | None = world.from_main(lambda: _newest_whole(run))
    if found is None:
        log.info(f"--resume auto: no checkpoint in {run}; the run begins.")
        return None
    path, checkpoint = found
    before = saved_config(checkpoint, path)
    for flag in ("weights", "cfg", "data"):
        if flag in given and (now := getattr(asked, flag)) != (was := getattr(before, flag)):
            raise ConfigError(
                f"--{flag} {shown(now)} with --resume auto: the run in {run} has {shown(was)}, so it is another one. "
                f"Give another --name to begin a run, or the flags of this one."
            )
    return path, checkpoint


def _newest_whole(run: Path) -> tuple[Path, dict[str, Any]] | None:
    """last.pt, or else the newest epochN.pt that is whole; None where the run has yet to begin.

    Raises:
        UserError: the run had begun, but none of its checkpoints is whole.
    """
    last, best, table = run / "weights" / "last.pt", run / "weights" / "best.pt", run / "results.csv"
    numbered = {int(found[1]): path for path in last.parent.glob("*.pt") if (found := _NUMBERED.fullmatch(path.name))}
    saved = [last] * last.exists() + [numbered[epoch] for epoch in sorted(numbered, reverse=True)]
    for path in saved:
        try:
            checkpoint = load_checkpoint(path)
        except UserError as error:
            log.warning(f"--resume auto: {one_line(str(error), 300)}")
            continue
        if path != last:
            log.warning(f"--resume auto: last.pt is damaged or missing; continuing from {path}")
        return path, checkpoint
    has_rows = table.is_file() and len(table.read_bytes().splitlines()) > 1
    # Weights that a run measures before its first step are its best.pt too, of epoch 0.
    if saved or has_rows or (best.exists() and load_any_checkpoint(best)["epoch"] > 0):
        raise UserError(
            f"--resume auto: the run in {run} had begun, but none of its checkpoints (last.pt, epochN.pt) is whole, "
            "and beginning anew would replace its results. Put a whole one there, or give another --name."
        )
    return None


def _is_done(checkpoint: Mapping[str, Any], config: TrainConfig) -> bool:
    """Whether a run has done all of its epochs, or has stopped early."""
    stopper = EarlyStopping(config.patience)
    stopper.load_state_dict(checkpoint["stopper"])
    stopped = stopper.best_epoch is not None and stopper.has_run_out(checkpoint["epoch"] - 1)
    return checkpoint["epoch"] >= config.epochs or (stopped and checkpoint["step_in_epoch"] == 0)


def run_of_checkpoint(
    given: Mapping[str, Any], path: Path, checkpoint: dict[str, Any], world: World, *, restarted: bool = False
) -> tuple[TrainConfig, Hyp, ResumedRun]:
    """The run that a checkpoint belongs to, with its saved configuration overridden by the flags given now.

    Where the launcher has restarted the ranks, the batch size that AutoBatch has chosen stays, unless there are now
    ranks that do not divide it.

    Raises:
        UserError: this version does not know the saved flags.
        ConfigError: the flags given now have a mistake, or name another kind of optimizer, other frozen layers, tiles
            or sampling, or rates by layer where the run has none, or the other way round.
    """
    now = {key: value for key, value in given.items() if key not in ("project", "name")}
    before = saved_config(checkpoint, path)
    config = dataclasses.replace(before, **{**now, "resume": str(path)})
    if restarted and config.batch_size < 1 and before.batch_size % world.size == 0:
        config = dataclasses.replace(config, batch_size=before.batch_size)
    kept = Hyp.from_dict(checkpoint["hyp"], str(path))
    # Which statistics are kept was found out with the weights that the run began with.
    hyp = dataclasses.replace(load_hyp(config.hyp), fixed_norms=kept.fixed_norms) if given.get("hyp") else kept
    named = f"--optimizer {config.optimizer}" if config.optimizer else f"--hyp {shown(config.hyp)}"
    had, has = before.optimizer or kept.optimizer, config.optimizer or hyp.optimizer
    if (had == "SGD") != (has == "SGD"):  # both Adams keep the same
        raise ConfigError(
            f"{named} with --resume: the optimizer is {has}, that of the checkpoint {path} is {had}, and the state of "
            f"one does not fit the other. Leave {named} out, or start a new run from the checkpoint with --weights."
        )
    if set(before.frozen_layers) != set(config.frozen_layers):
        asked, did = (" ".join(map(str, c.freeze or (0,))) for c in (config, before))
        raise ConfigError(
            f"--freeze {asked} with --resume: the run of {path} has --freeze {did}, and the optimizer keeps a state of "
            f"what it trains alone. Leave --freeze out, or start a new run from the checkpoint with --weights."
        )
    if (before.tile, before.overlap) != (config.tile, config.overlap):
        asked, did = (f"--tile {c.tile} --overlap {c.overlap:g}" for c in (config, before))
        raise ConfigError(
            f"{asked} with --resume: the run of {path} has {did}, and its epochs and metrics would be others. Leave "
            f"them out, or start a new run from the checkpoint with --weights."
        )
    if (before.sampling, before.image_weights) != (config.sampling, config.image_weights):
        asked, did = ("--image-weights" if c.image_weights else f"--sampling {c.sampling}" for c in (config, before))
        raise ConfigError(
            f"{asked} with --resume: the run of {path} has {did}, and its epochs would be others. Leave {asked} out, "
            f"or start a new run from the checkpoint with --weights."
        )
    if config.weights and (hyp.layer_decay == 1) != (kept.layer_decay == 1):
        raise ConfigError(
            f"--hyp {shown(config.hyp)} with --resume: its layer_decay is {hyp.layer_decay:g}, that of the run of "
            f"{path} {kept.layer_decay:g}, and an optimizer with a rate for each layer (below 1) cannot continue the "
            "state of one with a single rate (1), nor the other way round. Leave --hyp out, or start a new run from "
            "the checkpoint with --weights."
        )
    return config, hyp, ResumedRun(path.parent.parent, checkpoint, restarted)


def saved_config(checkpoint: Mapping[str, Any], path: Path) -> TrainConfig:
    """The flags that the run of a checkpoint was started with, but for those that belong to this start.

    Raises:
        UserError: this version does not know them, or not their values.
    """
    saved = {key: value for key, value in checkpoint["config"].items() if key not in ("device", "local_rank")}
    try:
        # By spelling, not by field: a flag that has been renamed since keeps its old name as an alias.
        return TrainConfig(**TrainConfig.named(saved))
    except ConfigError as error:
        raise UserError(
            f"--resume {path}: this version does not take the flags of the run ({one_line(str(error), 150)}). Update "
            f"the program, or start a new run from the checkpoint with --weights."
        ) from error


def call_in_words(config: TrainConfig) -> str:
    """What a training is asked for, wherever this rank runs: the `call` of `open_world`."""
    return repr(dataclasses.replace(config, device="", local_rank=-1, workers=0))


def remember_end(metrics: Metrics | None, world: World) -> None:
    """Let the launcher keep what this call of tessera.train returns: restarted, it must not train again."""
    world.remember("ended", json.dumps(metrics and vars(metrics), default=np.ndarray.tolist))


def recall_end(world: World) -> tuple[Metrics | None] | None:
    """What this call had returned before the launcher restarted the ranks; None where it had not ended. Every rank."""
    kept = world.recall("ended")
    if kept is None:
        return None
    log.info("Restarted by the launcher: this training had ended; its result is the one that was measured then.")
    values = json.loads(kept)
    if values is None:
        return (None,)
    values |= {name: np.array(values[name], dtype) for name, dtype in _ARRAYS.items()}
    values |= {name: tuple(values[name]) for name in ("losses", "speed_ms", "names")}
    return (Metrics(**{**values, "per_class": values["per_class"].reshape(-1, 4)}),)
