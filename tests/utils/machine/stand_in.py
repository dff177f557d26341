"""Stand-in for CUDA on the CPU: tests run the control flow of the CUDA side without a GPU.

Its tensors are ordinary CPU tensors: uploads, and results of operations on them. As on CUDA:

- A copy from or to it is noise until it is waited for.
- Flags are read a step late.
- An event has passed only after a wait for it, or for something later; `waits` counts waits, but for values that the
  host reads: tests/utils/machine/fake_cuda.py refuses those.
- Tensors beyond `capacity` bytes raise torch.OutOfMemoryError.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tessera.utils.machine.accelerator import Accelerator


@dataclass(frozen=True)
class Recorded:
    """An event in the stand-in's queue: its number, from 1, and the host's time."""

    number: int
    time: float


class TensorMemory(Accelerator):
    """A device's memory of `capacity` bytes, which is that of its tensors alone."""

    measures_memory = True

    def __init__(self, device: torch.device | None = None, capacity: int = 2**40) -> None:
        super().__init__(device)
        self.capacity = capacity
        self._live = self._peak = 0
        self._storages: weakref.WeakSet[Any] = weakref.WeakSet()

    def allocate(self, tensor: Tensor) -> None:
        """Count the tensor's storage, once, as long as it lives."""
        storage = tensor.untyped_storage()
        if storage in self._storages:
            return
        self._storages.add(storage)
        size = storage.nbytes()
        if self._live + size > self.capacity:
            raise torch.OutOfMemoryError(f"{self.name} out of memory: {size} bytes asked, {self.free_memory()} free")
        self._live += size
        self._peak = max(self._peak, self._live)
        weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self._live -= size

    def free_memory(self) -> int:
        return self.capacity - self._live

    def allocated_memory(self) -> int:
        return self._live

    reserved_memory = allocated_memory

    def peak_memory(self) -> int:
        return self._peak

    def reset_peak_memory(self) -> None:
        self._peak = self._live


class StandIn(TensorMemory):
    """The stand-in, which tracks its tensors inside the context; `capacity` is its memory in bytes.

    Attributes:
        waits: number of waits of the host.
    """

    name = "stand-in"
    queue_depth = 1

    def __init__(self, capacity: int = 2**40) -> None:
        super().__init__(capacity=capacity)
        self.waits = 0
        self._events = self._passed = 0  # how many there were, and how many of them the device is known to have passed
        self._copies: list[tuple[Tensor, Tensor]] = []  # to the host, with their values, until `synchronize`
        self._mode = _Allocating(self)

    def __enter__(self) -> StandIn:
        self._mode.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._mode.__exit__(None, None, None)

    def upload(self, tensor: Tensor) -> Callable[[], Tensor]:
        sent = torch.full_like(tensor, 77)

        def arrived() -> Tensor:
            sent.copy_(tensor)
            return sent

        return arrived

    def _send(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def read_back(self, tensor: Tensor) -> Callable[[], Tensor]:
        with torch.no_grad():
            values = tensor.clone()
        events = self._events

        def arrived() -> Tensor:
            self._passed = max(self._passed, events)
            return values

        return arrived

    def to_host(self, tensor: Tensor) -> Tensor:
        """As in Accelerator; the copy happens in `synchronize`, with the values of now."""
        host = torch.full_like(tensor, 77, requires_grad=False)
        self._copies.append((host, self.read_back(tensor.detach())()))
        return host

    def synchronize(self) -> None:
        self.wait()
        for host, values in self._copies:
            host.copy_(values)
        self._copies.clear()

    def record_event(self) -> Recorded:
        self._events += 1
        return Recorded(self._events, time.perf_counter())

    def elapsed_s(self, start: Recorded, end: Recorded) -> float:
        if end.number > self._passed:
            self.wait()
        return end.time - start.time

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, torch.OutOfMemoryError) or super().is_out_of_memory(error)

    def wait(self) -> None:
        self.waits += 1
        self._passed = self._events


class _Allocating(TorchDispatchMode):
    """Results of operations take memory of the device."""

    def __init__(self, device: StandIn) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and not tensor.is_meta and tensor.layout == torch.strided:
                self._device.allocate(tensor)
        return result
