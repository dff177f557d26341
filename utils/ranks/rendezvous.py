"""Rendezvous: connection to the job's store, agreement on a session id, and checks of the ranks' devices."""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Callable, Iterable
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore

from tessera.utils.environment import Launch, join_timeout_s
from tessera.utils.errors import ConfigError, UserError
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.machine.host import namespace
from tessera.utils.ranks.failures import print_nonblocking
from tessera.utils.ranks.liveness import NOTICE_S, Watchdog
from tessera.utils.ranks.store import Backoff, read
from tessera.utils.text import first_line

_ABSENT = "-"  # stands for a missing nonce in an offer


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

    _wait(step, timeout_s, lambda: f"{server} at {address}:{port} ({found})", late, Backoff(), launch.rank)


def agree_on_session(store: Store, rank: int, size: int, timeout_s: float) -> str:
    """Return a new id of this start of the ranks, a prefix of its keys; raise UserError if ranks are missing.

    A launcher may keep its store, with the addresses of dead ranks, over restarts, whose number may differ between
    nodes. So every rank posts a nonce. Rank 0 offers a session id with the nonces that it has read. A rank that reads
    its nonce in the offer accepts it. The id is fixed once all ranks have accepted an offer with all nonces. Counters
    of posts and offers tell whether there is something new to read.
    """
    return _follow(store, rank, size, timeout_s) if rank else _lead(store, size, timeout_s)


def _lead(store: Store, size: int, timeout_s: float) -> str:
    """Run rank 0's part of `agree_on_session`."""
    others = range(1, size)
    session, nonces, seen, pauses = "", [""] * len(others), -1, Backoff()
    store.set("rendezvous/size", str(size))

    def step() -> str:
        nonlocal session, nonces, seen
        posts = store.add("rendezvous/posts", 0)
        if posts != seen:  # living ranks replace the nonces of dead ones
            seen, session = posts, uuid.uuid4().hex
            nonces = [(read(store, f"rendezvous/nonce/{other}") or "").partition("/")[0] for other in others]
            store.set("rendezvous/offer", " ".join((session, *(nonce or _ABSENT for nonce in nonces))))
            store.add("rendezvous/offers", 1)
            if all(nonces):
                pauses.reset()
        if all(nonces) and store.check([f"rendezvous/{session}/{other}" for other in others]):
            store.set(f"rendezvous/{session}/all", "")
            return session
        return ""

    def missing() -> str:
        return ", ".join(str(other) for other in others if not store.check([f"rendezvous/{session}/{other}"]))

    def sizes() -> str:
        posted = {other: (read(store, f"rendezvous/nonce/{other}") or "").partition("/")[2] for other in others}
        return "".join(_hint(other, found, size) for other, found in posted.items())

    def late() -> str:
        return f"of {size} ranks {missing()} did not start within {timeout_s:.0f} s. Look at what they print.{sizes()}"

    return _wait(step, timeout_s, lambda: f"rank {missing()} of {size} to start{sizes()}", late, pauses)


def _follow(store: Store, rank: int, size: int, timeout_s: float) -> str:
    """Run the other ranks' part of `agree_on_session`."""
    nonce, accepted, is_whole, seen, pauses = uuid.uuid4().hex, "", False, -1, Backoff()
    store.set(f"rendezvous/nonce/{rank}", f"{nonce}/{size}")
    store.add("rendezvous/posts", 1)

    def step() -> str:
        nonlocal accepted, is_whole, seen
        offers = store.add("rendezvous/offers", 0)
        if offers != seen:
            seen, offer = offers, (read(store, "rendezvous/offer") or "").split(" ")
            if len(offer) == size and offer[rank] == nonce:
                accepted, is_whole = offer[0], _ABSENT not in offer
                store.set(f"rendezvous/{accepted}/{rank}", "accepted")
                if is_whole:
                    pauses.reset()
        return accepted if is_whole and store.check([f"rendezvous/{accepted}/all"]) else ""

    def sizes() -> str:
        return _hint(0, read(store, "rendezvous/size") or "", size)

    def missing() -> str:
        """Only rank 0 names the others; "" where it has started with the same number of ranks."""
        return f"rank 0 to start{sizes()}" if sizes() or not store.check(["rendezvous/size"]) else ""

    def late() -> str:
        return f"rank {rank} has waited {timeout_s:.0f} s for rank 0 and the others to start.{sizes()}"

    return _wait(step, timeout_s, missing, late, pauses, rank)


def _hint(rank: int, found: str, size: int) -> str:
    """Return a hint at a rank that was started with another number of ranks, as far as the store knows."""
    differs = found not in ("", str(size))
    return f" (rank {rank} was started as one of {found}, this one as one of {size})" if differs else ""


def _wait(
    step: Callable[[], str],
    timeout_s: float,
    missing: Callable[[], str],
    late: Callable[[], str],
    pauses: Backoff,
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
        pauses.wait(timeout_s if noticed else NOTICE_S)
    return found


def require_own_devices(store: Store, rank: int, size: int, accelerator: Accelerator) -> bool:
    """Return whether all ranks share a loopback interface; raise ConfigError if they share a device or mix kinds."""
    store.set(f"device/{rank}", f"{namespace('net')} {accelerator.backend} {accelerator.identity}")
    values = store.multi_get([f"device/{other}" for other in range(size)])
    networks, backends, devices = zip(*(value.decode().split(" ", 2) for value in values), strict=True)
    if len(set(backends)) > 1:
        raise ConfigError(
            f"the ranks compute on different kinds of devices, so they cannot exchange gradients: "
            f"{ranks_by_value(backends)}. Check that every host sees its GPUs, or give the same --device on all hosts."
        )
    for device, ranks in _ranks_by_value(devices).items():
        if device and len(ranks) > 1:
            raise ConfigError(
                f"ranks {', '.join(map(str, ranks))} share one CUDA device ({device}). Start as many ranks a "
                f"node as it has devices, give each task its own (srun --gpus-per-task=1), or use --device cpu."
            )
    return len(set(networks)) == 1 and networks[0] != ""


def _ranks_by_value(values: Iterable[str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        found.setdefault(value, []).append(rank)
    return found


def ranks_by_value(values: Iterable[str]) -> str:
    """Return a list of values with their ranks, such as "gloo on rank 0, 2; nccl on rank 1"."""
    groups = _ranks_by_value(values).items()
    return "; ".join(f"{value} on rank {', '.join(map(str, ranks))}" for value, ranks in groups)
