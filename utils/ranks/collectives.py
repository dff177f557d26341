"""Collectives over all ranks: sums of tensors and exchange of picklable values."""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class Collectives:
    """Collectives over all ranks; `control` is the gloo group that carries values.

    Each is referenced until gloo has released it. gloo runs a collective in its own thread; if that thread holds the
    last reference, it enters the interpreter to free the tensors. A fork at that moment deadlocks the child before
    CPython 3.12 (`_PyThreadState_DeleteExcept`), and a loader worker never starts.
    """

    _HOLD_S = 1.0  # longer than gloo needs

    def __init__(self, control: dist.ProcessGroup | None = None) -> None:
        self._control = control
        self._held: deque[tuple[float, dist.Work]] = deque()

    def __deepcopy__(self, memo: dict[int, Any]) -> Collectives:
        return self  # a copy of a model sums over the same ranks

    def close(self) -> None:
        """Release the referenced collectives, which keep the process groups alive."""
        self._held.clear()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over the ranks, in place, and return it."""
        return self.begin_all_reduce(tensor)() if dist.is_initialized() else tensor

    def begin_all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start to sum `tensor` over the ranks, in place; the returned function waits for the result."""
        return self._result(dist.all_reduce(tensor, async_op=True), tensor)

    def begin_broadcast(self, tensor: Tensor, source: int) -> Callable[[], Tensor]:
        """Start to replace `tensor` by that of rank `source`; the returned function waits for the result."""
        return self._result(dist.broadcast(tensor, source, async_op=True), tensor)

    def _result(self, work: dist.Work | None, tensor: Tensor) -> Callable[[], Tensor]:
        def wait() -> Tensor:
            self._wait(work)
            return tensor

        return wait

    def broadcast(self, value: T, source: int) -> T:
        """Return the value of rank `source` on every rank."""
        is_source = dist.get_rank() == source
        text = pickle.dumps(value) if is_source else b""
        length = torch.tensor([len(text)])
        self._wait(dist.broadcast(length, source, group=self._control, async_op=True))
        data = _bytes(text, int(length))
        self._wait(dist.broadcast(data, source, group=self._control, async_op=True))
        if is_source:
            _empty(data)
            return value
        return _unpickled(data)

    def all_gather(self, value: T) -> list[T]:
        """Return every rank's value, by rank, on every rank."""
        text = pickle.dumps(value)
        lengths = list(torch.zeros(dist.get_world_size(), 1, dtype=torch.int64))
        self._wait(dist.all_gather(lengths, torch.tensor([len(text)]), group=self._control, async_op=True))
        sizes = [int(length) for length in lengths]
        data = _bytes(text, max(sizes))
        rows = [torch.empty_like(data) for _ in sizes]
        self._wait(dist.all_gather(rows, data, group=self._control, async_op=True))
        _empty(data)
        return [_unpickled(row, size) for row, size in zip(rows, sizes, strict=True)]

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, by rank, on rank 0; [] on the others.

        Values are sent one by one, so that rank 0 holds one message beside them. gloo's gather pads all messages to the
        longest and holds everything twice.
        """
        if dist.get_rank() > 0:
            text = pickle.dumps(value)
            data = _bytes(text, len(text))
            for tensor in (torch.tensor([len(text)]), data):
                self._wait(dist.isend(tensor, 0, group=self._control))
            _empty(data)
            return []
        values = [value]
        for source in range(1, dist.get_world_size()):
            length = torch.zeros(1, dtype=torch.int64)
            self._wait(dist.irecv(length, source, group=self._control))
            data = _bytes(b"", int(length))
            self._wait(dist.irecv(data, source, group=self._control))
            values.append(_unpickled(data))
        return values

    def _wait(self, work: dist.Work | None) -> None:
        """Wait for a collective, and reference it for a while."""
        assert work is not None, "this rank is not in the group"
        try:
            work.wait()
        finally:
            now = time.monotonic()
            self._held.append((now, work))
            while now - self._held[0][0] > self._HOLD_S:
                self._held.popleft()


def _bytes(text: bytes, length: int) -> Tensor:
    """Return a uint8 tensor (`length`,) that begins with `text`."""
    data = torch.empty(length, dtype=torch.uint8)
    data.numpy().data[: len(text)] = text
    return data


def _unpickled(data: Tensor, length: int | None = None) -> Any:
    """Return the value in the first `length` bytes of `data`, and free `data`."""
    value = pickle.loads(data.numpy().data[:length])  # from a rank of this job
    _empty(data)
    return value


def _empty(data: Tensor) -> None:
    """Free the memory of a tensor that a collective still references."""
    data.set_(torch.UntypedStorage())
