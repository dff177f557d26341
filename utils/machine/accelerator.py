"""Accelerators: all that differs between the CPU, CUDA and Metal; and the choice of one by `--device`.

Only this module knows device types.

Legend: x, dy float (B, C, H, W), dy the gradient of the output; x̂ = (x − μ) / σ; all else (C,): μ mean and σ standard
deviation float32, sums of the widest type.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.utils.environment import Launch, configure_libraries, make_cublas_deterministic
from tessera.utils.errors import ConfigError, UserError
from tessera.utils.machine.host import cpuinfo, keep_malloc_memory
from tessera.utils.text import gib, plural
from tessera.utils.types import Batch

T = TypeVar("T")

_ALIGNMENT = 16  # bytes; CUDA's widest load, whose address must be a multiple of it

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


class BatchNormParts:
    """Plain torch, for any device; `widest` is the widest float type of the device.

    Sums are taken per image in float32, and over images in the widest type: rounding to float32 hides their order, and
    so the number of ranks. Otherwise an error in the last digit of activations becomes one in the third digit of
    gradients early in training.
    """

    def __init__(self, widest: torch.dtype = torch.float64) -> None:
        self.widest = widest

    def statistics(self, x: Tensor, shift: Tensor) -> Tensor:
        """Return Σ (x − shift), then Σ (x − shift)², (2C,)."""
        variances, means = (t.to(self.widest) for t in torch.var_mean(x.float(), (2, 3), correction=0))
        offsets = means - shift
        return torch.cat((offsets.sum(0), (variances + offsets.square()).sum(0))) * (x.shape[2] * x.shape[3])

    def normalise(self, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, inv_std: Tensor) -> Tensor:
        """Return x̂ · weight + bias, of x's type."""
        gain = inv_std * weight
        return torch.addcmul(_wide(bias - mean * gain), x.float(), _wide(gain)).to(x.dtype)

    def sums(
        self, dy: Tensor, x: Tensor, mean: Tensor, inv_std: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return Σ dy, Σ dy x̂, and what `gradient` takes as `kept`."""
        dy32, normal = dy.float(), (x.float() - _wide(mean)) * _wide(inv_std)
        by_image = dy32.sum((2, 3)), (dy32 * normal).sum((2, 3))
        sum_dy, sum_dyx = (t.to(self.widest).sum(0) for t in by_image)
        return sum_dy, sum_dyx, normal

    def gradient(
        self, dy: Tensor, kept: Tensor, statistics: tuple[Tensor, Tensor], weight: Tensor, means: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Return the gradient of x, of dy's type: weight/σ (dy − mean(dy) − x̂ mean(dy x̂)).

        `statistics` are μ and 1/σ, `means` float32 of dy and dy x̂ over all ranks.
        """
        mean_dy, mean_dyx = map(_wide, means)
        return ((dy.float() - mean_dy - kept * mean_dyx) * _wide(statistics[1] * weight)).to(dy.dtype)


class FusedBatchNormParts(BatchNormParts):
    """torch's CUDA kernels, which read dense inputs once, in their own type, and compute in float32."""

    def statistics(self, x: Tensor, shift: Tensor) -> Tensor:
        mean, inv_std = torch.batch_norm_stats(_dense(x), 0.0)
        var = inv_std.pow(-2).nan_to_num_(0.0, posinf=0.0)  # 0 = a constant channel
        offset = mean.to(self.widest) - shift
        return torch.cat((offset, var + offset.square())) * (x.shape[0] * x.shape[2] * x.shape[3])

    def normalise(self, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, inv_std: Tensor) -> Tensor:
        return torch.batch_norm_elemt(_dense(x), weight, bias, mean, inv_std, 0.0)

    def sums(
        self, dy: Tensor, x: Tensor, mean: Tensor, inv_std: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        x = _dense(x)
        dy = dy.contiguous(memory_format=_format(x))
        sum_dy, sum_dy_xmu, _, _ = torch.batch_norm_backward_reduce(dy, x, mean, inv_std, weight, True, False, False)
        return sum_dy.to(self.widest), (sum_dy_xmu * inv_std).to(self.widest), x

    def gradient(
        self, dy: Tensor, kept: Tensor, statistics: tuple[Tensor, Tensor], weight: Tensor, means: tuple[Tensor, Tensor]
    ) -> Tensor:
        (mean, inv_std), (mean_dy, mean_dyx) = statistics, means
        dy = dy.contiguous(memory_format=_format(kept))
        one = torch.ones(1, dtype=torch.int32, device=dy.device)  # means are sums over one pixel
        return torch.batch_norm_backward_elemt(dy, kept, mean, inv_std, weight, mean_dy, mean_dyx / inv_std, one)


def _format(x: Tensor) -> torch.memory_format:
    is_channels_last = x.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if is_channels_last else torch.contiguous_format


def _dense(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=_format(x))


def _wide(channels: Tensor) -> Tensor:
    return channels.view(1, -1, 1, 1)


class Accelerator:
    """The CPU, and the interface of all devices."""

    kind = "cpu"  # or "cuda", "mps"
    backend = "gloo"  # of torch.distributed, for gradients and counts
    group_waits_for_all = False  # destroying the process group waits for every rank
    group_device: torch.device | None = None  # that the process group is bound to
    batch_norm = BatchNormParts()  # computations of a synchronised BatchNorm
    # Steps that the device runs behind the host: batches are copied this many ahead, and flags of a step are read this
    # many steps later.
    queue_depth = 0
    pins_memory = False  # copies to the device need page-locked memory
    fused_optimizers = True  # torch has fused optimizer kernels, which can skip a step by a flag on the device
    measures_memory = False  # its memory functions return numbers other than 0
    computes_fp16 = False  # natively
    memory_format = torch.channels_last  # of images and weights in training
    widest = torch.float64  # widest float type
    is_host = True  # it is the CPU
    onnx_providers: tuple[str, ...] = ("CPUExecutionProvider",)  # of ONNX Runtime; the first is required
    openvino_device = "CPU"  # device name of OpenVINO; "" = not supported

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
        names = [field.name for field in dataclasses.fields(value)]  # type: ignore[arg-type]
        tensors = {name: found for name in names if isinstance(found := getattr(value, name), Tensor)}
        return dataclasses.replace(value, **self._send_all(tensors))  # type: ignore[type-var]

    def _send(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device)

    def _send_all(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        return {name: self._send(tensor) for name, tensor in tensors.items()}

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
        self.group_device = self.device
        self._copies: torch.cuda.Stream | None = None

    def activate(self) -> None:
        torch.cuda.set_device(self.device)
        configure_libraries()

    @property
    def onnx_options(self) -> dict[str, str]:
        return {"device_id": str(self.device.index or 0), "use_tf32": "0"}

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.device)

    @property
    def identity(self) -> str:
        return str(torch.cuda.get_device_properties(self.device).uuid)

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

    def _send_all(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Copy the tensors that are on the host in one buffer: small ones cost a fixed time for each copy."""
        hosted = {name: tensor for name, tensor in tensors.items() if tensor.device.type == "cpu"}
        if not hosted:
            return tensors
        flat = [tensor.clone(memory_format=torch.contiguous_format).view(-1) for tensor in hosted.values()]
        parts = [F.pad(t.view(torch.uint8), (0, -t.nbytes % _ALIGNMENT)) for t in flat]
        sent = self._send(torch.cat(parts)).split([len(part) for part in parts])
        rows = zip(hosted.items(), sent, strict=True)
        return {**tensors, **{name: part[: t.nbytes].view(t.dtype).view(t.shape) for (name, t), part in rows}}

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


def choose_accelerator(device: str, launch: Launch) -> Accelerator:
    """Return the device of this rank; raise ConfigError for an unknown or missing one, or several for one process."""
    word = device.strip().lower().replace("cuda:", "").replace(" ", "")
    if word == "mps":
        if not torch.backends.mps.is_available():
            raise ConfigError("--device mps: no Metal device here. Use --device cpu.")
        return Metal()
    present = _cuda_devices()
    if word == "cpu" or (word in ("", "cuda") and present == 0):
        if word == "cuda":
            raise ConfigError("--device cuda: torch detects no CUDA device. Use --device cpu, or fix the driver.")
        return Accelerator()
    try:
        numbers = [int(part) for part in word.split(",")] if word not in ("", "cuda") else list(range(present))
    except ValueError:
        raise ConfigError(f"--device {device}: expected cpu, mps, or numbers such as 0 or 0,1.") from None
    if launch.size == 1 and len(numbers) > 1 and word not in ("", "cuda"):
        raise ConfigError(
            f"--device {device}: one process uses one device. Give one, or for train, val and compare start a process "
            f"per device: torchrun --standalone --nproc-per-node {len(numbers)} …"
        )
    missing = [number for number in numbers if not 0 <= number < present]
    if missing:
        others = f", or numbers from 0 to {present - 1}" if present else ""
        raise ConfigError(
            f"--device {device}: there is no CUDA device {missing[0]}; torch detects {present}. Use --device "
            f"cpu{others}."
        )
    # With `srun --gpus-per-task=1` each task sees one device, its own; `require_own_devices` compares them.
    place = 0 if launch.size == 1 or len(numbers) == 1 else launch.local_rank
    if place >= len(numbers):
        raise ConfigError(
            f"local rank {place} has no device: this node has {plural(len(numbers), 'device')}. Start at most "
            f"{plural(len(numbers), 'rank')} per node, or use --device cpu.",
            reporter=launch.rank,  # other ranks have devices
        )
    return Cuda(torch.device("cuda", numbers[place]))


def default_device() -> str:
    """Return the device of a run without `--device`, for `--help`; no device is initialised."""
    present = _cuda_devices()
    return f"cuda ({present} present)" if present else "cpu"


def _cuda_devices() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def accelerator_of(device: torch.device) -> Accelerator:
    """Return the accelerator of a torch device."""
    return {"cpu": Accelerator, "cuda": Cuda, "mps": Metal}[device.type](device)


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
