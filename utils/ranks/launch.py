"""Joining and leaving the job of a launcher (torchrun, srun): store, heartbeat, process groups, threads."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import _abort_process_group

from tessera.utils.environment import Launch, control_timeout_s, join_timeout_s, loader_timeout_s, over_loopback
from tessera.utils.errors import ConfigError, Interrupted, UserError, exit_code_of
from tessera.utils.machine.accelerator import Accelerator, explain_out_of_memory
from tessera.utils.machine.choose_device import choose_accelerator
from tessera.utils.machine.resource_limits import open_files_left
from tessera.utils.ranks.collectives import Collectives
from tessera.utils.ranks.failures import FirstFailure, PeerError
from tessera.utils.ranks.liveness import GRACE_S, STORE_LOST, Heartbeat, Watchdog, lost_ranks_message
from tessera.utils.ranks.rendezvous import agree_on_session, connect_to_store, open_store, require_own_devices
from tessera.utils.ranks.signals import agree_on_exit_code, ignore_sigterm
from tessera.utils.ranks.store import RestartMemory
from tessera.utils.ranks.world import World
from tessera.utils.text import first_line

_CLAIM_S = 2.0
_FILES = 2  # per rank: a connection of the default group and one of the control group
_REMEDY = "Name the interface that the hosts share: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME."


@contextmanager
def open_world(
    device: str = "",
    local_rank: int = -1,
    batch_size: int = 0,
    call: str = "",
    threads: int = 0,
    launch: Launch | None = None,
) -> Iterator[World]:
    """Join the job that the launcher describes; leave it on exit.

    Args:
        device: `--device`.
        local_rank: `--local-rank` of torch.distributed.launch; environment variables take precedence.
        batch_size: images in a global batch, checked before any rank waits; 0 or -1 = not checked.
        call: description of the work, the same after a restart; see `RestartMemory`.
        threads: CPU threads of this rank's computation; 0 = one per processor of the rank.
        launch: None = from the environment.
    """
    if launch is None:
        launch = Launch.from_environment(local_rank)
        if launch.problem:
            raise ConfigError(launch.problem)
    accelerator = choose_accelerator(device, launch)
    check_batch_size(batch_size, launch.size)
    accelerator.activate()
    if launch.size == 1 and not launch.has_store:
        world = World(launch, accelerator)
        with _own_settings(world, threads):
            yield world
        return
    server = f"{launch.server} on {launch.address}:{launch.port}, which serves the job's store,"
    with closing(Watchdog(launch.rank, server)) as watchdog:
        join = _single if launch.size == 1 else _joined
        with join(launch, accelerator, watchdog, call) as world, _own_settings(world, threads):
            yield world


@contextmanager
def _single(launch: Launch, accelerator: Accelerator, watchdog: Watchdog, call: str) -> Iterator[World]:
    """Join as a single rank, which torchrun can restart: an elastic job may have lost its other ranks."""
    try:
        memory = RestartMemory(watchdog.watched(connect_to_store(launch, watchdog)), call)
        yield World(launch, accelerator, memory=memory, watchdog=watchdog)
    except dist.DistNetworkError as error:
        raise UserError(STORE_LOST, reporter=launch.rank) from error


@contextmanager
def _joined(launch: Launch, accelerator: Accelerator, watchdog: Watchdog, call: str) -> Iterator[World]:
    """Join as one of several ranks. The heartbeat starts before the groups: a rank may die while they are made.

    A waiting call blocks its connection to the store. So torch's process groups have one connection, and the ranks' own
    keys another, which is watched.
    """
    open_files_left(2 * _FILES * launch.size)  # raises the limit; all ranks also connect to a store on rank 0
    for_groups = open_store(launch, watchdog)
    try:
        session = agree_on_session(watchdog.watched(for_groups), launch.rank, launch.size, join_timeout_s())
        of_job = connect_to_store(launch, watchdog)
        store = watchdog.watched(PrefixStore(f"tessera/{session}", of_job))
        memory = RestartMemory(watchdog.watched(of_job), call)
        heartbeat = Heartbeat(store, launch.rank, launch.size)
    except RuntimeError as error:
        raise UserError(STORE_LOST, reporter=launch.rank) from error
    agree_on_exit_code(lambda code: _claimed_code(code, launch.rank, store))
    collectives: Collectives | None = None
    failed = True
    try:
        notice = "" if launch.rank else f"All ranks have joined and are connecting. If this hangs: {_REMEDY}"
        with watchdog.watch("The network between the ranks", join_timeout_s(), notice):
            control = _make_groups(launch, accelerator, PrefixStore(f"default/{session}", for_groups), heartbeat)
        collectives = Collectives(control)
        if launch.rank and not launch.has_store and (server := heartbeat.status_of(0)) is not None:
            watchdog.server_pid = server.pid_here
        yield World(launch, accelerator, collectives, store, heartbeat, memory, watchdog)
        if accelerator.group_waits_for_all:
            collectives.all_gather(None)  # no watchdog must end a rank that still closes its trackers
        failed = False
    except Interrupted as stopped:
        ignore_sigterm()
        failed = not stopped.saved
        raise (stopped if stopped.saved else _with_reporter(stopped, launch.rank, store, heartbeat)) from None
    except Exception as error:
        ignore_sigterm()
        settled = _with_reporter(error, launch.rank, store, heartbeat)
        if settled is error:
            raise
        raise settled from error
    finally:
        heartbeat.close(serves_store=launch.rank == 0 and not launch.has_store)
        if collectives is not None:
            collectives.close()
        if dist.is_initialized():
            if failed and accelerator.group_waits_for_all:  # for ranks that wait for this one
                abort = threading.Thread(target=_abort_process_group, args=(dist.group.WORLD,), daemon=True)
                abort.start()
                abort.join(GRACE_S)
            else:
                with watchdog.watch("The other ranks' part in ending the process group"):
                    dist.destroy_process_group()


@contextmanager
def _own_settings(world: World, threads: int) -> Iterator[None]:
    """Let torch compute float32 in full, with `threads` threads; 0 = at most one per processor of this rank.

    torch's default ignores CPU quotas and other ranks. ONNX Runtime and OpenVINO take as many threads as torch.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads or min(before, world.cpus))
    try:
        with world.accelerator.full_float32():
            yield
    finally:
        torch.set_num_threads(before)


def _make_groups(launch: Launch, accelerator: Accelerator, store: Store, heartbeat: Heartbeat) -> dist.ProcessGroup:
    """Make the default group; return the control group."""
    needed = _FILES * launch.size
    if (left := open_files_left(needed)) < needed:
        raise UserError(
            f"{launch.size} ranks need {needed} open files each, to connect to each other, but {socket.gethostname()} "
            f"grants rank {launch.rank} only {max(left, 0)}. Raise the hard limit there (ulimit -Hn, LimitNOFILE of "
            f"the service that starts the ranks)."
        )
    share_loopback = require_own_devices(store, launch.rank, launch.size, accelerator)
    free = "Free memory that other processes hold there."
    try:
        with over_loopback(share_loopback), explain_out_of_memory(accelerator, "the ranks' connections", free):
            dist.init_process_group(
                accelerator.backend,
                store=store,
                rank=launch.rank,
                world_size=launch.size,
                device_id=accelerator.group_device,
                # NCCL's own, 10 min, would end the job while one rank waits for a batch or compiles.
                timeout=timedelta(seconds=max(control_timeout_s(), loader_timeout_s()) + 60),
            )
            control = dist.new_group(backend="gloo", timeout=timedelta(seconds=control_timeout_s()))
            if accelerator.group_device is not None:  # NCCL opens connections in the first sum
                dist.all_reduce(torch.zeros(1, device=accelerator.group_device))
                accelerator.synchronize()
    except RuntimeError as error:
        if _is_lost_connection(error) and heartbeat.silent_ranks():
            raise  # a peer is gone: `_with_reporter` names it
        raise UserError(f"the ranks joined, but cannot reach each other: {first_line(error)}. {_REMEDY}") from error
    assert isinstance(control, dist.ProcessGroup)
    return control


def _with_reporter(
    error: Exception | Interrupted, rank: int, store: Store, heartbeat: Heartbeat
) -> Exception | Interrupted:
    """Agree on the rank that reports the job's failure; return what this rank raises instead of `error`."""
    is_cut_off = _is_lost_connection(error)
    # A launcher that has lost a rank sends SIGTERM to the others.
    by_launcher = isinstance(error, Interrupted) and error.exit_code == 128 + signal.SIGTERM
    lost = heartbeat.silent_ranks() if is_cut_off or by_launcher else []
    raised = UserError(lost_ranks_message(lost)) if lost else error
    reporter = raised.reporter if isinstance(raised, PeerError) else rank
    mine = FirstFailure(f"rank {reporter}", exit_code_of(raised))
    try:
        first = mine.claim(store)
    except (RuntimeError, OSError):
        if heartbeat.first is None:  # no rank can know what the others report
            raised = UserError(STORE_LOST) if is_cut_off else raised
        first = heartbeat.first or mine
    if first.reporter != f"rank {rank}":
        if isinstance(raised, Interrupted) and raised.exit_code == first.exit_code:
            return raised.reported_by(first.rank)  # all ranks got the signal: no `except Exception` must catch it
        return PeerError(f"{first.reporter} reports the failure", first.exit_code)
    return raised.reported_by(rank) if isinstance(raised, (UserError, Interrupted)) else raised


def _claimed_code(code: int, rank: int, store: Store) -> int:
    """Return the exit code of the job's first failure, which is this one with `code` if there is none yet.

    So is it if the store does not answer, as this process is about to end.
    """
    codes = [code]

    def claim() -> None:
        with suppress(RuntimeError, OSError):
            codes.append(FirstFailure(f"rank {rank}", code).claim(store).exit_code)

    asking = threading.Thread(target=claim, daemon=True)
    asking.start()
    asking.join(_CLAIM_S)
    return codes[-1]


def _is_lost_connection(error: BaseException) -> bool:
    """Return whether a collective or a call of the store failed because the other end of its connection did."""
    names_one = any(word in str(error) for word in ("onnection", "ocket", "peer", "NCCL"))
    return isinstance(error, dist.DistNetworkError) or (isinstance(error, RuntimeError) and names_one)


def check_batch_size(batch_size: int, ranks: int) -> None:
    """Raise ConfigError, with the nearest valid sizes, for a global batch that `ranks` does not divide."""
    if batch_size > 0 and batch_size % ranks:
        below = batch_size // ranks * ranks
        sizes = f"{below} or {below + ranks}" if below else f"{ranks}"
        raise ConfigError(
            f"--batch-size {batch_size} is the batch over all ranks, and {ranks} ranks do not divide it. Use {sizes}."
        )
