"""Collectives: sums of tensors and exchanges of values over all ranks."""

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
    """Collectives over all ranks, kept alive until gloo has let go of them; without a process group, a single rank's.

    gloo runs a collective in a thread of its own. If that thread is the last to hold it, it frees the tensors, for
    which it enters the interpreter. CPython before 3.12 must not fork at that moment: the child waits forever for a
    lock that this thread held (`_PyThreadState_DeleteExcept`), and a loader worker never begins. DDP's own collectives
    need no such care: between a step and a fork there are others. `control` is a gloo group for values.
    """

    _KEPT_S = 1.0  # gloo has long let go of a collective by then

    def __init__(self, control: dist.ProcessGroup | None = None) -> None:
        self._control = control
        self._kept: deque[tuple[float, dist.Work]] = deque()

    def __deepcopy__(self, memo: dict[int, Any]) -> Collectives:
        return self  # a copy of a model sums over the same ranks

    def close(self) -> None:
        """Let go of what is kept alive, which would hold on to the groups."""
        self._kept.clear()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over the ranks, in place, and return it."""
        if dist.is_initialized():
            self._wait_and_keep(dist.all_reduce(tensor, async_op=True))
        return tensor

    def begin_all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Begin to sum `tensor` over the ranks, in place; the returned function waits for the result."""
        work = dist.all_reduce(tensor, async_op=True)

        def wait() -> Tensor:
            self._wait_and_keep(work)
            return tensor

        return wait

    def broadcast(self, value: T, source: int) -> T:
        """The value of rank `source`, on every rank; any picklable one."""
        is_source = dist.get_rank() == source
        text = pickle.dumps(value) if is_source else b""
        length = torch.tensor([len(text)])
        self._wait_and_keep(dist.broadcast(length, source, group=self._control, async_op=True))
        data = _bytes(text, int(length))
        self._wait_and_keep(dist.broadcast(data, source, group=self._control, async_op=True))
        if is_source:
            _empty(data)
            return value
        return _unpickled(data)

    def all_gather(self, value: T) -> list[T]:
        """Every rank's value, by rank, on every rank; any picklable ones."""
        text = pickle.dumps(value)
        lengths = list(torch.zeros(dist.get_world_size(), 1, dtype=torch.int64))
        self._wait_and_keep(dist.all_gather(lengths, torch.tensor([len(text)]), group=self._control, async_op=True))
        sizes = [int(length) for length in lengths]
        data = _bytes(text, max(sizes))
        rows = [torch.empty_like(data) for _ in sizes]
        self._wait_and_keep(dist.all_gather(rows, data, group=self._control, async_op=True))
        _empty(data)
        return [_unpickled(row, size) for row, size in zip(rows, sizes, strict=True)]

    def gather(self, value: T) -> list[T]:
        """Every rank's value, by rank, on rank 0, and nothing on the others; any picklable ones.

        One message after the other, so that no rank holds more than one of them beside the values: a gather of gloo's
        fills all up to the longest, and holds everything twice.
        """
        if dist.get_rank() > 0:
            text = pickle.dumps(value)
            data = _bytes(text, len(text))
            for tensor in (torch.tensor([len(text)]), data):
                self._wait_and_keep(dist.isend(tensor, 0, group=self._control))
            _empty(data)
            return []
        values = [value]
        for source in range(1, dist.get_world_size()):
            length = torch.zeros(1, dtype=torch.int64)
            self._wait_and_keep(dist.irecv(length, source, group=self._control))
            data = _bytes(b"", int(length))
            self._wait_and_keep(dist.irecv(data, source, group=self._control))
            values.append(_unpickled(data))
        return values

    def _wait_and_keep(self, work: dist.Work | None) -> None:
        assert work is not None, "this rank is not in the group"
        try:
            work.wait()
        finally:
            now = time.monotonic()
            self._kept.append((now, work))
            while now - self._kept[0][0] > self._KEPT_S:
                self._kept.popleft()


def _bytes(text: bytes, length: int) -> Tensor:
    """Return uint8 (`length`,) that begins with `text`."""
    data = torch.empty(length, dtype=torch.uint8)
    data.numpy().data[: len(text)] = text
    return data


def _unpickled(data: Tensor, length: int | None = None) -> Any:
    """The value in the first bytes of `data`, which is emptied."""
    value = pickle.loads(data.numpy().data[:length])  # from a rank of this job
    _empty(data)
    return value


def _empty(data: Tensor) -> None:
    """Free its memory, though a collective that is kept alive still holds the tensor."""
    data.set_(torch.UntypedStorage())
