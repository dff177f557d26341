"""Training state in checkpoints, and resuming from it: merged flags, compatibility checks, restored state."""

from __future__ import annotations

import dataclasses
import logging
import operator
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tessera.data.labels.classes import reordered_classes
from tessera.utils.checkpoints.weights import tensor_differences
from tessera.utils.config import AUTO, NO_TEACHER, Hyp, TrainConfig, complete_hyp, split_teacher
from tessera.utils.engine.optimizer import check_optimizer_state, family_of
from tessera.utils.engine.state import TrainState
from tessera.utils.errors import ConfigError, UserError
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.ranks.world import World
from tessera.utils.text import first_line, one_line, plural, shown

log = logging.getLogger(__name__)

# Errors of torch and Python for states of another kind or shape than they have saved.
_UNFIT = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError)


class Conflict(NamedTuple):
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
    others: Sequence[Conflict] = (),
) -> tuple[TrainConfig, Hyp, ResumedRun]:
    """Return the run of a checkpoint: its saved configuration, overridden by the given flags.

    Args:
        given: flags by name.
        path, checkpoint, world: file, its content, and the ranks.
        restarted: by the launcher or by `--resume auto`; AutoBatch's batch size then stays if the ranks divide it.
        others: conflicts found before.

    Raises:
        UserError: this version does not know the saved flags.
        ConfigError: the run cannot be resumed with the given flags; names all of these.
    """
    now = {flag: value for flag, value in given.items() if flag not in ("project", "name", "weights", "cfg")}
    before = saved_config(checkpoint, path)
    _, digest = split_teacher(before.teacher)
    if now.get("teacher", AUTO) == AUTO:  # the run's own
        now.pop("teacher", None)
    elif digest and now["teacher"] != NO_TEACHER:  # perhaps moved
        now["teacher"] = split_teacher(now["teacher"])[0] + digest
    own = before.own_parts
    none = {name: getattr(TrainConfig, name) for name in own}
    config = dataclasses.replace(before, **{**none, **now, "resume": str(path)})
    if missing := {name: parts for name, parts in own.items() if config.own_parts.get(name) != parts}:
        flags = " ".join(f"--{name} {' '.join(parts)}" for name, parts in missing.items())
        raise ConfigError(
            f"--resume {path}: the run has {flags}. A part of your own is imported only if the command names it: give "
            "the same again, or start a new run from the checkpoint with --weights."
        )
    if added := [name for name in ("head", "transforms") if getattr(config, name) and name not in own]:
        flags = " and ".join(f"--{name}" for name in added)
        raise ConfigError(
            f"--resume {path}: the run has no {flags}. Omit {flags}, or start a new run from the checkpoint with "
            "--weights."
        )
    if restarted and config.batch_size < 1 and before.batch_size % world.size == 0:
        config = dataclasses.replace(config, batch_size=before.batch_size)
    saved_hyp = Hyp.from_dict(checkpoint["hyp"], str(path))
    hyp = saved_hyp
    if given.get("hyp"):
        words, hyp = complete_hyp(config.hyp, before.hyp, saved_hyp)
        config = dataclasses.replace(config, hyp=words)
        hyp = dataclasses.replace(hyp, fixed_norms=saved_hyp.fixed_norms)  # determined with the initial weights
    if conflicts := [*others, *_conflicts(before, saved_hyp, config, hyp)]:
        flags = ", ".join(dict.fromkeys(conflict.now for conflict in conflicts))
        has = ", ".join(f"{conflict.was} ({conflict.why})" if conflict.why else conflict.was for conflict in conflicts)
        resume_flag, remedy = "--resume", f"Omit {flags}, or start a new run from the checkpoint with --weights."
        if given.get("resume") == "auto":
            resume_flag, remedy = "--resume auto", "Give another --name for a new run, or the flags of this one."
        raise ConfigError(f"{flags} with {resume_flag}: the run of {path} has {has}. {remedy}")
    return config, hyp, ResumedRun(path.parent.parent, checkpoint)


def _conflicts(before: TrainConfig, saved_hyp: Hyp, config: TrainConfig, hyp: Hyp) -> Iterator[Conflict]:
    """Yield the flags and hyperparameters that differ from those of the run and cannot change."""
    had, has = before.optimizer or saved_hyp.optimizer, config.optimizer or hyp.optimizer
    by_hyp = f"--hyp {shown(' '.join(config.hyp))}"
    if family_of(had) != family_of(has):
        now = f"--optimizer {config.optimizer}" if config.optimizer else by_hyp
        yield Conflict(now, f"the optimizer {had}", f"its state does not fit {has}")
    if before.metric != config.metric:
        now, was = (f"--metric {shown(c.metric)}" for c in (config, before))
        yield Conflict(now, was, "best.pt and early stopping compare its values")
    if set(before.frozen_layers) != set(config.frozen_layers):
        now, was = (f"--freeze {' '.join(map(str, c.freeze or (0,)))}" for c in (config, before))
        yield Conflict(now, was, "the optimizer has a state for trained layers alone")
    for in_words, why in (
        (lambda c: f"--tile {c.tile} --overlap {c.overlap:g}", "its epochs and metrics would differ"),
        (lambda c: "--image-weights" if c.image_weights else f"--sampling {c.sampling}", "its epochs would differ"),
        (
            lambda c: "--teacher none" if c.teacher in (AUTO, NO_TEACHER) else "--teacher FILE",
            "its targets would differ",
        ),
        (lambda c: "--single-cls" if c.single_cls else "several classes", "the model has as many outputs"),
    ):
        if in_words(config) != in_words(before):
            yield Conflict(in_words(config), in_words(before), why)
    if config.weights and (hyp.layer_decay == 1) != (saved_hyp.layer_decay == 1):
        why = f"with {hyp.layer_decay:g} the optimizer would have other parameter groups"
        yield Conflict(by_hyp, f"layer_decay {saved_hyp.layer_decay:g}", why)


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


# ---------------------------------------------------------------------------------------------- training state


def dump_state(state: TrainState[Any], losses_by_rank: Sequence[Tensor] = ()) -> dict[str, Any]:
    """Return the training state of a checkpoint: live tensors, not copies, and the losses of every rank."""
    progress = state.progress
    return {
        "model": state.model.state_dict(),
        "ema": state.ema.model.state_dict(),
        "ema_updates": state.ema.updates,
        "optimizer": state.optimizer.state_dict(),
        "scaler": state.precision.scaler.state_dict(),
        "epoch": progress.epoch,
        "step": progress.step,
        "step_in_epoch": progress.batch_in_epoch,
        "epoch_losses": torch.stack([losses.cpu() for losses in losses_by_rank or [progress.losses]]),
        "epoch_skipped": progress.skipped_batches,
        "skipped_steps": progress.skipped_steps,
        "class_maps": list(progress.class_maps),
        "best_fitness": state.stopper.best_score,
        "stopper": state.stopper.state_dict(),
        "rng": rng_state(state.precision.accelerator),
    }


def restore_state(state: TrainState[Any], saved: Mapping[str, Any], *, rank: int = 0, size: int = 1) -> None:
    """Restore the state of this rank in place.

    Each rank restores its own part of the epoch's losses, or rank 0 the sum if the number of ranks has changed. Rank 0
    alone restores the process's generators, which must differ between ranks.

    Raises:
        UserError: weights, optimizer state, losses or generator states do not fit.
    """
    for name, module in (("model", state.model), ("ema", state.ema.model)):
        different = tensor_differences(module.state_dict(), saved[name])
        if different:
            raise UserError(
                f"The checkpoint does not fit the model ({name}: {different}). Resume with the architecture and the "
                "classes of the run."
            )
        module.load_state_dict(saved[name])
    state.ema.updates = saved["ema_updates"]
    _restore_optimizer(state.optimizer, saved["optimizer"])
    if saved["scaler"]:  # empty from a run without loss scaling
        try:
            state.precision.scaler.load_state_dict(saved["scaler"])
        except _UNFIT as error:
            raise _damaged("state of the loss scale", error) from error
    state.stopper.load_state_dict(saved["stopper"])
    progress = state.progress
    progress.epoch, progress.step, progress.skipped_steps = saved["epoch"], saved["step"], saved["skipped_steps"]
    progress.batch_in_epoch, progress.skipped_batches = saved["step_in_epoch"], saved["epoch_skipped"]
    progress.class_maps = tuple(saved["class_maps"])
    parts, losses = saved["epoch_losses"], len(progress.losses)
    if parts.ndim != 2 or not len(parts) or parts.shape[1] != losses or not parts.is_floating_point():
        found = f"of shape {tuple(parts.shape)} in {parts.dtype}"
        raise UserError(
            f"The checkpoint does not fit the model: its losses are {found}, expected {losses} for each rank."
        )
    if len(parts) != size:
        parts = torch.cat((parts.sum(0, keepdim=True), parts.new_zeros(size - 1, parts.shape[1])))
    progress.losses = parts[rank].to(progress.losses.device, copy=True)
    if rank == 0:
        set_rng_state(saved["rng"], state.precision.accelerator)


def _damaged(what: str, error: BaseException) -> UserError:
    return UserError(f"The checkpoint is damaged: invalid {what} ({first_line(error)}). Use another one.")


def _restore_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Restore moments and counters; keep the rates and the decay of this optimizer."""
    own = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    try:
        groups = [{**group, "params": [*map(operator.index, group["params"])]} for group in saved["param_groups"]]
        pairs, scheduled = zip(groups, own, strict=True), {"betas", "momentum"}
        if any(scheduled & group.keys() != scheduled & mine.keys() for group, mine in pairs):
            raise ValueError("it is of another kind of optimizer")  # torch compares the numbers of parameters only
        if "fused" in own[0]:  # torch places the step counters as the group of the file says
            groups = [{**group, "fused": own[0]["fused"]} for group in groups]
        optimizer.load_state_dict({**saved, "param_groups": groups})
        check_optimizer_state(optimizer)
    except _UNFIT as error:
        raise UserError(
            f"The optimizer's state in the checkpoint does not fit ({first_line(error)}). Resume with the --optimizer "
            "and the --freeze of the run."
        ) from error
    for group, values in zip(optimizer.param_groups, own, strict=True):
        group.update(values)
    for parameter, slots in optimizer.state.items():
        for name, value in slots.items():
            # Fused kernels expect moments in the memory layout of their parameter.
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                slots[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def rng_state(accelerator: Accelerator) -> dict[str, Any]:
    """Return the states of this process's generators (Python, NumPy, torch, CUDA) as plain values."""
    algorithm, keys, position, has_gauss, gauss = np.random.get_state()  # noqa: NPY002 - the process-level generator
    return {
        "python": random.getstate(),
        "numpy": (str(algorithm), np.asarray(keys).tolist(), int(position), int(has_gauss), float(gauss)),
        "torch": torch.get_rng_state(),
        "cuda": accelerator.rng_state(),
    }


def set_rng_state(saved: Mapping[str, Any], accelerator: Accelerator) -> None:
    """Restore this process's generators from `rng_state`, or raise UserError."""
    try:
        version, internal, gauss = saved["python"]
        random.setstate((version, tuple(internal), gauss))
        algorithm, keys, *rest = saved["numpy"]
        np.random.set_state((algorithm, np.array(keys, np.uint32), *rest))  # noqa: NPY002
        torch.set_rng_state(saved["torch"].cpu())
        accelerator.set_rng_state(saved["cuda"])
    except (*_UNFIT, RuntimeError) as error:
        raise _damaged("states of random generators", error) from error
