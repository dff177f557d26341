"""Rendezvous: connection to the job's store, session ids over restarts, devices, missing ranks."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest
from torch.distributed import HashStore, Store

from tessera.utils.environment import Launch
from tessera.utils.errors import ConfigError, UserError
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.ranks import launch
from tessera.utils.ranks.launch import agree_on_session, connect_to_store, open_store, require_own_devices
from tessera.utils.ranks.liveness import Watchdog
from tests.at_once import at_once
from tests.system.launch import free_port
from tests.utils.ranks.conftest import SERVER, CountedStore, until


def start(store: Store, size: int, delays: dict[int, float] | None = None) -> set[str]:
    """Start all ranks concurrently, or some later; return their session ids."""

    def one(rank: int) -> str:
        time.sleep((delays or {}).get(rank, 0))
        return agree_on_session(store, rank, size, 10)

    return set(at_once([partial(one, rank) for rank in range(size)]))


@pytest.mark.parametrize("late", [0, 1, 2])
def test_all_ranks_find_one_new_name_at_each_start(late: int) -> None:
    store = HashStore()
    names = [start(store, size, {late: 0.2}) for size in (3, 3, 2, 4, 1)]
    assert all(len(found) == 1 for found in names)
    assert len(set.union(*names)) == len(names)


def test_waiting_for_a_straggler_names_it_and_asks_the_store_seldom(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "NOTICE_S", 1.0)
    store = CountedStore()
    assert len(start(store, 24, {23: 1.5})) == 1
    assert store.calls.total() < 24 * 150, store.calls  # with 20 ms between questions there are 10,000
    (line,) = capfd.readouterr().err.splitlines()  # on a busy machine others may be late too
    assert re.fullmatch(r"Waiting for rank.*\b23 of 24 to start, for at most 10 s \(TESSERA_JOIN_TIMEOUT\)\.", line)


class Device(Accelerator):
    """A GPU with a name of its own, or a CPU."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.backend, self._name = "nccl" if name else "gloo", name

    @property
    def identity(self) -> str:
        return self._name


@pytest.mark.parametrize(
    ("devices", "shared"),
    [
        (["GPU-a", "GPU-b", "GPU-c"], ""),
        (["", "", ""], ""),
        (["GPU-a", "GPU-b", "GPU-a"], r"ranks 0, 2 .* \(GPU-a\)"),
        (["GPU-a", "", "GPU-b"], "the ranks compute on different kinds .*: nccl on rank 0, 2; gloo on rank 1"),
    ],
)
def test_every_rank_needs_a_device_of_its_own(devices: list[str], shared: str) -> None:
    store = HashStore()

    def one(rank: int) -> str:
        try:
            require_own_devices(store, rank, len(devices), Device(devices[rank]))
        except ConfigError as error:
            return str(error)
        return ""

    errors = at_once([partial(one, rank) for rank in range(len(devices))])
    assert all(re.match(shared, error) if shared else not error for error in errors)


@pytest.mark.parametrize(
    ("networks", "shared"), [(["a", "a", "a"], True), (["a", "a", "b"], False), (["", "", ""], False)]
)
def test_ranks_know_whether_they_share_a_loopback_interface(
    networks: list[str], shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers of one host do not."""
    left = iter(networks)
    monkeypatch.setattr(launch, "namespace", lambda kind: next(left))
    store = HashStore()
    found = at_once([partial(require_own_devices, store, rank, 3, Accelerator()) for rank in range(3)])
    assert found == [shared] * 3


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "NOTICE_S", 0.05)
    monkeypatch.setenv("TESSERA_JOIN_TIMEOUT", "0.5")


quick = pytest.mark.usefixtures("_quick")


def rank(number: int, port: int, agent: bool = False) -> Launch:
    return Launch(number, number, 2, "127.0.0.1", port, "torchrun", agent)


@pytest.fixture
def taken() -> Iterator[socket.socket]:
    """A port with a listener that accepts connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("0.0.0.0", 0))
        listener.listen(20)
        yield listener


@pytest.mark.parametrize(("agent", "server"), [(False, "rank 0"), (True, "torchrun")])
@quick
def test_nobody_listens(guard: Watchdog, capfd: pytest.CaptureFixture[str], agent: bool, server: str) -> None:
    port = free_port()
    with pytest.raises(
        UserError, match=rf"could not connect to 127.0.0.1:{port} for 0 s \(.*\). Does {server} run"
    ) as found:
        connect_to_store(rank(1, port, agent), guard)
    assert found.value.reporter == 1
    assert f"Waiting for {server} at 127.0.0.1:{port}" in capfd.readouterr().err


@quick
def test_somebody_listens_who_never_answers(
    guard: Watchdog, messages: list[str], taken: socket.socket, capfd: pytest.CaptureFixture[str]
) -> None:
    def connect() -> None:
        with contextlib.suppress(UserError):  # at the test's end
            connect_to_store(rank(1, taken.getsockname()[1]), guard)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    until(lambda: messages)
    taken.close()
    thread.join(60)
    assert messages[0].startswith(f"{SERVER} has not answered")
    assert "does not answer as a job's store" in capfd.readouterr().err


def test_the_port_of_rank_0_is_taken(guard: Watchdog, taken: socket.socket) -> None:
    port = taken.getsockname()[1]
    with pytest.raises(UserError, match=rf"rank 0 cannot listen on port {port} of this host: .*MASTER_PORT") as found:
        open_store(rank(0, port), guard)
    assert "frame #" not in str(found.value)


@quick
def test_ranks_of_jobs_of_different_size(capfd: pytest.CaptureFixture[str]) -> None:
    store = HashStore()
    store.set("rendezvous/nonce/2", "of a rank that died")

    def one(number: int, size: int) -> str:
        with pytest.raises(UserError) as found:
            agree_on_session(store, number, size, 0.5)
        return str(found.value)

    errors = at_once([partial(one, 0, 3), partial(one, 1, 2)])
    assert "of 3 ranks 1, 2 did not start" in errors[0]
    assert errors[1].endswith("for rank 0 and the others to start as 2 ranks.")
    assert "Waiting for rank 1, 2 of 3 to start" in capfd.readouterr().err
