"""Joining and leaving the job that a launcher has started."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from tessera.utils.environment import Launch, connecting_over_loopback, control_timeout_s, join_timeout_s
from tessera.utils.errors import ConfigError, Interrupted, UserError, exit_code_of
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.machine.choose_device import choose_accelerator
from tessera.utils.machine.resource_limits import open_files_left
from tessera.utils.ranks.collectives import Collectives
from tessera.utils.ranks.failures import FirstFailure, PeerError
from tessera.utils.ranks.liveness import STORE_LOST, Heartbeat, Watchdog, is_gone
from tessera.utils.ranks.rendezvous import (
    agree_on_session,
    connect_to_store,
    open_store,
    require_own_devices,
    server_of,
)
from tessera.utils.ranks.signals import ignore_sigterm_at_the_end
from tessera.utils.ranks.store import Memory
from tessera.utils.ranks.world import World
from tessera.utils.text import first_line

_FILES = 2  # for each rank: a connection of the default group and one of the control group


@contextmanager
def open_world(
    device: str = "",
    local_rank: int = -1,
    batch_size: int = 0,
    call: str = "",
    threads: int = 0,
    launch: Launch | None = None,
) -> Iterator[World]:
    """Join the job that the launcher describes; leave it on the way out, however that is.

    Args:
        device: `--device`: "", "cpu", "mps", "0" or "0,1".
        local_rank: `--local-rank` of torch.distributed.launch; the environment wins.
        batch_size: images a batch over all ranks, checked before anybody waits; 0 or -1 = not checked.
        call: what this rank is asked for, in the same words after a restart; see `Memory`.
        threads: of this rank's computation on the CPU; 0 = one a processor that it has.
        launch: where this process stands, `Launch()` by itself; None = as the launcher says.

    Raises:
        ConfigError: a device that is not there, or a batch that the ranks do not divide.
        PeerError: another rank has failed, and reports why.
    """
    launch = launch or Launch.from_environment(local_rank)
    accelerator = choose_accelerator(device, launch)
    check_batch_size(batch_size, launch.size)
    accelerator.activate()
    if launch.size == 1 and not launch.has_store:
        world = World(launch, accelerator)
        with _own_threads(world, threads):
            yield world
        return
    server = f"{server_of(launch)} on {launch.address}:{launch.port}, which keeps the job's store,"
    with closing(Watchdog(launch.rank, server)) as watchdog:
        join = _single if launch.size == 1 else _joined
        with join(launch, accelerator, watchdog, call) as world, _own_threads(world, threads):
            yield world


@contextmanager
def _single(launch: Launch, accelerator: Accelerator, watchdog: Watchdog, call: str) -> Iterator[World]:
    """A single rank, which torchrun can restart too: the others may have left the job, or never been in it."""
    try:
        memory = Memory(watchdog.watched(connect_to_store(launch, watchdog)), call)
        yield World(launch, accelerator, memory=memory)
    except dist.DistNetworkError as error:
        raise UserError(STORE_LOST, reporter=launch.rank) from error


@contextmanager
def _joined(launch: Launch, accelerator: Accelerator, watchdog: Watchdog, call: str) -> Iterator[World]:
    """Several ranks. The heartbeat comes first: a rank may die while the groups are made.

    A call that waits blocks its connection to the job's store: torch's process groups have one, and the ranks' own keys
    another, which is watched.
    """
    open_files_left(2 * _FILES * launch.size)  # raises the limit; where rank 0 serves the store, all connect to it too
    for_groups = open_store(launch, watchdog)
    try:
        session = agree_on_session(watchdog.watched(for_groups), launch.rank, launch.size, join_timeout_s())
        of_job = connect_to_store(launch, watchdog)
        store = watchdog.watched(PrefixStore(f"tessera/{session}", of_job))
        memory = Memory(watchdog.watched(of_job), call)
        heartbeat = Heartbeat(store, launch.rank, launch.size)
    except RuntimeError as error:
        raise UserError(STORE_LOST, reporter=launch.rank) from error
    collectives: Collectives | None = None
    failed = True
    try:
        control = _make_groups(launch, accelerator, PrefixStore(f"default/{session}", for_groups), heartbeat)
        collectives = Collectives(control)
        if launch.rank and not launch.has_store and (server := heartbeat.sign_of(0)) is not None:
            watchdog.server_pid = server.pid_here
        yield World(launch, accelerator, collectives, store, heartbeat, memory)
        if accelerator.group_waits_for_all:
            collectives.all_gather(None)  # a rank may still close its trackers, which no watchdog must cut off
        failed = False
    except Interrupted as stopped:
        ignore_sigterm_at_the_end()
        failed = not stopped.saved
        raise (stopped if stopped.saved else _with_reporter(stopped, launch.rank, store, heartbeat)) from None
    except PeerError:
        raise
    except Exception as error:
        ignore_sigterm_at_the_end()
        settled = _with_reporter(error, launch.rank, store, heartbeat)
        if settled is error:
            raise
        raise settled from error
    finally:
        heartbeat.close()
        if collectives is not None:
            collectives.close()
        # It would wait for ranks that wait for this one.
        if dist.is_initialized() and not (failed and accelerator.group_waits_for_all):
            with watchdog.over("The other ranks' part in ending the process group"):
                dist.destroy_process_group()


@contextmanager
def _own_threads(world: World, threads: int) -> Iterator[None]:
    """Let torch compute with so many threads; 0 = no more than this rank has processors.

    By itself it knows neither quotas nor the other ranks. Other runtimes take as many as torch.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads or min(before, world.cpus))
    try:
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
    try:
        with connecting_over_loopback(share_loopback):
            dist.init_process_group(
                accelerator.backend,
                store=store,
                rank=launch.rank,
                world_size=launch.size,
                device_id=accelerator.group_device,
            )
            control = dist.new_group(backend="gloo", timeout=timedelta(seconds=control_timeout_s()))
    except RuntimeError as error:
        if _is_lost_connection(error) and heartbeat.silent():
            raise  # a peer is gone: its missing heartbeat says which
        raise UserError(
            f"the ranks met, but cannot connect to each other: {first_line(error)}. Name the interface that the hosts "
            f"share: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME."
        ) from error
    assert isinstance(control, dist.ProcessGroup)
    return control


def _with_reporter(
    error: Exception | Interrupted, rank: int, store: Store, heartbeat: Heartbeat
) -> Exception | Interrupted:
    """Settle which rank reports the job's failure; return what this rank raises in place of `error`."""
    is_cut_off = _is_lost_connection(error)
    # A launcher that has lost a rank sends SIGTERM to the others.
    lost = heartbeat.silent() if is_cut_off or isinstance(error, Interrupted) else []
    raised = UserError(is_gone(lost)) if lost else error
    mine = FirstFailure(f"rank {rank}", exit_code_of(raised))
    try:
        first = mine.claim(store)
    except (RuntimeError, OSError):  # no rank can know what the others report
        first, raised = mine, UserError(STORE_LOST) if is_cut_off else raised
    if first.reporter != mine.reporter:
        if isinstance(raised, Interrupted) and raised.exit_code == first.exit_code:
            return raised.reported_by(first.rank)  # all were asked to stop: no `except Exception` catches that
        return PeerError(f"{first.reporter} reports the failure", first.exit_code)
    return raised.reported_by(rank) if isinstance(raised, (UserError, Interrupted)) else raised


def _is_lost_connection(error: BaseException) -> bool:
    """Whether a collective, or a call of the store, failed because the other end of its connection did."""
    is_text_of_one = any(word in str(error) for word in ("onnection", "ocket", "peer", "NCCL"))
    return isinstance(error, dist.DistNetworkError) or (isinstance(error, RuntimeError) and is_text_of_one)


def check_batch_size(batch_size: int, ranks: int) -> None:
    """Raise ConfigError for a global batch that the ranks do not divide; it names the nearest sizes that work."""
    if batch_size > 0 and batch_size % ranks:
        below = batch_size // ranks * ranks
        sizes = f"{below} or {below + ranks}" if below else f"{ranks}"
        raise ConfigError(
            f"--batch-size {batch_size} is the batch over all ranks, and {ranks} ranks do not divide it. Use {sizes}."
        )
