"""Stand-in for CUDA on the CPU: tests run the control flow of the CUDA side without a GPU.

Its tensors are ordinary CPU tensors: uploads, and results of operations on them. As on CUDA:

- A copy from or to it is noise until it is waited for.
- Flags are read a step late.
- An event has passed only after a wait for it, or for something later.
- Reading a value blocks the host: `waits` counts such reads, and inside `no_waiting()` they are errors.
- Tensors beyond `capacity` bytes raise torch.OutOfMemoryError.
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

from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.machine.batch_norm import BatchNormParts

# What brings values to the host without an operation that a dispatch mode would see on the CPU.
READING = {"tolist", "numpy", "cpu", "__array__", "allclose"}
# Operations whose result, or the shape of it, depends on values.
WAITING = {
    "_local_scalar_dense",  # item(), bool(), int(), float()
    "is_nonzero",
    "equal",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
}
CHECKED = {"index_put", "index_put_"}  # by a caller; autograd's own calls are not
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}


@dataclass(frozen=True)
class Recorded:
    """An event in the stand-in's queue: its number, from 1, and the host's time."""

    number: int
    time: float


class StandIn(Accelerator):
    """The stand-in, which tracks its tensors inside the context; `capacity` is its memory in bytes.

    Attributes:
        waits: number of waits of the host.
        uploads: batches and tensors sent to it.
    """

    batch_norm = BatchNormParts()
    queue_depth = 1
    measures_memory = True

    def __init__(self, capacity: int = 2**40) -> None:
        super().__init__()
        self.capacity = capacity
        self.waits = self.uploads = 0
        self.deterministic = False
        self._values: weakref.WeakSet[Any] = weakref.WeakSet()  # storages that are the device's
        self._live = self._peak = 0
        self._events = self._passed = 0  # how many there were, and how many of them the device is known to have passed
        self._copies: list[tuple[Tensor, Tensor]] = []  # to the host, with their values, until `synchronize`
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
        return "stand-in"

    def set_deterministic(self, on: bool) -> None:
        self.deterministic = on

    def upload(self, tensor: Tensor) -> Callable[[], Tensor]:
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
        with torch.no_grad():
            values = tensor.clone()
        self._values.discard(values.untyped_storage())
        events = self._events

        def arrived() -> Tensor:
            self._passed = max(self._passed, events)
            return values

        return arrived

    def to_host(self, tensor: Tensor) -> Tensor:
        """As in Accelerator; the copy happens in `synchronize`, with the values of now."""
        host = torch.full_like(tensor, 77, requires_grad=False)
        self._values.discard(host.untyped_storage())
        self._copies.append((host, self.read_back(tensor.detach())()))
        return host

    def synchronize(self) -> None:
        self.wait("synchronize")
        for host, values in self._copies:
            host.copy_(values)
        self._copies.clear()

    def record_event(self) -> Recorded:
        self._events += 1
        return Recorded(self._events, time.perf_counter())

    def elapsed_s(self, start: Recorded, end: Recorded) -> float:
        if end.number > self._passed:
            self.wait("elapsed_s")
        return end.time - start.time

    def free_memory(self) -> int:
        return self.capacity - self._live

    def allocated_memory(self) -> int:
        return self._live

    reserved_memory = allocated_memory

    def peak_memory(self) -> int:
        return self._peak

    def reset_peak_memory(self) -> None:
        self._peak = self._live

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, torch.OutOfMemoryError) or super().is_out_of_memory(error)

    # Bookkeeping

    def own(self, tensor: Tensor) -> None:
        self._values.add(tensor.untyped_storage())

    def owns(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage() in self._values

    def wait(self, what: str) -> None:
        if not self._may_wait:
            raise RuntimeError(f"the host waits for the device: {what}")
        self.waits += 1
        self._passed = self._events

    def allocate(self, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        if self._live + size > self.capacity:
            raise torch.OutOfMemoryError(f"stand-in out of memory: {size} bytes asked, {self.free_memory()} free")
        self._live += size
        self._peak = max(self._peak, self._live)
        weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self._live -= size


class _Computing(TorchDispatchMode):
    """Results of operations on the device's values are its values; a result on the host waits for them."""

    def __init__(self, device: StandIn) -> None:
        super().__init__()
        self._device = device
        self._counted: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        values = [
            x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and _is_real(x) and self._device.owns(x)
        ]
        if values and _depends_on_values(func, args, kwargs or {}, values):
            self._device.wait(str(func))
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((result, args if func._schema.is_mutable else ())):
            if not isinstance(tensor, Tensor) or not _is_real(tensor):
                continue
            storage = tensor.untyped_storage()
            if storage not in self._counted:
                self._counted.add(storage)
                self._device.allocate(storage)
            if values:
                self._device.own(tensor)
        return result


class _Reading(TorchFunctionMode):
    """Calls of torch functions that bring a value of the device to the host wait for it."""

    def __init__(self, device: StandIn) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        # The stand-in's own device is torch.device("cpu"); only the word means the host.
        words = [word for word in (*args[1:], *(kwargs or {}).values()) if isinstance(word, str)]
        to_host = name == "to" and "cpu" in words
        if (name in READING or to_host) and _is_real(args[0]) and self._device.owns(args[0]):
            self._device.wait(name)
        return func(*args, **(kwargs or {}))


def _depends_on_values(func: Any, args: Any, kwargs: Any, values: list[Tensor]) -> bool:
    name = func.overloadpacket.__name__
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if name in CHECKED and (args[3] if len(args) > 3 else kwargs.get("accumulate", False)):
        return True  # reads back the largest and the smallest index
    if name in INDEXING:  # by a mask
        return any(index is value and value.dtype == torch.bool for index in args[1] for value in values)
    return name in WAITING


def _is_real(tensor: Tensor) -> bool:
    return not tensor.is_meta and tensor.layout == torch.strided
