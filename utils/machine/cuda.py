"""GPUs. Those of CUDA have a queue of their own, memory that ends, kernels that are not deterministic unless asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tessera.utils.environment import make_cublas_deterministic
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.machine.batch_norm import BatchNormParts, FusedBatchNormParts

# Not every library says it in torch's own words: cuBLAS and cuDNN have errors of theirs, and older cuDNN finds no
# kernel at all whose workspace would fit.
_OUT_OF_MEMORY = (
    "out of memory",
    "cudaErrorMemoryAllocation",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "nable to find a valid cuDNN algorithm",
    "nable to find an engine to execute this computation",
)


class Cuda(Accelerator):
    """An NVIDIA GPU, or what torch presents as one."""

    kind = "cuda"
    backend = "nccl"
    group_waits_for_all = True
    batch_norm = FusedBatchNormParts()
    queue_depth = 1
    pins_memory = True
    measures_memory = True
    computes_fp16 = True
    is_host = False
    onnx_providers = ("CUDAExecutionProvider", "CPUExecutionProvider")
    openvino_device = ""

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__(device)
        self._copies: torch.cuda.Stream | None = None

    def activate(self) -> None:
        torch.cuda.set_device(self.device)

    @property
    def name(self) -> str:
        """Such as "NVIDIA H100"."""
        return torch.cuda.get_device_name(self.device)

    @property
    def identity(self) -> str:
        return str(torch.cuda.get_device_properties(self.device).uuid)

    @property
    def device_ids(self) -> list[int] | None:
        return [torch.cuda.current_device() if self.device.index is None else self.device.index]

    @property
    def group_device(self) -> torch.device | None:
        return self.device

    def set_deterministic(self, on: bool) -> None:
        """As in Accelerator; a kernel that is not deterministic then raises RuntimeError."""
        if on:
            make_cublas_deterministic()
        super().set_deterministic(on)
        torch.use_deterministic_algorithms(on)

    @property
    def native_dtype(self) -> torch.dtype:
        """bfloat16 since Ampere, float16 before."""
        return torch.bfloat16 if torch.cuda.get_device_capability(self.device) >= (8, 0) else torch.float16

    @property
    def half_dtype(self) -> torch.dtype:
        """float16."""
        return torch.float16

    def rng_state(self) -> Tensor | None:
        return torch.cuda.get_rng_state(self.device)

    def set_rng_state(self, state: Tensor | None) -> None:
        if state is not None:
            torch.cuda.set_rng_state(state.cpu(), self.device)

    def upload(self, tensor: Tensor) -> Callable[[], Tensor]:
        """As in Accelerator: on a stream of its own, from page-locked memory."""
        if self._copies is None:  # one for all epochs: the allocator keeps memory for each stream
            self._copies = torch.cuda.Stream(self.device)
        stream = self._copies
        with torch.cuda.stream(stream):
            sent = tensor.to(self.device, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(stream)

        def arrived() -> Tensor:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(copied)
            sent.record_stream(current)  # its memory is free again only after what is queued here
            return sent

        return arrived

    def _send(self, tensor: Tensor) -> Tensor:
        # From pageable memory the host would wait for the copy.
        pinned = tensor.pin_memory() if tensor.device.type == "cpu" else tensor
        return pinned.to(self.device, non_blocking=True)

    def read_back(self, tensor: Tensor) -> Callable[[], Tensor]:
        host = self.to_host(tensor)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(self.device))

        def arrived() -> Tensor:
            copied.synchronize()
            return host

        return arrived

    def to_host(self, tensor: Tensor) -> Tensor:
        """As in Accelerator: to page-locked memory, which torch keeps for the next copies."""
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)  # with the same strides
        return host.copy_(tensor.detach(), non_blocking=True)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def record_event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds_between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()  # without it, elapsed_time raises where the device has not passed `end`
        return start.elapsed_time(end) / 1000

    @contextmanager
    def untuned(self) -> Iterator[None]:
        before = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = False
        try:
            yield
        finally:
            torch.backends.cudnn.benchmark = before

    def profiler_activities(self) -> list[torch.profiler.ProfilerActivity]:
        return [*super().profiler_activities(), torch.profiler.ProfilerActivity.CUDA]

    def free_memory(self) -> int:
        kept = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return torch.cuda.mem_get_info(self.device)[0] + kept

    def allocated_memory(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def reserved_memory(self) -> int:
        return torch.cuda.memory_reserved(self.device)

    def peak_memory(self) -> int:
        return torch.cuda.max_memory_reserved(self.device)

    def reset_peak_memory(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)

    def is_out_of_memory(self, error: BaseException) -> bool:
        """As in Accelerator; whichever library says it."""
        if isinstance(error, torch.OutOfMemoryError) or super().is_out_of_memory(error):
            return True
        return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


class Metal(Accelerator):
    """The GPU of a Mac. It has no float64, and its optimizer kernels cannot skip a step by a flag on the device."""

    kind = "mps"
    batch_norm = BatchNormParts()
    fused_optimizers = False
    widest = torch.float32
    is_host = False
    onnx_providers = ("CoreMLExecutionProvider", "CPUExecutionProvider")
    openvino_device = ""

    @property
    def native_dtype(self) -> torch.dtype:
        """float32: autocast on Metal has no counterpart of the checks that training relies on."""
        return torch.float32

    def synchronize(self) -> None:
        torch.mps.synchronize()

    def reserved_memory(self) -> int:
        return torch.mps.driver_allocated_memory()

    def is_out_of_memory(self, error: BaseException) -> bool:
        return super().is_out_of_memory(error) or (isinstance(error, RuntimeError) and "out of memory" in str(error))
