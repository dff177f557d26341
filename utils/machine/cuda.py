"""Accelerators for GPUs: CUDA and Metal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from tessera.utils.environment import configure_nccl, make_cublas_deterministic
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.machine.batch_norm import BatchNormParts, FusedBatchNormParts

# Messages of NCCL, cuBLAS and cuDNN; older cuDNN reports that no kernel has a workspace that fits.
_OUT_OF_MEMORY = (
    "out of memory",
    "cudaErrorMemoryAllocation",
    "Failed to CUDA ",
    "_STATUS_ALLOC_FAILED",
    "_ALLOCATION_FAILED",
    "nable to find a valid cuDNN algorithm",
    "nable to find an engine to execute this computation",
)


class Cuda(Accelerator):
    """An NVIDIA GPU, or another device that torch presents as CUDA."""

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
        configure_nccl()

    @property
    def onnx_options(self) -> dict[str, str]:
        return {"device_id": str(self.device.index or 0), "use_tf32": "0"}

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.device)

    @property
    def identity(self) -> str:
        return str(torch.cuda.get_device_properties(self.device).uuid)

    @property
    def group_device(self) -> torch.device | None:
        return self.device

    def set_deterministic(self, on: bool) -> None:
        """As in Accelerator; kernels without a deterministic version raise RuntimeError."""
        if on:
            make_cublas_deterministic()
        super().set_deterministic(on)
        torch.use_deterministic_algorithms(on)

    @property
    def native_dtype(self) -> torch.dtype:
        is_ampere = torch.cuda.get_device_capability(self.device) >= (8, 0)
        return torch.bfloat16 if is_ampere else torch.float16

    @property
    def half_dtype(self) -> torch.dtype:
        return torch.float16

    @contextmanager
    def full_float32(self) -> Iterator[None]:
        """As in Accelerator: without TF32, torch's default for convolutions, which has 10 bits of fraction."""
        cudnn: Any = torch.backends.cudnn
        matmul: Any = torch.backends.cuda.matmul
        parts, name, full = [cudnn, matmul], "allow_tf32", cast(Any, False)
        try:
            before = [getattr(part, name) for part in parts]
        except RuntimeError:  # the program has used the newer settings, beside which these cannot be read
            parts, name, full = [cudnn.conv, cudnn.rnn, matmul], "fp32_precision", "ieee"
            before = [getattr(part, name) for part in parts]
        for part in parts:
            setattr(part, name, full)
        try:
            yield
        finally:
            for part, value in zip(parts, before, strict=True):
                setattr(part, name, value)

    def rng_state(self) -> Tensor | None:
        return torch.cuda.get_rng_state(self.device)

    def set_rng_state(self, state: Tensor | None) -> None:
        if state is not None:
            torch.cuda.set_rng_state(state.cpu(), self.device)

    def upload(self, tensor: Tensor) -> Callable[[], Tensor]:
        """As in Accelerator, on a separate stream."""
        if self._copies is None:  # one for all epochs: the allocator reserves memory per stream
            self._copies = torch.cuda.Stream(self.device)
        stream = self._copies
        with torch.cuda.stream(stream):
            sent = tensor.to(self.device, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(stream)

        def arrived() -> Tensor:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(copied)
            sent.record_stream(current)  # its memory must not be reused before the current stream is done
            return sent

        return arrived

    def _send(self, tensor: Tensor) -> Tensor:
        # A copy from pageable memory would block the host.
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
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)  # same strides
        return host.copy_(tensor.detach(), non_blocking=True)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def record_event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def elapsed_s(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()  # elapsed_time raises for an event that is not complete
        return start.elapsed_time(end) / 1000

    def profiler_activities(self) -> list[torch.profiler.ProfilerActivity]:
        return [*super().profiler_activities(), torch.profiler.ProfilerActivity.CUDA]

    def free_memory(self) -> int:
        free_blocks = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return torch.cuda.mem_get_info(self.device)[0] + free_blocks

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
        if isinstance(error, torch.OutOfMemoryError) or super().is_out_of_memory(error):
            return True
        return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


class Metal(Accelerator):
    """The GPU of a Mac, without float64 and without optimizer kernels that skip a step by a flag on the device."""

    kind = "mps"
    batch_norm = BatchNormParts(torch.float32)
    fused_optimizers = False
    widest = torch.float32
    is_host = False
    onnx_providers = ("CoreMLExecutionProvider", "CPUExecutionProvider")
    openvino_device = ""

    @property
    def native_dtype(self) -> torch.dtype:
        return torch.float32  # autocast on Metal lacks the checks that training relies on

    def synchronize(self) -> None:
        torch.mps.synchronize()

    def reserved_memory(self) -> int:
        return torch.mps.driver_allocated_memory()

    def is_out_of_memory(self, error: BaseException) -> bool:
        return super().is_out_of_memory(error) or (isinstance(error, RuntimeError) and "out of memory" in str(error))
