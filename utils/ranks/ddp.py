"""Data-parallel models: gradient averaging and BatchNorm statistics over the ranks."""

from __future__ import annotations

import inspect
import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tessera.utils.machine.choose_device import accelerator_of
from tessera.utils.ranks.collectives import Collectives
from tessera.utils.ranks.sync_batchnorm import SyncBatchNorm2d
from tessera.utils.ranks.world import World

log = logging.getLogger(__name__)

# torch 2.13 renamed the argument, and warns about the old name.
_IS_RENAMED = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
_KEEP_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if _IS_RENAMED else "broadcast_buffers": False}


def smart_DDP(
    model: nn.Module, sync_bn: bool = False, compile: bool = False, dynamic: bool = False, world: World | None = None
) -> nn.Module:
    """Wrap `model` for gradient averaging over the ranks; on a single rank return the model itself.

    Parameters stay the same objects. Buffers are not broadcast from rank 0: see `average_statistics`.

    Args:
        model: on this rank's device.
        sync_bn: BatchNorm statistics over the whole global batch, also on the CPU.
        compile: compile the model in place.
        dynamic: compile once for all image sizes.
        world: the ranks; None = those of torch's default process group, if there is one.
    """
    size = dist.get_world_size() if dist.is_initialized() else 1
    accelerator = accelerator_of(next(model.parameters()).device) if world is None else world.accelerator
    # A single rank on the CPU converts too: then results do not depend on the number of ranks.
    if sync_bn := sync_bn and (size > 1 or accelerator.batch_norm is None):
        collectives = Collectives() if world is None else world.collectives
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                SyncBatchNorm2d.convert(module, collectives, accelerator)
    if compile:
        log.info("--compile: the first steps may take minutes while kernels are built.")
        if sync_bn:
            log.warning("--compile gains little with --sync-bn, whose layers stay outside the compiled graphs.")
        model.compile(dynamic=dynamic)
    if size == 1:
        return model
    return DistributedDataParallel(
        model, device_ids=accelerator.device_ids, **_KEEP_BUFFERS, gradient_as_bucket_view=True
    )


def gradients_stay_local(model: nn.Module) -> AbstractContextManager[None]:
    """Accumulate gradients of a `smart_DDP` model without averaging: for all but the last micro-batch."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


def average_statistics(buffers: list[Tensor], world: World) -> None:
    """Average BatchNorm running statistics, those that no rank shares yet, over the ranks, in one message.

    Without `--sync-bn` a rank's statistics come from its own images. Running statistics are linear in the batch
    statistics and unused in training. So their mean equals the statistics of one rank that saw all images, except for
    the variance between the ranks' means.
    """
    if world.size > 1 and buffers:
        flat = world.sum(torch.cat(buffers).div_(world.size))
        torch._foreach_copy_(buffers, list(flat.split([buffer.numel() for buffer in buffers])))
