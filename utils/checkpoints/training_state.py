"""Training state in checkpoints: weights, optimizer, progress, random generators."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tessera.utils.checkpoints.transfer import tensor_differences
from tessera.utils.engine.optimizer import check_slots
from tessera.utils.engine.state import TrainState
from tessera.utils.errors import UserError
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.text import first_line


def dump_state(state: TrainState[Any], losses_by_rank: Sequence[Tensor] = ()) -> dict[str, Any]:
    """Return the values of `STATE_KEYS`: live tensors, not copies, and the losses of every rank."""
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
        "best_fitness": state.stopper.best_fitness,
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
        state.precision.scaler.load_state_dict(saved["scaler"])
    state.stopper.load_state_dict(saved["stopper"])
    progress = state.progress
    progress.epoch, progress.step, progress.skipped_steps = saved["epoch"], saved["step"], saved["skipped_steps"]
    progress.batch_in_epoch, progress.skipped_batches = saved["step_in_epoch"], saved["epoch_skipped"]
    progress.class_maps = tuple(saved["class_maps"])
    parts = saved["epoch_losses"]
    if parts.shape[1] != len(progress.losses):
        raise UserError(
            f"The checkpoint does not fit the model: it has {parts.shape[1]} losses, the model {len(progress.losses)}."
        )
    if len(parts) != size:
        parts = torch.cat((parts.sum(0, keepdim=True), parts.new_zeros(size - 1, parts.shape[1])))
    progress.losses = parts[rank].to(progress.losses.device, copy=True)
    if rank == 0:
        set_rng_state(saved["rng"], state.precision.accelerator)


def _restore_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Restore moments and counters; keep the rates and the decay of this optimizer."""
    own = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    groups = saved["param_groups"]
    if (
        "fused" in own[0]
    ):  # torch places the step counters as the group of the file says: on the device for fused kernels
        groups = [{**group, "fused": own[0]["fused"]} for group in groups]
    try:
        optimizer.load_state_dict({**saved, "param_groups": groups})
        check_slots(optimizer)
    except (ValueError, KeyError) as error:
        raise UserError(
            f"The optimizer's state in the checkpoint does not fit ({first_line(error)}). Resume with the --optimizer "
            "and the --freeze of the run."
        ) from error
    for group, values in zip(optimizer.param_groups, own, strict=True):
        group.update(values)
    for parameter, slots in optimizer.state.items():
        for slot, value in slots.items():
            # Fused kernels expect moments in the memory layout of their parameter.
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                slots[slot] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


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
    except (ValueError, TypeError, IndexError, OverflowError, RuntimeError) as error:
        raise UserError(
            f"The checkpoint is damaged: invalid states of random generators ({first_line(error)}). Use another one."
        ) from error
