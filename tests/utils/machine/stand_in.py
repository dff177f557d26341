"""A device with CUDA's manners, on the CPU: the control flow of the CUDA side runs in tests without a GPU.

What differs from the CPU, as on CUDA:

- What is sent to it is not there at once: an upload is noise until it is waited for.
- Flags are read a step late.
- A moment of its queue has passed only once something later, or the moment itself, was waited for.
- Reading a value of it stalls: `waits` counts such reads, and inside `no_waiting()` they are errors.
- Its memory ends: tensors beyond `capacity` bytes raise torch.OutOfMemoryError.

Values of the device are ordinary CPU tensors; which ones they are follows from what they were computed from: an upload
is one, and so is every result of an operation on one.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from utils.machine.accelerator import Accelerator
from utils.machine.batch_norm import BatchNormParts

# Methods that bring a value to the host, and operations whose result's size depends on values.
WAITING = {
    "item",
    "tolist",
    "numpy",
    "cpu",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__array__",
    "__contains__",
}
WAITING |= {"nonzero", "equal", "allclose", "masked_select", "unique", "bincount", "argwhere"}


@dataclass(frozen=True)
class Moment:
    """A point in the stand-in's queue: its number, from 1, and the host's time."""

    number: int
    time: float


class StandIn(Accelerator):
    """The stand-in; a context manager, inside which it keeps the books of its tensors.

    Args:
        capacity: bytes of its memory.

    Attributes:
        waits: how often the host has waited for it.
        uploads: batches and tensors sent to it.
    """

    batch_norm = BatchNormParts()
    asynchronous = True
    measures_memory = True

    def __init__(self, capacity: int = 2**40) -> None:
        super().__init__()
        self.capacity = capacity
        self.waits = self.uploads = 0
        self.deterministic = False
        self._values: weakref.WeakSet[Any] = weakref.WeakSet()  # storages that are the device's
        self._live = self._peak = 0
        self._moments = self._passed = 0  # how many there were, and how many of them the device is known to have passed
        self._may_wait = True
        self._modes = ExitStack()

    def __enter__(self) -> StandIn:
        self._modes.enter_context(_Computing(self))
        self._modes.enter_context(_Reading(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._modes.close()

    @contextmanager
    def no_waiting(self) -> Iterator[None]:
        """Inside, waiting for the device is an error."""
        before, self._may_wait = self._may_wait, False
        try:
            yield
        finally:
            self._may_wait = before

    @property
    def name(self) -> str:
        """As in Accelerator."""
        return "stand-in"

    def set_deterministic(self, on: bool) -> None:
        """As in Accelerator."""
        self.deterministic = on

    def upload(self, tensor: Tensor) -> Callable[[], Tensor]:
        """As in Accelerator; the copy happens when it is waited for."""
        self.uploads += 1
        sent = torch.full_like(tensor, 77)
        self.own(sent)

        def arrived() -> Tensor:
            sent.copy_(tensor)
            return sent

        return arrived

    def _send(self, tensor: Tensor) -> Tensor:
        self.uploads += 1
        sent = tensor.clone()
        self.own(sent)
        return sent

    def read_back(self, tensor: Tensor) -> Callable[[], Tensor]:
        """As in Accelerator: the values of now, for the host."""
        with torch.no_grad():
            values = tensor.clone()
        self._values.discard(values.untyped_storage())
        moments = self._moments

        def arrived() -> Tensor:
            self._passed = max(self._passed, moments)
            return values

        return arrived

    def synchronize(self) -> None:
        """As in Accelerator."""
        self.wait("synchronize")

    def moment(self) -> Moment:
        """As in Accelerator."""
        self._moments += 1
        return Moment(self._moments, time.perf_counter())

    def seconds(self, start: Moment, end: Moment) -> float:
        """As in Accelerator; a moment that nothing has waited for yet is waited for."""
        if end.number > self._passed:
            self.wait("seconds")
        return end.time - start.time

    def free_memory(self) -> int:
        """As in Accelerator."""
        return self.capacity - self._live

    def allocated_memory(self) -> int:
        """As in Accelerator."""
        return self._live

    def reserved_memory(self) -> int:
        """As in Accelerator."""
        return self._live

    def peak_memory(self) -> int:
        """As in Accelerator."""
        return self._peak

    def reset_peak_memory(self) -> None:
        """As in Accelerator."""
        self._peak = self._live

    def is_out_of_memory(self, error: BaseException) -> bool:
        """As in Accelerator."""
        return isinstance(error, torch.OutOfMemoryError) or super().is_out_of_memory(error)

    # The books

    def own(self, tensor: Tensor) -> None:
        """Count `tensor` as a value of the device."""
        self._values.add(tensor.untyped_storage())

    def owns(self, tensor: Tensor) -> bool:
        """Whether `tensor` is a value of the device."""
        return tensor.untyped_storage() in self._values

    def wait(self, what: str) -> None:
        """The host waits for the device."""
        if not self._may_wait:
            raise RuntimeError(f"the host waits for the device: {what}")
        self.waits += 1
        self._passed = self._moments

    def allocate(self, storage: torch.UntypedStorage) -> None:
        """Take memory for a value.

        Raises:
            torch.OutOfMemoryError: there is not enough.
        """
        size = storage.nbytes()
        if self._live + size > self.capacity:
            raise torch.OutOfMemoryError(f"stand-in out of memory: {size} bytes asked, {self.free_memory()} free")
        self._live += size
        self._peak = max(self._peak, self._live)
        weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self._live -= size


class _Computing(TorchDispatchMode):
    """Every operation, backward ones included: what is computed from the device's values is the device's."""

    def __init__(self, device: StandIn) -> None:
        super().__init__()
        self._device = device
        self._counted: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        is_value = any(self._device.owns(x) for x in inputs if _is_real(x))
        for tensor in tree_leaves((result, args if func._schema.is_mutable else ())):
            if not isinstance(tensor, Tensor) or not _is_real(tensor):
                continue
            storage = tensor.untyped_storage()
            if storage not in self._counted:
                self._counted.add(storage)
                self._device.allocate(storage)
            if is_value:
                self._device.own(tensor)
        return result


class _Reading(TorchFunctionMode):
    """Every call of torch's own functions: those that read a value of the device wait for it."""

    def __init__(self, device: StandIn) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in WAITING and isinstance(args[0], Tensor) and _is_real(args[0]) and self._device.owns(args[0]):
            self._device.wait(name)
        elif name in ("__getitem__", "__setitem__") and _has_mask(args[1], self._device):
            self._device.wait(f"{name} with a mask")
        return func(*args, **(kwargs or {}))


def _has_mask(index: Any, device: StandIn) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, Tensor) and part.dtype == torch.bool and device.owns(part) for part in parts)


def _is_real(tensor: Tensor) -> bool:
    return not tensor.is_meta and tensor.layout == torch.strided
