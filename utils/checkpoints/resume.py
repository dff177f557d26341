"""Resuming a run from its checkpoint: with which flags, and on which data."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tessera.data.source.annotations.class_matching import moved_classes
from tessera.utils.checkpoints.training_state import restore_state
from tessera.utils.config import Hyp, TrainConfig, load_hyp
from tessera.utils.engine.state import TrainState
from tessera.utils.errors import ConfigError, UserError
from tessera.utils.ranks.world import World
from tessera.utils.text import counted, one_line, shown

log = logging.getLogger(__name__)


class Difference(NamedTuple):
    """A flag with which a run cannot be continued."""

    now: str  # as it is given: "--freeze 2"
    was: str  # what the run has: "--freeze 3"
    why: str  # the reason, where the two do not say it


@dataclass(frozen=True)
class ResumedRun:
    """A run to resume."""

    run: Path  # its directory, on rank 0's host
    checkpoint: dict[str, Any]  # the content of its last.pt; `restore` empties it

    def check_classes(self, names: Sequence[str], config: TrainConfig) -> None:
        """Raise UserError for data whose classes are more or fewer than the run's, or in another order."""
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
            state, config: of this rank, of the resumed run.
            images, data_hash: how many images are trained on, and the digest of their index.
            world: the ranks.

        Raises:
            UserError: the checkpoint does not fit.
        """
        restore_state(state, self.checkpoint, rank=world.rank, size=world.size)
        progress = state.progress
        if self.checkpoint["dataset_hash"] != data_hash:
            log.warning("--resume: the training data has changed since the checkpoint; the run will not be the same.")
        before = saved_config(self.checkpoint, self.run)
        for flag in ("imgsz", "seed"):
            now, was = getattr(config, flag), getattr(before, flag)
            if now != was:
                log.warning(f"--resume: --{flag} {now} from here on, {was} until now; the run will not be the same.")
        progress.convert_batches(before.batch_size, config.batch_size, images)  # the data may have shrunk
        if before.batch_size != config.batch_size:
            was = counted(before.batch_size, "image")
            log.warning(f"--resume: batches of {config.batch_size} instead of {was}; the schedule is rebuilt.")
        log.info(f"Resuming {self.run} in epoch {progress.epoch} after batch {progress.step_in_epoch}")
        self.checkpoint.clear()  # else two models and a gradient's moments would stay in memory for the whole run


def run_of_checkpoint(
    given: Mapping[str, Any],
    path: Path,
    checkpoint: dict[str, Any],
    world: World,
    *,
    restarted: bool = False,
    others: Sequence[Difference] = (),
) -> tuple[TrainConfig, Hyp, ResumedRun]:
    """Return the run that a checkpoint belongs to, with its saved configuration overridden by the flags given now.

    Args:
        given: the flags given now, by name.
        path, checkpoint: the file and its content.
        world: the ranks.
        restarted: by the launcher, or with the same command (`--resume auto`): then the batch size that AutoBatch has
            chosen stays, unless there are now ranks that do not divide it.
        others: what was found to differ already.

    Raises:
        UserError: this version does not know the saved flags.
        ConfigError: the flags given now have a mistake, or the run cannot be continued with them; names all of these.
    """
    now = {key: value for key, value in given.items() if key not in ("project", "name")}
    before = saved_config(checkpoint, path)
    config = dataclasses.replace(before, **{**now, "resume": str(path)})
    if restarted and config.batch_size < 1 and before.batch_size % world.size == 0:
        config = dataclasses.replace(config, batch_size=before.batch_size)
    kept = Hyp.from_dict(checkpoint["hyp"], str(path))
    # Which statistics are kept was found out with the weights that the run began with.
    hyp = dataclasses.replace(load_hyp(config.hyp), fixed_norms=kept.fixed_norms) if given.get("hyp") else kept
    if differing := [*others, *_differences(before, kept, config, hyp)]:
        flags = ", ".join(dict.fromkeys(difference.now for difference in differing))
        has = ", ".join(difference.was + f" ({difference.why})" * bool(difference.why) for difference in differing)
        asked, remedy = "--resume", f"Leave {flags} out, or start a new run from the checkpoint with --weights."
        if given.get("resume") == "auto":
            asked, remedy = "--resume auto", "Give another --name to begin a run, or the flags of this one."
        raise ConfigError(f"{flags} with {asked}: the run of {path} has {has}. {remedy}")
    return config, hyp, ResumedRun(path.parent.parent, checkpoint)


def _differences(before: TrainConfig, kept: Hyp, config: TrainConfig, hyp: Hyp) -> Iterator[Difference]:
    """Compare what the run began with, `before` and `kept`, with what is asked for now, `config` and `hyp`."""
    had, has = before.optimizer or kept.optimizer, config.optimizer or hyp.optimizer
    by_hyp = f"--hyp {shown(config.hyp)}"
    if (had == "SGD") != (has == "SGD"):  # both Adams keep the same
        now = f"--optimizer {config.optimizer}" if config.optimizer else by_hyp
        yield Difference(now, f"the optimizer {had}", f"its state does not fit {has}")
    if set(before.frozen_layers) != set(config.frozen_layers):
        now, was = (f"--freeze {' '.join(map(str, c.freeze or (0,)))}" for c in (config, before))
        yield Difference(now, was, "the optimizer keeps a state of what it trains alone")
    for in_words, why in (
        (lambda c: f"--tile {c.tile} --overlap {c.overlap:g}", "its epochs and metrics would be others"),
        (lambda c: "--image-weights" if c.image_weights else f"--sampling {c.sampling}", "its epochs would be others"),
        (lambda c: "--single-cls" if c.single_cls else "classes of their own", "the model has as many outputs"),
    ):
        if in_words(config) != in_words(before):
            yield Difference(in_words(config), in_words(before), why)
    if config.weights and (hyp.layer_decay == 1) != (kept.layer_decay == 1):
        why = f"with {hyp.layer_decay:g} the optimizer would have another number of rates (1: a single one)"
        yield Difference(by_hyp, f"layer_decay {kept.layer_decay:g}", why)


def saved_config(checkpoint: Mapping[str, Any], path: Path) -> TrainConfig:
    """Return the flags that a run began with; UserError where this version does not know them, or not their values."""
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
