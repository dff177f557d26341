"""Joining a job: the rank that reports a failure, texts over restarts, threads."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import DistNetworkError, HashStore, Store, TCPStore

from tessera.utils.environment import Launch
from tessera.utils.errors import ConfigError, Diverged, Interrupted, UserError
from tessera.utils.machine.accelerator import Accelerator, Cuda
from tessera.utils.ranks import failures, launch
from tessera.utils.ranks import launch as launch_module
from tessera.utils.ranks.failures import PeerError, run_rank
from tessera.utils.ranks.launch import (
    _make_groups,
    _with_reporter,
    agree_on_session,
    connect_to_store,
    open_store,
    open_world,
    require_own_devices,
)
from tessera.utils.ranks.liveness import STORE_LOST, Watchdog
from tests.at_once import at_once
from tests.system.launch import free_port
from tests.utils.ranks.conftest import SERVER, CountedStore, until

NOBODY: Any = SimpleNamespace(silent_ranks=list, first=None)


@pytest.mark.parametrize(
    "error",
    [UserError("no file"), ConfigError("no flag"), Diverged("the loss"), Interrupted("Stopped", signal.SIGINT)],
    ids=lambda error: type(error).__name__,
)
def test_the_first_rank_to_fail_raises_an_equal_error_with_its_number(error: UserError | Interrupted) -> None:
    store = HashStore()
    raised = _with_reporter(error, 3, store, NOBODY)
    assert isinstance(raised, (UserError, Interrupted)) and type(raised) is type(error)
    assert (str(raised), raised.exit_code, raised.reporter) == (str(error), error.exit_code, 3)
    assert error.reporter is None
    second = _with_reporter(error, 1, store, NOBODY)
    assert second.exit_code == error.exit_code
    if isinstance(error, Interrupted):  # of several ranks that were asked to stop, each raises what no one swallows
        assert isinstance(second, Interrupted) and second.reporter == 3
        other = _with_reporter(Interrupted("Stopped", signal.SIGUSR1), 2, store, NOBODY)
        assert isinstance(other, PeerError) and other.exit_code == error.exit_code
    else:
        assert isinstance(second, PeerError)


def test_a_store_that_is_lost_in_the_midst_of_the_work_is_one_message() -> None:
    class Lost(HashStore):
        def compare_set(self, *_: object) -> bytes:
            raise DistNetworkError("Broken pipe")

    raised = _with_reporter(DistNetworkError("Broken pipe"), 1, Lost(), NOBODY)
    assert isinstance(raised, UserError) and str(raised) == STORE_LOST and raised.reporter == 1


@pytest.mark.parametrize(
    ("gone", "reason", "message"),
    [
        ([], "Connection refused", r"each other: Connection refused\. .* GLOO_SOCKET_IFNAME"),
        (["rank 1"], "Connection refused", "NCCL error"),
        ([], "DefaultCPUAllocator: no memory", "^out of memory .* Free memory that other"),
    ],
)
def test_living_ranks_that_cannot_connect_are_told_what_to_name(
    monkeypatch: pytest.MonkeyPatch, gone: list[str], reason: str, message: str
) -> None:
    monkeypatch.setenv("TESSERA_LOADER_TIMEOUT", "4000")

    class Nccl(Accelerator):
        group_device = torch.device("cpu")

    def made(*_: object, timeout: timedelta, **__: object) -> None:
        assert timeout.total_seconds() > 4000, "a rank may wait so long for a batch"

    def refused(_: torch.Tensor) -> None:
        raise dist.DistBackendError(f"NCCL error in: a.cpp:9\nncclSystemError: \nLast error:\n{reason}\n")

    for name, part in {"init_process_group": made, "new_group": lambda **_: None, "all_reduce": refused}.items():
        monkeypatch.setattr(dist, name, part)
    heartbeat = SimpleNamespace(silent_ranks=lambda: gone)
    with pytest.raises(RuntimeError if gone else UserError, match=message):
        _make_groups(Launch(), Nccl(), HashStore(), heartbeat)  # type: ignore[arg-type]


def test_a_mistake_that_rank_0_does_not_meet_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    printed: list[str] = []  # until nobody has ended this rank, whose mistake may be everyone's
    monkeypatch.setattr(failures.time, "sleep", lambda _: printed.append(capsys.readouterr().err))

    def body() -> None:
        raise ConfigError("--device 3: there is no such device")

    assert run_rank(body) == (2, None)
    assert printed == [""] and capsys.readouterr().err == "rank 1: error: --device 3: there is no such device\n"


def test_each_call_of_a_process_remembers_its_own_and_a_restarted_process_recalls_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": server.port}
    for name, value in {**variables, "TORCHELASTIC_USE_AGENT_STORE": True}.items():
        monkeypatch.setenv(name, str(value))

    def visit(call: str, value: str) -> str | None:
        with launch_module.open_world("cpu", call=call) as world:
            found = world.recall("run")
            world.remember("run", value)
        return found

    def started() -> list[str | None]:
        monkeypatch.setattr(launch_module, "_calls", Counter())
        return [visit("train a", "exp"), visit("train a", "exp2"), visit("train b", "exp3")]

    assert started() == [None, None, None]
    assert started() == ["exp", "exp2", "exp3"]
    monkeypatch.setattr(launch_module, "_calls", Counter())
    assert visit("train b", "exp3") == "exp3", "also where a restarted script leaves out what it has done"


def test_so_many_threads_compute_as_were_asked_for_and_afterwards_as_before() -> None:
    before = torch.get_num_threads()
    with launch_module.open_world("cpu", threads=before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def test_a_command_computes_float32_without_tf32_and_restores_the_callers_choice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch_module, "choose_accelerator", lambda *_: Cuda(torch.device("cuda", 0)))
    monkeypatch.setattr(Cuda, "activate", lambda _: None)
    settings = torch.backends.cudnn, torch.backends.cuda.matmul
    with Cuda().full_float32():  # restores what the test changes
        for setting in settings:
            setting.allow_tf32 = True
        with open_world(launch=Launch()):
            assert not any(setting.allow_tf32 for setting in settings)
        assert all(setting.allow_tf32 for setting in settings)
    assert Cuda().onnx_options["use_tf32"] == "0"


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
