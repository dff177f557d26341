"""A device with CUDA's manners, on the CPU: the control flow of the CUDA side runs in tests without a GPU.

What differs from the CPU, as on CUDA:

- What is sent to it, or copied from it, is not there at once: a copy is noise until it is waited for.
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
    queue_depth = 1
    measures_memory = True

    def __init__(self, capacity: int = 2**40) -> None:
        super().__init__()
        self.capacity = capacity
        self.waits = self.uploads = 0
        self.deterministic = False
        self._values: weakref.WeakSet[Any] = weakref.WeakSet()  # storages that are the device's
        self._live = self._peak = 0
        self._moments = self._passed = 0  # how many there were, and how many of them the device is known to have passed
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

    def decided(self, flag: Tensor) -> Tensor | bool:
        """As in Accelerator."""
        return flag

    def to_host(self, tensor: Tensor) -> Tensor:
        """As in Accelerator; the copy happens in `synchronize`, with the values of now."""
        host = torch.full_like(tensor, 77, requires_grad=False)
        self._values.discard(host.untyped_storage())
        self._copies.append((host, self.read_back(tensor.detach())()))
        return host

    def synchronize(self) -> None:
        """As in Accelerator."""
        self.wait("synchronize")
        for host, values in self._copies:
            host.copy_(values)
        self._copies.clear()

    def timestamp(self) -> Moment:
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
    """Every operation, backward ones included: what is computed from the device's values is the device's.

    An operation whose result, or the shape of it, depends on such values waits for them.
    """

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
    """Every call of torch's own functions: those that bring a value of the device to the host wait for it."""

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
    """Whether an operation's result, or the shape of it, depends on `values`, which are among its arguments."""
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
