"""Ranks of a job from the view of one rank: rank numbers, collectives, control messages.

The default group (NCCL on CUDA, else gloo) carries gradients and counts. A second gloo group carries control messages,
so that long work on the host never hits the timeout of the device's collectives. A TCP store carries what must not wait
for all ranks, such as the failure of one.
"""

from __future__ import annotations

import json
import pickle
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import _get_default_store

from tessera.utils.environment import Launch, control_timeout_s
from tessera.utils.errors import Interrupted, UserError, exit_code_of
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.machine.host import affinity, cpu_quota, cpus_of_process
from tessera.utils.ranks.failures import PeerError
from tessera.utils.ranks.liveness import POLL_S, Heartbeat, Watchdog, describe_rank, read
from tessera.utils.text import plural

T = TypeVar("T")


class CollectiveError(RuntimeError):
    """A collective failed: the other end of a connection is gone, or did not answer in time.

    gloo raises RuntimeError for that, as torch does for every bug.
    """


class Collectives:
    """Collectives over all ranks; `control` is the gloo group that carries picklable values.

    Each is referenced until gloo has released it. gloo runs a collective in its own thread; if that thread holds the
    last reference, it enters the interpreter to free the tensors. A fork at that moment deadlocks the child before
    CPython 3.12 (`_PyThreadState_DeleteExcept`), and a loader worker never starts. torch's object collectives release
    theirs immediately.
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
        received = value if is_source else _unpickled(data)
        _empty(data)
        return received

    def all_gather(self, value: T) -> list[T]:
        """Return every rank's value, by rank, on every rank."""
        text = pickle.dumps(value)
        lengths = list(torch.zeros(dist.get_world_size(), 1, dtype=torch.int64))
        self._wait(dist.all_gather(lengths, torch.tensor([len(text)]), group=self._control, async_op=True))
        data = _bytes(text, max(map(int, lengths)))
        rows = [torch.empty_like(data) for _ in lengths]
        self._wait(dist.all_gather(rows, data, group=self._control, async_op=True))
        values = [_unpickled(row) for row in rows]
        for tensor in (data, *rows):
            _empty(tensor)
        return values

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, by rank, on rank 0; [] on the others.

        Values are sent one by one, so that rank 0 holds one message beside them. gloo's gather pads all messages to the
        longest and holds everything twice.
        """
        try:
            if dist.get_rank() > 0:
                dist.send_object_list([value], 0, group=self._control)
                return []
            values = [value]
            for source in range(1, dist.get_world_size()):
                received: list[Any] = [None]
                dist.recv_object_list(received, source, group=self._control)
                values += received
        except RuntimeError as error:
            raise CollectiveError(str(error)) from error
        return values

    def _wait(self, work: dist.Work | None) -> None:
        """Wait for a collective, and reference it for a while."""
        assert work is not None, "this rank is not in the group"
        try:
            work.wait()
        except RuntimeError as error:
            raise CollectiveError(str(error)) from error
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


def _unpickled(data: Tensor) -> Any:
    return pickle.loads(data.numpy().data)  # from a rank of this job; it may be longer than the value


def _empty(data: Tensor) -> None:
    """Free the memory of a tensor that a collective still references."""
    data.set_(torch.UntypedStorage())


class World:
    """The ranks of this job. `World()` is a single rank on the CPU without a process group.

    Attributes:
        rank, size: number of this rank, and of ranks.
        local_rank, local_size: the same on this node.
        node: number of this node, from 0 in the order of ranks.
        first_of_node: the first rank on this node.
        store: the store of this session; None for a single rank.
        cpus: processors of this rank, at least 1; see `cpus_of_process`.
        device: torch device of the accelerator.
    """

    def __init__(
        self,
        launch: Launch | None = None,
        accelerator: Accelerator | None = None,
        collectives: Collectives | None = None,
        store: Store | None = None,
        heartbeat: Heartbeat | None = None,
        memory: Store | None = None,
        watchdog: Watchdog | None = None,
    ) -> None:
        launch = launch or Launch()
        self.rank, self.size = launch.rank, launch.size
        self.local_rank = launch.local_rank
        self.accelerator = accelerator or Accelerator()
        self.device = self.accelerator.device
        self.collectives = collectives or Collectives()
        self.store = store
        self._heartbeat, self._memory, self._watchdog = heartbeat, memory, watchdog
        mine = affinity()
        self._hosts, local_ranks, affinities = zip(
            *self.all_gather((socket.gethostname(), self.local_rank, mine)), strict=True
        )
        firsts = [rank for rank, local in enumerate(local_ranks) if local == 0]
        node_firsts = [_first_of_node(rank, self._hosts, firsts) for rank in range(self.size)]
        self.first_of_node = node_firsts[self.rank]
        self.node = firsts.index(self.first_of_node)
        self._node_ranks = [rank for rank, first in enumerate(node_firsts) if first == self.first_of_node]
        self.local_size = len(self._node_ranks)
        self.cpus = cpus_of_process(mine, [affinities[rank] for rank in self._node_ranks], cpu_quota())

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes and prints."""
        return self.rank == 0

    def describe(self) -> str:
        """Return the ranks of each host and this rank's device, such as "3 ranks (2 on a, 1 on b), cpu"."""
        ranks = ", ".join(f"{count} on {host}" for host, count in Counter(self._hosts).items())
        return f"{plural(self.size, 'rank')} ({ranks}), {self.accelerator.name}"

    # Control messages: any picklable value, over gloo.

    def broadcast(self, value: T, source: int = 0) -> T:
        """Return the value of rank `source` on every rank."""
        with self._control_message():
            return self.collectives.broadcast(value, source) if self.size > 1 else value

    def all_gather(self, value: T) -> list[T]:
        """Return every rank's value, by rank, on every rank."""
        with self._control_message():
            return self.collectives.all_gather(value) if self.size > 1 else [value]

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, by rank, on rank 0, and [] on the others; for large values."""
        with self._control_message():
            return self.collectives.gather(value) if self.size > 1 else [value]

    @contextmanager
    def _control_message(self) -> Iterator[None]:
        """Count a control message; if it times out, raise UserError with the missing ranks and their activity."""
        if self._heartbeat is None:
            yield
            return
        self._heartbeat.messages += 1
        started = time.monotonic()
        try:
            yield
        except CollectiveError as error:
            waited, number = time.monotonic() - started, self._heartbeat.messages
            if waited < control_timeout_s() * 0.9:
                raise  # a peer is gone: its own rank or the launcher reports it
            statuses = enumerate(self._heartbeat.statuses())
            missing = [describe_rank(rank, s) for rank, s in statuses if s is None or s.messages < number]
            raise UserError(
                f"control message {number} has waited {waited:.0f} s ({self._heartbeat.activity}) for "
                f"{', '.join(missing) or 'a rank that came too late'}. Find out what holds it up, or raise "
                f"TESSERA_CONTROL_TIMEOUT (seconds)."
            ) from error

    def set_activity(self, activity: str) -> None:
        """Publish this rank's current work, for the messages of ranks that wait for it."""
        if self._heartbeat is not None:
            self._heartbeat.activity = activity

    @contextmanager
    def advising(self, advice: Callable[[], str]) -> Iterator[None]:
        """Let each failure in the body end with the line that `advice` returns, whichever thread reports it."""
        if self._watchdog is not None:
            self._watchdog.advice = advice
        try:
            yield
        except BaseException as error:
            if line := advice():
                error.add_note(line)
            raise  # a thread may still report it
        if self._watchdog is not None:
            self._watchdog.advice = str

    def remember(self, key: str, text: str) -> None:
        """Store rank 0's text for this call of `open_world` in torchrun's store, over restarts of the ranks."""
        if self.is_main and self._memory is not None:
            self._memory.set(key, text)

    def recall(self, key: str) -> str | None:
        """Return the text that rank 0 stored for this call, on every rank; None without one."""
        return self.broadcast(read(self._memory, key) if self.is_main and self._memory is not None else None)

    def node_first(self, value: T) -> T:
        """Return the value of the first rank on this node."""
        return self.all_gather(value)[self.first_of_node]

    def node_gather(self, value: T) -> list[T]:
        """Return the value of every rank of this node, by rank; all ranks of all nodes call it."""
        values = self.all_gather(value)
        return [values[rank] for rank in self._node_ranks]

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self.all_gather(None)

    def run_on_main(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 while the others wait; return its result, or raise its error, on every rank."""
        result, failed = None, None
        if self.is_main:
            try:
                result = work()
            except (Exception, Interrupted) as error:
                self.broadcast((None, (str(error), exit_code_of(error))))
                raise
        result, failed = self.broadcast((result, failed))
        if failed is not None:
            raise PeerError(*failed)
        return cast(T, result)

    # Tensors of the step: on the device, over the default group.

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over the ranks, in place, and return it."""
        return self.collectives.all_reduce(tensor) if self.size > 1 else tensor

    def begin_sum(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start to sum `tensor` over the ranks, in place; the returned function waits for the result."""
        return self.collectives.begin_all_reduce(tensor) if self.size > 1 else lambda: tensor


def _first_of_node(rank: int, hosts: Sequence[str], firsts: Sequence[int]) -> int:
    """Return the first rank on the node of `rank`; where hosts share a name, the nearest one before `rank`."""
    own = [first for first in firsts if hosts[first] == hosts[rank]]
    return max((first for first in own if first <= rank), default=own[0] if own else rank)


@contextmanager
def torch_distributed_zero_first(local_rank: int, world: World | None = None) -> Iterator[dict[str, str]]:
    """Run the body on the first rank of each node, and then, after all of these, on the other ranks.

    For caches, which the first rank builds. The body gets a dict: what a first rank puts into it, the other ranks of
    its node receive. Waiting has no time limit. If a first rank fails, the others raise PeerError.

    Args:
        local_rank: this rank on its node; 0 or -1 = the first.
        world: the ranks; None = those of torch's default process group, if there is one.
    """
    if world is not None:
        rank, size, first, store = world.rank, world.size, world.first_of_node, world.store
    elif dist.is_initialized():
        rank, size, store = dist.get_rank(), dist.get_world_size(), _get_default_store()
        first = rank - max(local_rank, 0)
    else:
        rank, size, first, store = 0, 1, 0, None
    if size == 1 or store is None:
        yield {}
        return
    # All ranks call this equally often, so each counts its own calls.
    turn = f"zero_first/{store.add(f'zero_first/{rank}', 1)}"
    shared: dict[str, str] = {}
    if local_rank in (-1, 0):
        try:
            yield shared
        except BaseException as error:
            store.set(f"{turn}/over", f"{exit_code_of(error)} {rank} {error}")
            raise
        store.set(f"{turn}/{rank}", json.dumps(shared))
    # The last rank to arrive sets the one key that the others wait for.
    if store.add(f"{turn}/came", 1) == size:
        store.set(f"{turn}/over", "")
    if local_rank not in (-1, 0):
        while (failure := read(store, f"{turn}/over")) is None:
            time.sleep(POLL_S)
        if failure:
            code, reporter, message = failure.split(" ", 2)
            raise PeerError(message, int(code), int(reporter))
        yield json.loads(read(store, f"{turn}/{first}") or "{}")  # {} on a node without a local rank 0
