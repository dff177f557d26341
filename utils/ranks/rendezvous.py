"""How the ranks of a job find each other in the launcher's store, at every start anew."""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from utils.environment import Launch
from utils.errors import ConfigError, UserError

JOINING_TIMEOUT = timedelta(minutes=10)  # for all ranks to start


def open_store(launch: Launch) -> Store:
    """The job's store: torchrun's own, or one that rank 0 opens. Collectives connect through it, and may wait in it."""
    if launch.launcher == "torchrun":
        store, _, _ = next(rendezvous("env://"))
        return store
    assert launch.address is not None and launch.port is not None
    is_host = launch.rank == 0
    return TCPStore(launch.address, launch.port, launch.size, is_master=is_host, timeout=JOINING_TIMEOUT)


def connect_to_store(launch: Launch) -> Store:
    """Another connection to the job's store, on which nothing ever waits."""
    assert launch.address is not None and launch.port is not None
    return TCPStore(launch.address, launch.port, is_master=False, wait_for_workers=False, timeout=JOINING_TIMEOUT)


def agree_on_session(store: Store, rank: int, size: int, timeout_s: float = JOINING_TIMEOUT.total_seconds()) -> str:
    """Id of this start of the ranks, the same on all of them and never used before: a prefix for its keys.

    A launcher that restarts ranks may keep its store, where the addresses of dead ranks are left, and how often it has
    restarted them may differ between nodes. So every rank posts a nonce of its own; rank 0 offers a session id together
    with the nonces that it has read; each rank that finds its own nonce in the offer accepts it; when all have
    accepted, the session id is fixed.

    Raises:
        UserError: ranks are missing when the time is up.
    """
    nonce, end = uuid.uuid4().hex, time.monotonic() + timeout_s
    if rank:
        store.set(f"rendezvous/nonce/{rank}", nonce)
        accepted = ""
        while time.monotonic() < end:
            offer = _read(store, "rendezvous/offer").split(" ")
            session = offer[0] if len(offer) == size and offer[rank] == nonce else ""
            if session and session != accepted:
                store.set(f"rendezvous/{session}/{rank}", "accepted")
                accepted = session
            if accepted and store.check([f"rendezvous/{accepted}/all"]):
                return accepted
            time.sleep(0.02)
        raise UserError(f"rank {rank} has waited {timeout_s:.0f} s for rank 0 and the others to start.")
    session, read = nonce, [""] * (size - 1)
    others = range(1, size)
    while time.monotonic() < end:
        nonces = [_read(store, f"rendezvous/nonce/{other}") for other in others]
        if nonces != read:  # nonces of ranks that died may be left; those of living ranks replace them
            read, session = nonces, uuid.uuid4().hex
            if all(read):
                store.set("rendezvous/offer", " ".join((session, *read)))
        if all(read) and store.check([f"rendezvous/{session}/{other}" for other in others]):
            store.set(f"rendezvous/{session}/all", "")
            return session
        time.sleep(0.02)
    missing = ", ".join(str(other) for other in others if not store.check([f"rendezvous/{session}/{other}"]))
    raise UserError(f"of {size} ranks {missing} did not start within {timeout_s:.0f} s. Look at what they print.")


def require_own_devices(store: Store, rank: int, size: int, identity: str) -> None:
    """Refuse ranks that compute on one device together.

    Args:
        store: with keys of this session.
        rank, size: this rank among all.
        identity: of this rank's device; "" for one that ranks may share.

    Raises:
        ConfigError: on every rank.
    """
    store.set(f"device/{rank}", identity)
    found = [value.decode() for value in store.multi_get([f"device/{other}" for other in range(size)])]
    ranks_of: dict[str, list[int]] = {}
    for other, theirs in enumerate(found):
        ranks_of.setdefault(theirs, []).append(other)
    for device, ranks in ranks_of.items():
        if device and len(ranks) > 1:
            raise ConfigError(
                f"ranks {', '.join(map(str, ranks))} share one CUDA device ({device}). Start as many ranks a "
                f"node as it has devices, give each task its own (srun --gpus-per-task=1), or use --device cpu."
            )


def _read(store: Store, key: str) -> str:
    """Value of `key`; "" where there is none."""
    return store.get(key).decode() if store.check([key]) else ""
