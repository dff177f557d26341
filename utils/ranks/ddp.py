"""Data-parallel models: gradient averaging and BatchNorm statistics over the ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from tessera.utils.machine.accelerator import BatchNormParts, accelerator_of
from tessera.utils.ranks.world import Collectives, World

log = logging.getLogger(__name__)

_BUCKET_BYTES = 4 * 2**20  # of gradients in one message


def smart_DDP(
    model: nn.Module, sync_bn: bool = False, compile: bool = False, dynamic: bool = False, world: World | None = None
) -> nn.Module:
    """Wrap `model` for gradient averaging over the ranks; on a single rank return the model itself.

    Parameters stay the same objects. Buffers are not broadcast in training: see `average_statistics`.

    Args:
        model: on this rank's device.
        sync_bn: BatchNorm statistics over the whole global batch; on a single rank too, whose results then are those of
            several.
        compile: compile the model in place.
        dynamic: compile once for all image sizes.
        world: the ranks; None = those of torch's default process group, if there is one.
    """
    if world is None:
        size = dist.get_world_size() if dist.is_initialized() else 1
        collectives, accelerator = Collectives(), accelerator_of(next(model.parameters()).device)
    else:
        size, collectives, accelerator = world.size, world.collectives, world.accelerator
    if sync_bn:
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                SyncBatchNorm2d.convert(module, collectives, accelerator.batch_norm)
    if compile:
        log.info("--compile: the first steps may take minutes while kernels are built.")
        if sync_bn:
            log.warning("--compile gains little with --sync-bn, whose layers stay outside the compiled graphs.")
        model.compile(dynamic=dynamic)
    return model if size == 1 else DataParallel(model, collectives, size)


class DataParallel(nn.Module):
    """Model whose gradients are averaged over the ranks during each backward; it starts with rank 0's tensors.

    Gradients lie in the order of the parameters, from the last, in the same buckets in every step of every process. So
    a resumed run adds them up as an undisturbed one. torch's DistributedDataParallel arranges its buckets anew after
    the first step, in the order in which gradients came. With three ranks or more the place in a bucket decides in
    which order the ranks' values are added.
    """

    def __init__(self, module: nn.Module, collectives: Collectives, ranks: int) -> None:
        super().__init__()
        self.module, self._collectives, self._ranks = module, collectives, ranks
        self._averages = True
        self._buckets = _cut([p for p in module.parameters() if p.requires_grad][::-1])
        self._missing: list[int] = []  # gradients by bucket, in a backward
        self._sums: list[Callable[[], Tensor]] = []  # of the first buckets: all ranks send them in the same order
        for number, bucket in enumerate(self._buckets):
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(partial(self._arrived, number))
        state = [*module.state_dict().values()]
        for tensor, arrived in zip(state, [collectives.begin_broadcast(t.contiguous(), 0) for t in state], strict=True):
            tensor.copy_(arrived())

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return the model's output."""
        return self.module(*inputs, **named)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave the gradients of a backward inside on this rank."""
        self._averages = False
        try:
            yield
        finally:
            self._averages = True

    def _arrived(self, number: int, _: Tensor) -> None:
        """Count a gradient of bucket `number`, and send what is complete while the backward continues."""
        if not self._averages:
            return
        if not self._missing:
            self._missing = [len(bucket.parameters) for bucket in self._buckets]
            Variable._execution_engine.queue_callback(self._finish)
        self._missing[number] -= 1
        while len(self._sums) < len(self._buckets) and self._missing[len(self._sums)] == 0:
            self._send()

    def _send(self) -> None:
        bucket = self._buckets[len(self._sums)]
        bucket.collect()
        self._sums.append(self._collectives.begin_all_reduce(bucket.flat))

    def _finish(self) -> None:
        """Send the rest, which has parameters without a gradient, and wait for all; at the end of the backward."""
        while len(self._sums) < len(self._buckets):
            self._send()
        for total in self._sums:
            total().div_(self._ranks)
        self._missing, self._sums = [], []


class _Bucket:
    """Gradients of some parameters in one tensor, `flat`."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        sizes = [p.numel() for p in parameters]
        self.flat = torch.zeros(sum(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
        parts = zip(self.flat.split(sizes), parameters, strict=True)
        self._views = [part.as_strided(p.shape, p.stride(), part.storage_offset()) for part, p in parts]

    @torch.no_grad()
    def collect(self) -> None:
        """Move the gradients into `flat`, 0 where there is none."""
        grads = [
            torch.zeros_like(view) if parameter.grad is None else parameter.grad
            for parameter, view in zip(self.parameters, self._views, strict=True)
        ]
        torch._foreach_copy_(self._views, grads)
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.grad = view


def _cut(parameters: Sequence[nn.Parameter]) -> list[_Bucket]:
    """Return buckets of consecutive parameters of one type, each as large as one message."""
    groups: list[list[nn.Parameter]] = []
    free_bytes, dtype = 0, None
    for parameter in parameters:
        if free_bytes <= 0 or parameter.dtype != dtype:
            groups.append([])
            free_bytes, dtype = _BUCKET_BYTES, parameter.dtype
        groups[-1].append(parameter)
        free_bytes -= parameter.nbytes
    return [_Bucket(group) for group in groups]


def gradients_stay_local(model: nn.Module) -> AbstractContextManager[None]:
    """Accumulate gradients of a `smart_DDP` model without averaging: for all but the last micro-batch."""
    return model.no_sync() if isinstance(model, DataParallel) else nullcontext()


def average_statistics(buffers: list[Tensor], world: World) -> None:
    """Average BatchNorm running statistics, those that no rank shares yet, over the ranks, in one message.

    Without `--sync-bn` a rank's statistics come from its own images. Running statistics are linear in the batch
    statistics and unused in training. So their mean equals the statistics of one rank that saw all images, except for
    the variance between the ranks' means. Frozen ones, equal on all ranks, stay as they are: in float64 their sum is
    exact.
    """
    if world.size > 1 and buffers:
        total = world.sum(torch.cat(buffers).to(world.accelerator.widest))
        mean = (total / world.size).to(buffers[0].dtype)
        torch._foreach_copy_(buffers, list(mean.split([buffer.numel() for buffer in buffers])))


class SyncBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm2d with statistics over all ranks; torch.nn.SyncBatchNorm rejects the CPU and waits for the device."""

    collectives: Collectives
    parts: BatchNormParts  # of the device

    @classmethod
    def convert(cls, plain: nn.BatchNorm2d, collectives: Collectives, parts: BatchNormParts) -> None:
        """Change the class of `plain`, whose parameters and buffers stay the same objects."""
        plain.__class__ = cls
        converted = cast(SyncBatchNorm2d, plain)
        converted.collectives, converted.parts = collectives, parts

    def forward(self, x: Tensor) -> Tensor:
        """Normalise (B, C, H, W); in evaluation as plain BatchNorm."""
        if not self.training:
            return super().forward(x)
        assert self.running_mean is not None and self.running_var is not None and self.momentum is not None
        out, mean, var, count = _Normalise.apply(x, self.weight, self.bias, self)
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * (count / (count - 1)), self.momentum)
        return out


class _Normalise(torch.autograd.Function):
    """Synchronised BatchNorm with one message per forward (sum, sum of squares, count) and one per backward.

    Sums are of the distance to the running mean, which all ranks share. So the variance is no difference of large
    numbers where float32 is the widest type (Chan, Golub, LeVeque 1983: shifted data).
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, layer: SyncBatchNorm2d
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        parts, shift = layer.parts, layer.running_mean
        assert shift is not None
        sums = parts.statistics(x, shift)
        count = sums.new_full((1,), x.shape[0] * x.shape[2] * x.shape[3])
        sums = layer.collectives.all_reduce(torch.cat((sums, count)))
        total = sums[-1]
        offset, squares = (sums[:-1] / total).view(2, -1)
        mean = (shift + offset).float()
        var = (squares - offset.square()).clamp_min(0).float()
        inv_std = torch.rsqrt(var + layer.eps)
        ctx.layer = layer
        ctx.save_for_backward(x, weight, mean, inv_std, total)
        ctx.mark_non_differentiable(mean, var)
        return parts.normalise(x, weight, bias, mean, inv_std), mean, var, total.float()

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight, mean, inv_std, total = ctx.saved_tensors
        parts: BatchNormParts = ctx.layer.parts
        sum_dy, sum_dyx, kept = parts.sums(dy, x, mean, inv_std, weight)
        means = (ctx.layer.collectives.all_reduce(torch.stack((sum_dy, sum_dyx))) / total).float()
        dx = parts.gradient(dy, kept, (mean, inv_std), weight, (means[0], means[1]))
        return dx, sum_dyx.float(), sum_dy.float(), None
