"""Joining and leaving the job of a launcher (torchrun, srun): store, session, heartbeat, process groups, threads."""

from __future__ import annotations

import hashlib
import signal
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.distributed_c10d import _abort_process_group

from tessera.utils.environment import Launch, control_timeout_s, join_timeout_s, loader_timeout_s, over_loopback
from tessera.utils.errors import ConfigError, Interrupted, UserError, exit_code_of
from tessera.utils.machine.accelerator import Accelerator, choose_accelerator, explain_out_of_memory
from tessera.utils.machine.host import namespace, open_files_left
from tessera.utils.ranks.failures import PeerError, ignore_sigterm, print_nonblocking
from tessera.utils.ranks.liveness import (
    GRACE_S,
    NOTICE_S,
    POLL_S,
    STORE_LOST,
    FirstFailure,
    Heartbeat,
    Watchdog,
    lost_ranks_message,
    read,
)
from tessera.utils.ranks.world import CollectiveError, Collectives, World
from tessera.utils.text import first_line

_REMEDY = "Name the interface that the hosts share: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME."
_ABSENT = "-"  # stands for a missing nonce in an offer
# Calls of `open_world` in this process, by description. A restarted process counts from 0.
_calls: Counter[str] = Counter()


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
        call: description of the work, equal on every host and after a restart; see `_memory`.
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
        memory = watchdog.watched(_memory(connect_to_store(launch, watchdog), call))
        yield World(launch, accelerator, memory=memory, watchdog=watchdog)
    except dist.DistNetworkError as error:
        raise UserError(STORE_LOST, reporter=launch.rank) from error


def _memory(store: Store, call: str) -> Store:
    """Return the part of a store for the texts of one call of `open_world`, such as its run directory.

    A restarted process makes equal calls in the same order. It may leave out calls whose results it has.
    """
    number, _calls[call] = _calls[call], _calls[call] + 1
    digest = hashlib.blake2b(call.encode(), digest_size=8).hexdigest()
    return PrefixStore(f"tessera/kept/{digest}/{number}", store)


@contextmanager
def _joined(launch: Launch, accelerator: Accelerator, watchdog: Watchdog, call: str) -> Iterator[World]:
    """Join as one of several ranks. The heartbeat starts before the groups: a rank may die while they are made.

    A waiting call blocks its connection to the store. So torch's process groups have one connection, and the ranks' own
    keys another, which is watched.
    """
    open_files_left(4 * launch.size)  # raises the limit: rank 0 has four connections to each rank
    for_groups = open_store(launch, watchdog)
    try:
        session = agree_on_session(watchdog.watched(for_groups), launch.rank, launch.size, join_timeout_s())
        of_job = connect_to_store(launch, watchdog)
        store = watchdog.watched(PrefixStore(f"tessera/{session}", of_job))
        memory = watchdog.watched(_memory(of_job, call))
        heartbeat = Heartbeat(store, launch.rank, launch.size, watchdog)
    except RuntimeError as error:
        raise UserError(STORE_LOST, reporter=launch.rank) from error
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
        if heartbeat.silent_ranks():  # `_with_reporter` names them
            raise CollectiveError(str(error)) from error
        raise UserError(f"the ranks joined, but cannot reach each other: {first_line(error)}. {_REMEDY}") from error
    assert isinstance(control, dist.ProcessGroup)
    return control


def _with_reporter(
    error: Exception | Interrupted, rank: int, store: Store, heartbeat: Heartbeat
) -> Exception | Interrupted:
    """Agree on the rank that reports the job's failure; return what this rank raises instead of `error`."""
    is_cut_off = isinstance(error, (CollectiveError, dist.DistError))
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


def check_batch_size(batch_size: int, ranks: int) -> None:
    """Raise ConfigError, with the nearest valid sizes, for a global batch that `ranks` does not divide."""
    if batch_size > 0 and batch_size % ranks:
        below = batch_size // ranks * ranks
        sizes = f"{below} or {below + ranks}" if below else f"{ranks}"
        raise ConfigError(
            f"--batch-size {batch_size} is the batch over all ranks, and {ranks} ranks do not divide it. Use {sizes}."
        )


def open_store(launch: Launch, watchdog: Watchdog) -> Store:
    """Return the job's store for process groups, whose calls may wait; rank 0 opens it unless torchrun has."""
    if launch.has_store or launch.rank:
        return connect_to_store(launch, watchdog)
    address, port = launch.address, launch.port
    timeout = timedelta(seconds=join_timeout_s())
    try:  # multi-tenant: a second run in this process may share the first one's server
        return TCPStore(address, port, is_master=True, wait_for_workers=False, timeout=timeout, multi_tenant=True)
    except RuntimeError as error:
        raise UserError(
            f"rank 0 cannot listen on port {port} of this host: {first_line(error)}. Another job has the port, or "
            f"{address} is not this host: give a free MASTER_PORT, and the host of rank 0 as MASTER_ADDR."
        ) from error


def connect_to_store(launch: Launch, watchdog: Watchdog) -> Store:
    """Return another connection to the job's store, for calls that never wait; raise UserError without a store."""
    timeout_s = join_timeout_s()
    _await_listener(launch, timeout_s)
    address, port = launch.address, launch.port
    notice = (
        f"{address}:{port} takes connections, but does not answer as a job's store: another program, or a stopped one? "
        f"Waiting for at most {timeout_s:.0f} s."
    )
    try:
        with watchdog.watch(timeout_s=timeout_s, notice=notice):
            timeout = timedelta(seconds=timeout_s)
            return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)
    except RuntimeError as error:
        raise UserError(
            f"{address}:{port} is no store of a job: {first_line(error)}. Is another program on that port? Give "
            f"MASTER_ADDR and MASTER_PORT of rank 0.",
            reporter=launch.rank,
        ) from error


def _await_listener(launch: Launch, timeout_s: float) -> None:
    """Wait until a process listens at the job's address; torch itself would try for minutes without a message."""
    server, address, port, found = launch.server, launch.address, launch.port, ""

    def step() -> str:
        nonlocal found
        try:
            socket.create_connection((address, port), timeout=NOTICE_S).close()
            return "listens"
        except OSError as error:
            found = error.strerror or str(error)
            return ""

    def late() -> str:
        return (
            f"rank {launch.rank} could not connect to {address}:{port} for {timeout_s:.0f} s ({found}). Does {server} "
            "run, is the address right, and does no firewall block the port?"
        )

    _wait(step, timeout_s, lambda: f"{server} at {address}:{port} ({found})", late, launch.rank)


def agree_on_session(store: Store, rank: int, size: int, timeout_s: float) -> str:
    """Return a new id of this start of the ranks, a prefix of its keys; raise UserError if ranks are missing.

    A launcher may keep its store, with the addresses of dead ranks, over restarts, whose number may differ between
    nodes. So every rank posts a nonce. Rank 0 offers a session id with the nonces that it has read. A rank that reads
    its nonce in the offer accepts it. The id is fixed once all ranks have accepted an offer with all nonces.
    """
    return _follow(store, rank, size, timeout_s) if rank else _lead(store, size, timeout_s)


def _lead(store: Store, size: int, timeout_s: float) -> str:
    """Run rank 0's part of `agree_on_session`."""
    others = range(1, size)
    session, nonces = uuid.uuid4().hex, [_ABSENT] * len(others)

    def step() -> str:
        nonlocal session, nonces
        found = [read(store, f"rendezvous/nonce/{other}") or _ABSENT for other in others]
        if found != nonces:  # living ranks replace the nonces of dead ones
            session, nonces = uuid.uuid4().hex, found
            store.set("rendezvous/offer", " ".join((session, *nonces)))
        if _ABSENT in nonces or not store.check([f"rendezvous/{session}/{other}" for other in others]):
            return ""
        store.set(f"rendezvous/{session}/all", "")
        return session

    def missing() -> str:
        return ", ".join(str(other) for other in others if not store.check([f"rendezvous/{session}/{other}"]))

    def late() -> str:
        return f"of {size} ranks {missing()} did not start within {timeout_s:.0f} s. Look at what they print."

    return _wait(step, timeout_s, lambda: f"rank {missing()} of {size} to start", late)


def _follow(store: Store, rank: int, size: int, timeout_s: float) -> str:
    """Run the other ranks' part of `agree_on_session`."""
    nonce, accepted = uuid.uuid4().hex, ""
    store.set(f"rendezvous/nonce/{rank}", nonce)

    def step() -> str:
        nonlocal accepted
        session, *nonces = (read(store, "rendezvous/offer") or "").split(" ")
        if session != accepted and len(nonces) == size - 1 and nonces[rank - 1] == nonce:
            accepted = session
            store.set(f"rendezvous/{accepted}/{rank}", "accepted")
        return accepted if accepted and store.check([f"rendezvous/{accepted}/all"]) else ""

    def missing() -> str:
        return "" if store.check(["rendezvous/offer"]) else "rank 0 to start"  # only rank 0 names the others

    def late() -> str:
        return f"rank {rank} has waited {timeout_s:.0f} s for rank 0 and the others to start as {size} ranks."

    return _wait(step, timeout_s, missing, late, rank)


def _wait(
    step: Callable[[], str],
    timeout_s: float,
    missing: Callable[[], str],
    late: Callable[[], str],
    reporter: int | None = None,
) -> str:
    """Repeat `step` until it returns a text; print once what is missing, and raise UserError after `timeout_s`."""
    started, noticed = time.monotonic(), False
    while not (found := step()):
        waited = time.monotonic() - started
        if waited > timeout_s:
            raise UserError(late(), reporter=reporter)
        if waited > NOTICE_S and not noticed:
            noticed = True
            if names := missing():
                print_nonblocking(f"Waiting for {names}, for at most {timeout_s:.0f} s (TESSERA_JOIN_TIMEOUT).")
        time.sleep(POLL_S)
    return found


def require_own_devices(store: Store, rank: int, size: int, accelerator: Accelerator) -> bool:
    """Return whether all ranks share a loopback interface; raise ConfigError if they share a device or mix kinds."""
    store.set(f"device/{rank}", f"{namespace('net')} {accelerator.backend} {accelerator.identity}")
    values = store.multi_get([f"device/{other}" for other in range(size)])
    networks, backends, devices = zip(*(value.decode().split(" ", 2) for value in values), strict=True)
    if len(set(backends)) > 1:
        found = "; ".join(f"{backend} on rank {ranks}" for backend, ranks in ranks_by_value(backends).items())
        raise ConfigError(
            f"the ranks compute on different kinds of devices, so they cannot exchange gradients: {found}. Check that "
            "every host sees its GPUs, or give the same --device on all hosts."
        )
    for device, ranks in ranks_by_value(devices).items():
        if device and "," in ranks:
            raise ConfigError(
                f"ranks {ranks} share one CUDA device ({device}). Start as many ranks a node as it has devices, give "
                "each task its own (srun --gpus-per-task=1), or use --device cpu."
            )
    return len(set(networks)) == 1 and networks[0] != ""


def ranks_by_value(values: Iterable[str]) -> dict[str, str]:
    """Return the ranks of each value, such as "0, 2"."""
    found: dict[str, str] = {}
    for rank, value in enumerate(values):
        found[value] = f"{found[value]}, {rank}" if value in found else str(rank)
    return found
