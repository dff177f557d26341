"""Accelerator interface and CPU implementation: device, dtypes, copies, memory. Only accelerators know device types."""

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
from tessera.utils.machine.host import cpuinfo, keep_malloc_memory
from tessera.utils.text import gib
from tessera.utils.types import Batch

T = TypeVar("T")


class Accelerator:
    """The CPU, and the interface of all devices.

    Attributes:
        device: torch device.
        kind: "cpu", "cuda" or "mps".
        backend: of torch.distributed, for gradients and counts.
        group_waits_for_all: destroying the process group waits for every rank.
        batch_norm: computations of a synchronised BatchNorm.
        queue_depth: steps that the device runs behind the host: batches are copied this many ahead, and flags of a step
            are read this many steps later.
        pins_memory: copies to the device need page-locked memory.
        fused_optimizers: torch has fused optimizer kernels, which can skip a step by a flag on the device.
        measures_memory: its memory functions return numbers other than 0.
        computes_fp16: natively.
        memory_format: of images and weights in training.
        widest: widest float type.
        is_host: it is the CPU.
        onnx_providers: execution providers of ONNX Runtime; the first is required.
        openvino_device: device name of OpenVINO; "" = not supported.
    """

    kind = "cpu"
    backend = "gloo"
    group_waits_for_all = False
    batch_norm = BatchNormParts()
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
        """Prepare this process for computing on the device."""
        keep_malloc_memory()

    @property
    def onnx_options(self) -> dict[str, str]:
        """Options of the first execution provider of ONNX Runtime."""
        return {}

    @property
    def name(self) -> str:
        """Device name for messages."""
        return self.kind

    @property
    def identity(self) -> str:
        """Unique name of the device; "" = ranks may share it."""
        return ""

    @property
    def group_device(self) -> torch.device | None:
        """Device that the process group is bound to."""
        return None

    def set_deterministic(self, on: bool) -> None:
        """Choose bit-reproducible kernels, or the fastest ones."""
        torch.backends.cudnn.benchmark = not on
        torch.backends.cudnn.deterministic = on
        torch.use_deterministic_algorithms(on, warn_only=True)

    @contextmanager
    def deterministic_kernels(self, deterministic: bool) -> Iterator[None]:
        """Apply `set_deterministic` inside the body, and restore torch's settings afterwards."""
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
        """The fastest float type without emulation."""
        has_bf16 = {"avx512_bf16", "amx_bf16"} & {*cpuinfo().get("flags", "").split()}
        return torch.bfloat16 if has_bf16 else torch.float32

    @property
    def half_dtype(self) -> torch.dtype:
        """The dtype of `--half`; float32 without a native 16-bit type."""
        return self.native_dtype

    def full_float32(self) -> AbstractContextManager[None]:
        """Return a context in which float32 is computed with all its digits."""
        return nullcontext()

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[None]:
        """Return torch's autocast to `dtype`, disabled for float32."""
        return torch.autocast(self.kind, dtype, enabled=dtype != torch.float32)

    def gradient_scaler(self, dtype: torch.dtype) -> torch.amp.GradScaler:
        """Return a loss scaler, enabled for float16."""
        return torch.amp.GradScaler(self.kind, enabled=dtype == torch.float16)

    def rng_state(self) -> Tensor | None:
        """Return the state of the device's random generator; None without one."""
        return None

    def set_rng_state(self, state: Tensor | None) -> None:
        """Restore the result of `rng_state`, perhaps of another kind of device."""

    # Copies

    def prefetch(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches with images on the device, copied as uint8 while it computes on the previous batch."""
        # A yielded batch is not referenced here: after the last one a validation needs its memory.
        ahead: deque[tuple[Batch, Callable[[], Tensor]]] = deque()
        for batch in batches:
            ahead.append((batch, self.upload(batch.images)))
            if len(ahead) > self.queue_depth:
                yield _arrived(*ahead.popleft())
        while ahead:
            yield _arrived(*ahead.popleft())

    def upload(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start an asynchronous copy to the device; the returned function returns it without blocking the host."""
        sent = tensor.to(self.device)
        return lambda: sent

    def send(self, value: T) -> T:
        """Return a tensor, or a dataclass with its tensors, on the device, without blocking the host."""
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
        """Start to copy `tensor` to the host; the returned function waits for the copy and returns it."""
        return lambda: tensor.cpu()

    def host_flag(self, flag: Tensor) -> Tensor | bool:
        """Return a flag, bool (), on the host, or on the device if reading it would block the host."""
        return flag if self.queue_depth else bool(flag)

    def to_host(self, tensor: Tensor) -> Tensor:
        """Return a copy on the host, complete after `synchronize`."""
        return tensor.detach().to("cpu", copy=True)

    def synchronize(self) -> None:
        """Wait for all queued work."""

    def record_event(self) -> Any:
        """Return an event for `elapsed_s`; a device with a queue does not block the host."""
        self.synchronize()
        return time.perf_counter()

    def elapsed_s(self, start: Any, end: Any) -> float:
        """Wait for event `end`, and return the seconds between the events."""
        return float(end - start)

    @contextmanager
    def without_kernel_benchmark(self) -> Iterator[None]:
        """Disable benchmarking of kernels inside, which costs more than it gains when shapes vary."""
        before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False
        try:
            yield
        finally:
            torch.backends.cudnn.benchmark = before

    def profiler_activities(self) -> list[torch.profiler.ProfilerActivity]:
        """Return the activities that torch.profiler records."""
        return [torch.profiler.ProfilerActivity.CPU]

    # Memory in bytes; 0 = not measured

    def free_memory(self) -> int:
        """Return what this process may still allocate, including freed blocks that it has reserved."""
        return 0

    def allocated_memory(self) -> int:
        """Return the memory of tensors."""
        return 0

    def reserved_memory(self) -> int:
        """Return the memory of tensors and of reserved free blocks."""
        return 0

    def peak_memory(self) -> int:
        """Return the largest `reserved_memory` since `reset_peak_memory`."""
        return 0

    def reset_peak_memory(self) -> None:
        """Release reserved free blocks, and restart `peak_memory`."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether `error` means exhausted memory of the device or the host."""
        texts = "DefaultCPUAllocator", "Failed to allocate memory for requested buffer"  # torch's, ONNX Runtime's
        return isinstance(error, MemoryError) or any(text in str(error) for text in texts)


def _arrived(batch: Batch, copy: Callable[[], Tensor]) -> Batch:
    return dataclasses.replace(batch, images=copy())


@contextmanager
def explain_out_of_memory(accelerator: Accelerator, work: str, remedies: str) -> Iterator[None]:
    """Turn exhausted memory into a UserError with the work ("a batch of 64 images a rank at 640 px") and remedies."""
    try:
        yield
    except Exception as error:
        if not accelerator.is_out_of_memory(error):
            raise
        free = f", {gib(accelerator.free_memory())} were free" if accelerator.measures_memory else ""
        raise UserError(f"out of memory on {accelerator.name}: {work}{free}. {remedies}") from error


def explain_out_of_memory_loading(weights: str | Path, accelerator: Accelerator) -> AbstractContextManager[None]:
    """Turn exhausted memory while the model of a file is loaded into a UserError."""
    remedies = "Use a smaller model, or free memory that other processes hold."
    return explain_out_of_memory(accelerator, f"the model of {weights}", remedies)
