"""All that touches torch.distributed: the ranks of a job and what they tell one another.

Two groups: the default one (NCCL on CUDA, gloo otherwise) carries gradients and counts; a gloo group of its own carries
control messages, so that host work of any length never trips a collective of the device. A TCP store carries what must
not wait for everybody: "the first rank of my node is done", "rank 3 has failed".
"""

from __future__ import annotations

import inspect
import itertools
import pickle
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from utils.environment import Launch, control_timeout_s, peer_timeout_s
from utils.errors import ConfigError, Interrupted, UserError, explained
from utils.machine.accelerator import Accelerator
from utils.machine.choose import choose_accelerator
from utils.ranks.heartbeat import FAILURE_KEY, STORE_LOST, Pulse, is_gone
from utils.ranks.rendezvous import JOINING_TIMEOUT, meet
from utils.ranks.stack_dumps import answer_where
from utils.ranks.sync_batchnorm import SyncBatchNorm2d

T = TypeVar("T")


class PeerError(UserError):
    """Another rank failed; it has told why, so this rank ends without a word."""


class World:
    """The ranks of this job, as one of them sees them. `World()` is a single rank on the CPU, and needs no group.

    Attributes:
        rank, size: this rank among all.
        local_rank, local_size: this rank on its node.
        node: number of this node, from 0 in the order of ranks.
        accelerator: what this rank computes on.
        device: the same as torch knows it.
    """

    def __init__(
        self,
        launch: Launch | None = None,
        accelerator: Accelerator | None = None,
        store: Store | None = None,
        control: dist.ProcessGroup | None = None,
        pulse: Pulse | None = None,
        memory: Store | None = None,
    ) -> None:
        launch = launch or Launch()
        self.launch = launch
        self.rank, self.size = launch.rank, launch.size
        self.local_rank, self.local_size = launch.local_rank, launch.local_size
        self.accelerator = accelerator or Accelerator()
        self.device = self.accelerator.device
        self.store = store
        self._control, self._pulse, self._memory = control, pulse, memory
        self._firsts = itertools.count()
        places = self.all_gather((socket.gethostname(), self.local_rank))
        host = places[self.rank][0]
        # Test hosts may share a name: of several first ranks, the nearest before this one is its own.
        own = [r for r in range(self.size) if places[r] == (host, 0)]
        self._node_first = max((r for r in own if r <= self.rank), default=own[0] if own else self.rank)
        self.node = [r for r, (_, local) in enumerate(places) if local == 0].index(self._node_first)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes and prints."""
        return self.rank == 0

    @property
    def control_messages(self) -> int:
        """Control messages so far: none in a step."""
        return self._pulse.messages if self._pulse is not None else 0

    # Control messages: any picklable value, over gloo, on the host.

    def broadcast(self, value: T, source: int = 0) -> T:
        """Return the value of rank `source` on every rank."""
        if self.size == 1:
            return value
        with self._control_message() as group:
            return _broadcast(value, source, group)

    def all_gather(self, value: T) -> list[T]:
        """Return every rank's value, by rank, on every rank."""
        if self.size == 1:
            return [value]
        with self._control_message() as group:
            return _all_gather(value, group)

    @contextmanager
    def _control_message(self) -> Iterator[dist.ProcessGroup]:
        """Around a control message: counted, and when time runs out, explained by who has not come and what it does."""
        assert self._pulse is not None and self._control is not None
        self._pulse.messages += 1
        started = time.monotonic()
        try:
            yield self._control
        except RuntimeError as error:
            waited = time.monotonic() - started
            if waited < control_timeout_s() * 0.9:
                raise  # a peer is gone, which its own rank or the launcher reports
            number = self._pulse.messages
            missing = [
                f"rank {rank} on {sign.host} (last: {sign.doing})" if sign else f"rank {rank} (gave no sign of life)"
                for rank, sign in enumerate(self._pulse.signs())
                if sign is None or sign.messages < number
            ]
            raise UserError(
                f"control message {number} has waited {waited:.0f} s ({self._pulse.doing}) for "
                f"{', '.join(missing) or 'a rank that came too late'}. Find out what holds it, or raise "
                f"TESSERA_CONTROL_TIMEOUT (seconds)."
            ) from error

    def doing(self, what: str) -> None:
        """Tell the other ranks what this one is about to do: they name it where they wait in vain."""
        if self._pulse is not None:
            self._pulse.doing = what

    def remember(self, key: str, value: str) -> None:
        """Keep a text for as long as the launcher lives, over restarts of the ranks."""
        if self._memory is not None:
            self._memory.set(f"tessera/{key}", value)

    def recall(self, key: str) -> str | None:
        """A text that was kept before; None where there is none."""
        if self._memory is None or not self._memory.check([f"tessera/{key}"]):
            return None
        return self._memory.get(f"tessera/{key}").decode()

    def node_first(self, value: T) -> T:
        """Return the value of the first rank on this node."""
        return self.all_gather(value)[self._node_first]

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.all_gather(None)

    def from_main(self, work: Callable[[], T]) -> T:
        """Let rank 0 do `work` while the others wait; return its result, or raise its error, on every rank."""
        result: T | None = None
        failure: Exception | None = None
        if self.is_main:
            try:
                result = work()
            except Exception as error:
                failure = error
        said = (str(failure), getattr(failure, "exit_code", 1)) if failure else None
        result, said = self.broadcast((result, said))
        if failure is not None:
            raise failure
        if said is not None:
            raise _peer_error(*said)
        return cast(T, result)

    # Numbers of the step: on the device, over the default group.

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over the ranks, in place, and return it."""
        return _all_reduce(tensor) if self.size > 1 else tensor

    def sum_later(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Begin to sum `tensor` over the ranks, in place; the returned function waits for the result."""
        if self.size == 1:
            return lambda: tensor
        work = dist.all_reduce(tensor, async_op=True)

        def wait() -> Tensor:
            _wait_and_keep(work)
            return tensor

        return wait

    # Failure.

    def announce_failure(self) -> bool | None:
        """Claim to be the first rank to fail. False where another one was, which then speaks for all; None where the
        store is gone, and nobody can tell."""
        if self.store is None:
            return True
        me = str(self.rank)
        try:
            return bool(self.store.compare_set(FAILURE_KEY, "", me).decode() == me)
        except (RuntimeError, OSError):
            return None


_current: World | None = None


@contextmanager
def open_world(device: str = "", local_rank: int = -1, batch_size: int = 0) -> Iterator[World]:
    """Join the job that the launcher describes; leave it on the way out, however that is.

    Args:
        device: `--device`: "", "cpu", "mps", "0" or "0,1".
        local_rank: `--local-rank` of torch.distributed.launch; the environment wins.
        batch_size: images a batch over all ranks, checked before anybody waits; 0 or -1 = not checked.

    Raises:
        ConfigError: a device that is not there, or a batch that the ranks do not divide.
    """
    global _current
    launch = Launch.from_environment(local_rank)
    chosen = choose_accelerator(device, launch)
    check_batch_size(batch_size, launch.size)
    chosen.activate()
    if launch.size == 1:
        # A rank that is alone, because the others are gone or never were, can be restarted too.
        _current = World(launch, chosen, memory=_connect(launch) if launch.has_store else None)
        try:
            yield _current
        finally:
            _current = None
        return
    joined = _join(launch)
    session = meet(joined, launch.rank, launch.size)
    dist.init_process_group(
        chosen.backend,
        store=PrefixStore(f"default/{session}", joined),
        rank=launch.rank,
        world_size=launch.size,
        device_id=chosen.group_device,
    )
    pulse: Pulse | None = None
    failed = False
    try:
        control = dist.new_group(backend="gloo", timeout=timedelta(seconds=control_timeout_s()))
        assert isinstance(control, dist.ProcessGroup)
        memory = _connect(launch)
        store = PrefixStore(f"tessera/{session}", memory)
        pulse = Pulse(store, launch.rank, launch.size, socket.gethostname(), peer_timeout_s())
        _current = World(launch, chosen, store, control, pulse, memory)
        yield _current
    except Interrupted:
        _outlast_the_launcher()
        raise
    except PeerError:
        failed = True
        raise
    except Exception as error:
        failed = True
        broken = pulse is not None and _is_lost_connection(error)
        _outlast_the_launcher()
        lost = pulse.silent() if pulse is not None and broken else []
        error.speaks = _current is None or _current.announce_failure()  # type: ignore[attr-defined]
        no_store = error.speaks is None  # type: ignore[attr-defined]
        if no_store:
            error.speaks = True  # type: ignore[attr-defined]
        if broken and no_store:
            gone = UserError(STORE_LOST)
        elif lost:
            gone = UserError(is_gone(lost))
        else:
            raise
        gone.speaks = error.speaks  # type: ignore[attr-defined]
        raise gone from error
    except BaseException:  # a second Ctrl-C
        failed = True
        raise
    finally:
        _current = None
        if pulse is not None:
            pulse.close()
        _kept_works.clear()  # they would hold on to the groups
        if not (failed and chosen.group_waits_for_all):  # it would wait for ranks that wait for this one
            dist.destroy_process_group()


_reports = False  # whether run_rank tells of this process's end


def _outlast_the_launcher() -> None:
    """From now on overhear SIGTERM: torchrun sends it as soon as one rank is gone, and this one is about to end too.

    Only in a process that ends after that anyway.
    """
    if _reports:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _is_lost_connection(error: Exception) -> bool:
    """Whether a collective failed because another rank's end of the line did."""
    text = str(error)
    return isinstance(error, RuntimeError) and any(word in text for word in ("onnection", "ocket", "peer", "NCCL"))


def _join(launch: Launch) -> Store:
    """The job's store: torchrun's own, or one that rank 0 opens."""
    if launch.launcher == "torchrun":
        store, _, _ = next(rendezvous("env://"))
        return store
    assert launch.address is not None and launch.port is not None
    is_host = launch.rank == 0
    return TCPStore(launch.address, launch.port, launch.size, is_master=is_host, timeout=JOINING_TIMEOUT)


def _connect(launch: Launch) -> Store:
    """Another connection to the job's store, on which nothing ever waits."""
    assert launch.address is not None and launch.port is not None
    return TCPStore(launch.address, launch.port, is_master=False, wait_for_workers=False, timeout=JOINING_TIMEOUT)


def check_batch_size(batch_size: int, ranks: int) -> None:
    """Refuse a global batch that the ranks do not divide.

    Raises:
        ConfigError: names the nearest sizes that work.
    """
    if batch_size > 0 and batch_size % ranks:
        below = batch_size // ranks * ranks
        sizes = f"{below} or {below + ranks}" if below else f"{ranks}"
        raise ConfigError(
            f"--batch-size {batch_size} is the batch over all ranks, and {ranks} ranks do not divide it. Use {sizes}."
        )


def _peer_error(message: str, exit_code: int) -> PeerError:
    error = PeerError(message)
    error.exit_code = exit_code
    return error


@contextmanager
def torch_distributed_zero_first(local_rank: int) -> Iterator[None]:
    """Let the first rank of each node do the body first; the others of the node follow when it is done.

    For caches: the first one builds, the others find. Where the body fails on the first rank, the others are let go
    with its error. Waiting has no time limit of its own: the first rank may need minutes.
    """
    world = _current
    if world is None or world.size == 1:
        yield
        return
    assert world.store is not None
    key = f"zero_first/{world.node}/{next(world._firsts)}"
    if local_rank in (-1, 0):
        try:
            yield
        except BaseException as error:
            world.store.set(key, f"{getattr(error, 'exit_code', 1)} {error}")
            raise
        world.store.set(key, "done")
        return
    said = _wait_for(world.store, key)
    if said != "done":
        code, message = said.split(" ", 1)
        raise _peer_error(message, int(code))
    yield


def _wait_for(store: Store, key: str) -> str:
    """Value of `key`, once it is there."""
    pause = 0.01
    while not store.check([key]):
        time.sleep(pause)
        pause = min(pause * 1.5, 0.5)
    return store.get(key).decode()


def run_rank(body: Callable[[], T]) -> tuple[int, T | None]:
    """Run one rank's program; report a failure once for the whole job.

    While it runs, SIGUSR2 to this process or to one of its loader workers prints where each of its threads is.

    Returns:
        The exit code, and the body's result (None after a failure). A user's mistake, and what `explained` knows, give
        one message; any other exception its traceback, for it is a defect.
    """
    global _reports
    launch = Launch.from_environment()
    prefix = f"rank {launch.rank}: " if launch.size > 1 else ""
    end_answers = answer_where(f"rank {launch.rank}")
    _reports = True
    try:
        return 0, body()
    except PeerError as error:
        return error.exit_code, None
    except UserError as error:
        # Before the ranks have met, all of them see the same mistake: rank 0 tells it.
        if getattr(error, "speaks", launch.rank == 0):
            print(f"{prefix}error: {error}", file=sys.stderr, flush=True)
        return error.exit_code, None
    except Interrupted as stopped:
        if launch.rank == 0:
            print(stopped, file=sys.stderr, flush=True)
        return stopped.exit_code, None
    except KeyboardInterrupt:
        if launch.rank == 0:
            print("interrupted", file=sys.stderr, flush=True)
        return 130, None
    except Exception as error:
        if getattr(error, "speaks", True):
            mistake = explained(error)
            text = f"error: {mistake}" if mistake else "".join(traceback.format_exception(error))
            print(f"{prefix}{text}", file=sys.stderr, flush=True)
        return 1, None
    finally:
        _reports = False
        end_answers()


# -------------------------------------------------------------------------------------------------- collectives

# gloo runs a collective in a thread of its own. If that thread is the last to hold the work, it frees the tensors, for
# which it enters the interpreter. CPython before 3.12 must not fork at that moment: the child waits for good for a lock
# that this thread held (`_PyThreadState_DeleteExcept`), and a loader worker never begins. So works stay here until gloo
# has long let go of them. DDP's own works go without: between a step and a fork there are other collectives.
_KEPT_S = 1.0
_kept_works: deque[tuple[float, dist.Work]] = deque()


def _wait_and_keep(work: dist.Work | None) -> None:
    assert work is not None, "this rank is not in the group"
    try:
        work.wait()
    finally:
        now = time.monotonic()
        _kept_works.append((now, work))
        while now - _kept_works[0][0] > _KEPT_S:
            _kept_works.popleft()


def _all_reduce(tensor: Tensor) -> Tensor:
    """Sum `tensor` over the ranks of the default group, in place, and return it."""
    _wait_and_keep(dist.all_reduce(tensor, async_op=True))
    return tensor


def _broadcast(value: T, source: int, group: dist.ProcessGroup) -> T:
    """The value of rank `source`, on every rank of a group on the host."""
    is_source = dist.get_rank() == source
    text = pickle.dumps(value) if is_source else b""
    length = torch.tensor([len(text)])
    _wait_and_keep(dist.broadcast(length, source, group=group, async_op=True))
    data = _bytes(text, int(length))
    _wait_and_keep(dist.broadcast(data, source, group=group, async_op=True))
    if is_source:
        _empty(data)
        return value
    return _unpickled(data)


def _all_gather(value: T, group: dist.ProcessGroup) -> list[T]:
    """Every rank's value, in their order, on every rank of a group on the host."""
    text = pickle.dumps(value)
    lengths = list(torch.zeros(group.size(), 1, dtype=torch.int64))
    _wait_and_keep(dist.all_gather(lengths, torch.tensor([len(text)]), group=group, async_op=True))
    sizes = [int(length) for length in lengths]
    data = _bytes(text, max(sizes))
    rows = [torch.empty_like(data) for _ in sizes]
    _wait_and_keep(dist.all_gather(rows, data, group=group, async_op=True))
    _empty(data)
    return [_unpickled(row, size) for row, size in zip(rows, sizes, strict=True)]


def _bytes(text: bytes, length: int) -> Tensor:
    """uint8 (`length`,) that begins with `text`."""
    data = torch.empty(length, dtype=torch.uint8)
    data.numpy().data[: len(text)] = text
    return data


def _unpickled(data: Tensor, length: int | None = None) -> Any:
    """The value in the first bytes of `data`, which is emptied."""
    value = pickle.loads(data.numpy().data[:length])  # from a rank of this job
    _empty(data)
    return value


def _empty(data: Tensor) -> None:
    """Give its memory back, though a kept work still holds the tensor."""
    data.set_(torch.UntypedStorage())


# ------------------------------------------------------------------------------------------------------- models


def smart_DDP(model: nn.Module, sync_bn: bool = False, compile: bool = False, dynamic: bool = False) -> nn.Module:
    """Wrap `model` for gradient averaging over the ranks; a single rank gets it back as it is.

    Parameter objects are kept, so an optimizer built before stays right. Buffers are not broadcast from rank 0: see
    `average_statistics`.

    Args:
        model: on this rank's device.
        sync_bn: normalise with statistics over the whole global batch, on the CPU too.
        compile: compile the model in place; its own name and parameters stay.
        dynamic: compile once for all image sizes, and not again for each.
    """
    world = _current
    if sync_bn and world is not None:
        model = _convert_sync_bn(model, world)
    if compile:
        model.compile(dynamic=dynamic)
    if world is None or world.size == 1:
        return model
    return DistributedDataParallel(
        model,
        device_ids=world.accelerator.device_ids,
        **_OWN_BUFFERS,
        gradient_as_bucket_view=True,
    )


# torch 2.13 has another name for it, and warns of the old one.
_KNOWS_SYNC = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
_OWN_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if _KNOWS_SYNC else "broadcast_buffers": False}


def gradients_stay_local(model: nn.Module) -> AbstractContextManager[None]:
    """Inside, a `smart_DDP` model only adds up this rank's own gradients: for all but the last micro-batch."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


def average_statistics(model: nn.Module) -> None:
    """Give every rank the mean of all ranks' BatchNorm running statistics, in one message.

    Without `--sync-bn` each rank's statistics come from its own images. Running statistics are linear in the batch
    statistics and unused in training, so their mean over the ranks is what one rank would have gathered from all
    images (but for the spread between the ranks' means in the variance).
    """
    world = _current
    if world is None or world.size == 1:
        return
    buffers = [
        buffer
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, _SHARED_NORMS)
        for buffer in (module.running_mean, module.running_var)
        if buffer is not None
    ]
    if not buffers:
        return
    flat = torch.cat([buffer.flatten() for buffer in buffers]).div_(world.size)
    _all_reduce(flat)
    parts = flat.split([buffer.numel() for buffer in buffers])
    torch._foreach_copy_(buffers, [part.view_as(buffer) for part, buffer in zip(parts, buffers, strict=True)])


def _convert_sync_bn(model: nn.Module, world: World) -> nn.Module:
    """Let every BatchNorm2d share its statistics, keeping parameters and buffers.

    With our own SyncBatchNorm2d a single rank computes like several would, so that their number leaves no trace.
    """
    if world.accelerator.native_sync_batchnorm:
        return nn.SyncBatchNorm.convert_sync_batchnorm(model) if world.size > 1 else model
    for module in model.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = SyncBatchNorm2d
            cast(SyncBatchNorm2d, module).sum_over_ranks = _sum_over_ranks
    return model


def _sum_over_ranks(tensor: Tensor) -> Tensor:
    """Sum over the ranks, of which there may be one."""
    return _all_reduce(tensor) if dist.is_initialized() else tensor


_SHARED_NORMS = (SyncBatchNorm2d, nn.SyncBatchNorm)  # their statistics are the same on every rank already
