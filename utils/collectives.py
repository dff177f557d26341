"""Collectives, whose tensors are freed by the thread that asked for them.

gloo runs a collective in a thread of its own. If that thread is the last to hold the work, it frees the tensors, for
which it enters the interpreter. CPython before 3.12 must not fork at that moment: the child waits for good for a lock
that this thread held (`_PyThreadState_DeleteExcept`), and a loader worker never begins. So the last works stay here
until gloo has long let go of them.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

_recent: deque[dist.Work] = deque(maxlen=8)


def all_reduce(tensor: Tensor) -> Tensor:
    """Sum `tensor` over the ranks of the default group, in place, and return it."""
    return all_reduce_later(tensor)()


def all_reduce_later(tensor: Tensor) -> Callable[[], Tensor]:
    """Begin to sum `tensor` over the ranks of the default group, in place; the returned function waits for the sum."""
    work = dist.all_reduce(tensor, async_op=True)

    def wait() -> Tensor:
        _finish(work)
        return tensor

    return wait


def broadcast(value: T, source: int, group: dist.ProcessGroup) -> T:
    """The picklable value of rank `source`, on every rank of a group on the host."""
    is_source = dist.get_rank() == source
    data = _pickled(value) if is_source else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([len(data)])
    _finish(dist.broadcast(length, source, group=group, async_op=True))
    if not is_source:
        data = torch.empty(int(length), dtype=torch.uint8)
    _finish(dist.broadcast(data, source, group=group, async_op=True))
    return value if is_source else _unpickled(data)


def all_gather(value: T, group: dist.ProcessGroup) -> list[T]:
    """The picklable values of all ranks, in their order, on every rank of a group on the host."""
    data = _pickled(value)
    lengths = list(torch.zeros(group.size(), 1, dtype=torch.int64))
    _finish(dist.all_gather(lengths, torch.tensor([len(data)]), group=group, async_op=True))
    sizes = [int(length) for length in lengths]
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(data)] = data
    rows = list(torch.empty(len(sizes), len(padded), dtype=torch.uint8))
    _finish(dist.all_gather(rows, padded, group=group, async_op=True))
    return [_unpickled(row[:size]) for row, size in zip(rows, sizes, strict=True)]


def let_go() -> None:
    """Free what is kept, before the groups are destroyed."""
    _recent.clear()


def _finish(work: dist.Work | None) -> None:
    assert work is not None, "this rank is not in the group"
    work.wait()
    _recent.append(work)


def _pickled(value: object) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _unpickled(data: Tensor) -> Any:
    return pickle.loads(data.numpy().data)  # from ranks of this job
