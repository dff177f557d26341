"""Where a rank computes. One object owns all that differs between devices; no other file asks for a device's type.

The base class is the CPU; subclasses override what differs, and what they override means what it means here.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from tessera.utils.errors import UserError
from tessera.utils.machine.batch_norm import BatchNormParts
from tessera.utils.machine.host import cpuinfo, keep_freed_memory
from tessera.utils.text import gib
from tessera.utils.types import Batch

T = TypeVar("T")


class Accelerator:
    """The device of this rank; this one is the CPU.

    Attributes:
        device: as torch knows it.
        kind: "cpu", "cuda" or "mps".
        backend: of torch.distributed, for gradients and counts.
        group_waits_for_all: ending the process group waits until every rank does so.
        batch_norm: parts of a BatchNorm whose statistics over the ranks travel in one message; None = in two, added up
            image by image in float64, with the same result for any number of ranks.
        queue_depth: steps that it holds in a queue of its own: batches are copied so many ahead, and flags of a step
            are read so many later.
        pins_memory: copies to it start from page-locked memory.
        fused_optimizers: it has torch's fused optimizer kernels, which can skip a step by a flag on the device.
        measures_memory: the figures of its memory are known.
        computes_fp16: in float16, natively.
        memory_format: of images and weights in training.
        widest: the widest float type that it computes in.
        is_host: it is the CPU itself.
        onnx_providers: names that ONNX Runtime has for it, the one that must be used first.
        openvino_device: the name that OpenVINO has for it; "" where it has none.
    """

    kind = "cpu"
    backend = "gloo"
    group_waits_for_all = False
    batch_norm: BatchNormParts | None = None
    queue_depth = 0
    pins_memory = False
    fused_optimizers = True
    measures_memory = False
    computes_fp16 = False
    memory_format = torch.channels_last
    widest = torch.float64
    is_host = True
    onnx_providers: tuple[str, ...] = ("CPUExecutionProvider",)
    openvino_device = "CPU"

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device or torch.device(self.kind)

    def activate(self) -> None:
        """Prepare this process for computing here."""
        keep_freed_memory()

    @property
    def name(self) -> str:
        """For messages."""
        return self.kind

    @property
    def identity(self) -> str:
        """A name that no other device has; "" for one that ranks may share."""
        return ""

    @property
    def device_ids(self) -> list[int] | None:
        """What DistributedDataParallel wants to know of the device."""
        return None

    @property
    def group_device(self) -> torch.device | None:
        """What the process group is bound to; None where it needs no device."""
        return None

    def set_deterministic(self, on: bool) -> None:
        """Choose bit-reproducible kernels, or the fastest ones."""
        torch.backends.cudnn.benchmark = not on
        torch.backends.cudnn.deterministic = on
        torch.use_deterministic_algorithms(on, warn_only=True)

    @contextmanager
    def choosing_kernels(self, deterministic: bool) -> Iterator[None]:
        """`set_deterministic` inside; afterwards what torch had before, for whatever this process does next."""
        cudnn = torch.backends.cudnn
        before = cudnn.benchmark, cudnn.deterministic
        algorithms = torch.are_deterministic_algorithms_enabled()
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        self.set_deterministic(deterministic)
        try:
            yield
        finally:
            cudnn.benchmark, cudnn.deterministic = before
            torch.use_deterministic_algorithms(algorithms, warn_only=warn_only)

    # Numbers

    @property
    def native_dtype(self) -> torch.dtype:
        """The type that it computes fastest in without emulation."""
        multiplies = {"avx512_bf16", "amx_bf16"} & {*cpuinfo().get("flags", "").split()}
        return torch.bfloat16 if multiplies else torch.float32

    @property
    def half_dtype(self) -> torch.dtype:
        """What `--half` means here; float32 where there is no native type of 16 bits."""
        return self.native_dtype

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[None]:
        """Compute in `dtype` inside; float32 changes nothing."""
        return torch.autocast(self.kind, dtype, enabled=dtype != torch.float32)

    def gradient_scaler(self, dtype: torch.dtype) -> torch.amp.GradScaler:
        """Scales losses for float16, which underflows without it; for other types it does nothing."""
        return torch.amp.GradScaler(self.kind, enabled=dtype == torch.float16)

    def rng_state(self) -> Tensor | None:
        """State of the device's own generator; None where it has none."""
        return None

    def set_rng_state(self, state: Tensor | None) -> None:
        """Set the device's own generator to what `rng_state` returned, perhaps on another kind of device."""

    # The queue

    def in_advance(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same batches, their images on the device: copied, as uint8, while it computes on the batch before."""
        # What was handed over is no longer held here: after the last batch a validation needs its memory.
        ahead: deque[tuple[Batch, Callable[[], Tensor]]] = deque()
        for batch in batches:
            ahead.append((batch, self.upload(batch.images)))
            if len(ahead) > self.queue_depth:
                yield _arrived(*ahead.popleft())
        while ahead:
            yield _arrived(*ahead.popleft())

    def upload(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start to copy `tensor` to the device, beside what it computes; the function returns it, without waiting."""
        sent = tensor.to(self.device)
        return lambda: sent

    def send(self, value: T) -> T:
        """A tensor, or a dataclass with its tensors, on the device; the host does not wait for it."""
        if isinstance(value, Tensor):
            return self._send(value)  # type: ignore[return-value]
        moved: Any = {
            field.name: self._send(found)
            for field in dataclasses.fields(value)  # type: ignore[arg-type]
            if isinstance(found := getattr(value, field.name), Tensor)
        }
        return dataclasses.replace(value, **moved)  # type: ignore[type-var]

    def _send(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device)

    def read_back(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start to copy `tensor` to the host; the function returns the copy, and waits until it is complete."""
        return lambda: tensor.cpu()

    def decided(self, flag: Tensor) -> Tensor | bool:
        """A flag, bool (), as the host's own; on the device where the host would have to wait for it."""
        return flag if self.queue_depth else bool(flag)

    def to_host(self, tensor: Tensor) -> Tensor:
        """A copy on the host, complete after `synchronize`."""
        return tensor.detach().to("cpu", copy=True)

    def synchronize(self) -> None:
        """Wait until all that was queued is done."""

    def record_event(self) -> Any:
        """An event in the device's queue, for `seconds_between`; where there is a queue, the host does not wait."""
        self.synchronize()
        return time.perf_counter()

    def seconds_between(self, start: Any, end: Any) -> float:
        """Time between two events; waits until the device has passed `end`."""
        return float(end - start)

    def untuned(self) -> AbstractContextManager[None]:
        """Choose kernels by rule inside, not by trial: where shapes vary, a trial for each costs more than it gains."""
        return nullcontext()

    def profiler_activities(self) -> list[torch.profiler.ProfilerActivity]:
        """What torch.profiler records."""
        return [torch.profiler.ProfilerActivity.CPU]

    # Memory, in bytes; 0 where it is not measured

    def free_memory(self) -> int:
        """What this process may still allocate, freed blocks that it keeps included."""
        return 0

    def allocated_memory(self) -> int:
        """What tensors hold."""
        return 0

    def reserved_memory(self) -> int:
        """What this process holds: tensors, and freed blocks kept for the next ones."""
        return 0

    def peak_memory(self) -> int:
        """The most that was reserved since `reset_peak_memory`."""
        return 0

    def reset_peak_memory(self) -> None:
        """Begin to measure `peak_memory` anew, with the freed blocks given back."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether `error` means that the memory of the device, or of the host, is exhausted."""
        return isinstance(error, MemoryError) or (
            isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error) and "allocate" in str(error)
        )


def _arrived(batch: Batch, copy: Callable[[], Tensor]) -> Batch:
    return dataclasses.replace(batch, images=copy())


@contextmanager
def explain_out_of_memory(accelerator: Accelerator, work: str, remedies: str) -> Iterator[None]:
    """Inside, exhausted memory is a UserError: with what was computed, what was free, and remedies in sentences.

    `work` is such as "a batch of 64 images a rank at 640 px".
    """
    try:
        yield
    except Exception as error:
        if not accelerator.is_out_of_memory(error):
            raise
        free = f", {gib(accelerator.free_memory())} were free" if accelerator.measures_memory else ""
        raise UserError(f"out of memory on {accelerator.name}: {work}{free}. {remedies}") from error


def explain_out_of_memory_of(weights: str | Path, accelerator: Accelerator) -> AbstractContextManager[None]:
    """Inside, where the model of a file is read or put on its device, exhausted memory is a UserError."""
    remedies = "Take a smaller model, or free memory that other processes hold."
    return explain_out_of_memory(accelerator, f"the model of {weights}", remedies)
