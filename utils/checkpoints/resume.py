"""Resuming a run from a loaded checkpoint: merged flags, compatibility checks, restored state."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tessera.data.source.annotations.class_matching import reordered_classes
from tessera.utils.checkpoints.training_state import restore_state
from tessera.utils.config import Hyp, TrainConfig, complete_hyp
from tessera.utils.engine.optimizer import family_of
from tessera.utils.engine.state import TrainState
from tessera.utils.errors import ConfigError, UserError
from tessera.utils.ranks.world import World
from tessera.utils.text import one_line, plural, shown

log = logging.getLogger(__name__)


class Difference(NamedTuple):
    """Flag with which a run cannot be resumed."""

    now: str  # as given: "--freeze 2"
    was: str  # of the run: "--freeze 3"
    why: str  # reason, or ""


@dataclass(frozen=True)
class ResumedRun:
    """Run to resume."""

    run: Path  # directory, on rank 0's host
    checkpoint: dict[str, Any]  # content of last.pt; `restore` empties it

    def check_classes(self, names: Sequence[str], config: TrainConfig) -> None:
        """Raise UserError if the data has more, fewer or reordered classes."""
        before = len(self.checkpoint["names"])
        if before != len(names):
            single = " with --single-cls" if config.single_cls else ""
            raise UserError(
                f"--resume {self.run}: {config.data}{single} has {plural(len(names), 'class')}, the run has {before}. "
                "Give the data and flags of the run, or start a new run from the checkpoint with --weights."
            )
        moved = reordered_classes(self.checkpoint["names"], names)
        if moved:
            raise UserError(
                f"--resume {self.run}: {config.data} has the classes in another order than the run ({moved}), which "
                "would confuse them. Restore the order, or start a new run from the checkpoint with --weights."
            )

    def restore(self, state: TrainState[Any], config: TrainConfig, images: int, data_hash: str, world: World) -> None:
        """Restore `state` from the checkpoint, and release the checkpoint.

        `images` per epoch and `data_hash` describe the present training data.

        Raises:
            UserError: the checkpoint does not fit.
        """
        restore_state(state, self.checkpoint, rank=world.rank, size=world.size)
        progress = state.progress
        if self.checkpoint["dataset_hash"] != data_hash:
            log.warning("--resume: the training data has changed since the checkpoint; results will differ.")
        before = saved_config(self.checkpoint, self.run)
        for flag in ("imgsz", "seed"):
            now, was = getattr(config, flag), getattr(before, flag)
            if now != was:
                log.warning(f"--resume: --{flag} {now} from now on, {was} before; results will differ.")
        progress.convert_batches(before.batch_size, config.batch_size, images)  # the data may have shrunk
        if before.batch_size != config.batch_size:
            was = plural(before.batch_size, "image")
            log.warning(f"--resume: batches of {config.batch_size} instead of {was}; the schedule is rebuilt.")
        log.info(f"Resuming {self.run} in epoch {progress.epoch} after batch {progress.batch_in_epoch}")
        self.checkpoint.clear()  # frees two models and the optimizer state


def run_of_checkpoint(
    given: Mapping[str, Any],
    path: Path,
    checkpoint: dict[str, Any],
    world: World,
    *,
    restarted: bool = False,
    others: Sequence[Difference] = (),
) -> tuple[TrainConfig, Hyp, ResumedRun]:
    """Return the run of a checkpoint: its saved configuration, overridden by the given flags.

    Args:
        given: flags by name.
        path, checkpoint, world: file, its content, and the ranks.
        restarted: by the launcher or by `--resume auto`; AutoBatch's batch size then stays if the ranks divide it.
        others: differences found before.

    Raises:
        UserError: this version does not know the saved flags.
        ConfigError: the run cannot be resumed with the given flags; names all of these.
    """
    now = {flag: value for flag, value in given.items() if flag not in ("project", "name", "weights", "cfg")}
    before = saved_config(checkpoint, path)
    _require_own_parts(before, TrainConfig(**given), path)
    config = dataclasses.replace(before, **{**now, "resume": str(path)})
    if restarted and config.batch_size < 1 and before.batch_size % world.size == 0:
        config = dataclasses.replace(config, batch_size=before.batch_size)
    saved_hyp = Hyp.from_dict(checkpoint["hyp"], str(path))
    hyp = saved_hyp
    if given.get("hyp"):
        words, hyp = complete_hyp(config.hyp, before.hyp, saved_hyp)
        config = dataclasses.replace(config, hyp=words)
        hyp = dataclasses.replace(hyp, fixed_norms=saved_hyp.fixed_norms)  # determined with the initial weights
    if differing := [*others, *_differences(before, saved_hyp, config, hyp)]:
        flags = ", ".join(dict.fromkeys(difference.now for difference in differing))
        has = ", ".join(difference.was + f" ({difference.why})" * bool(difference.why) for difference in differing)
        resume_flag, remedy = "--resume", f"Omit {flags}, or start a new run from the checkpoint with --weights."
        if given.get("resume") == "auto":
            resume_flag, remedy = "--resume auto", "Give another --name for a new run, or the flags of this one."
        raise ConfigError(f"{flags} with {resume_flag}: the run of {path} has {has}. {remedy}")
    return config, hyp, ResumedRun(path.parent.parent, checkpoint)


def _require_own_parts(before: TrainConfig, given: TrainConfig, path: Path) -> None:
    """Raise ConfigError unless the user's own parts of a run are given again: a file's names are not imported."""
    missing = {flag: parts for flag, parts in before.own_parts.items() if given.own_parts.get(flag) != parts}
    if missing:
        flags = " ".join(f"--{flag} {' '.join(parts)}" for flag, parts in missing.items())
        raise ConfigError(
            f"--resume {path}: the run has parts of its user's own, which are imported only if they are given. Give "
            f"{flags} again."
        )


def _differences(before: TrainConfig, saved_hyp: Hyp, config: TrainConfig, hyp: Hyp) -> Iterator[Difference]:
    """Yield the flags and hyperparameters that differ from those of the run and cannot change."""
    had, has = before.optimizer or saved_hyp.optimizer, config.optimizer or hyp.optimizer
    by_hyp = f"--hyp {shown(' '.join(config.hyp))}"
    if family_of(had) != family_of(has):
        now = f"--optimizer {config.optimizer}" if config.optimizer else by_hyp
        yield Difference(now, f"the optimizer {had}", f"its state does not fit {has}")
    if before.metric != config.metric:
        now, was = (f"--metric {shown(c.metric)}" for c in (config, before))
        yield Difference(now, was, "best.pt and early stopping compare its values")
    if set(before.frozen_layers) != set(config.frozen_layers):
        now, was = (f"--freeze {' '.join(map(str, c.freeze or (0,)))}" for c in (config, before))
        yield Difference(now, was, "the optimizer has a state for trained layers alone")
    for in_words, why in (
        (lambda c: f"--tile {c.tile} --overlap {c.overlap:g}", "its epochs and metrics would differ"),
        (lambda c: "--image-weights" if c.image_weights else f"--sampling {c.sampling}", "its epochs would differ"),
        (lambda c: "--single-cls" if c.single_cls else "several classes", "the model has as many outputs"),
    ):
        if in_words(config) != in_words(before):
            yield Difference(in_words(config), in_words(before), why)
    if config.weights and (hyp.layer_decay == 1) != (saved_hyp.layer_decay == 1):
        why = f"with {hyp.layer_decay:g} the optimizer would have other parameter groups"
        yield Difference(by_hyp, f"layer_decay {saved_hyp.layer_decay:g}", why)


def saved_config(checkpoint: Mapping[str, Any], path: Path) -> TrainConfig:
    """Return the saved flags of a run; UserError if this version does not know them or their values."""
    saved = {key: value for key, value in checkpoint["config"].items() if key not in ("device", "local_rank")}
    try:
        # By spelling: a renamed flag keeps its old name as an alias.
        return TrainConfig(**TrainConfig.named(saved))
    except ConfigError as error:
        raise UserError(
            f"--resume {path}: this version does not accept the flags of the run ({one_line(str(error), 150)}). Update "
            "the program, or start a new run from the checkpoint with --weights."
        ) from error
