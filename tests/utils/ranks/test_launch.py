"""Joining a job: the rank that reports a failure, texts over restarts, threads."""

from __future__ import annotations

import signal
from collections import Counter
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import DistNetworkError, HashStore, TCPStore

from tessera.utils.environment import Launch
from tessera.utils.errors import ConfigError, Diverged, Interrupted, UserError
from tessera.utils.machine.accelerator import Accelerator, Cuda
from tessera.utils.ranks import failures
from tessera.utils.ranks import launch as launch_module
from tessera.utils.ranks.failures import PeerError, run_rank
from tessera.utils.ranks.launch import _make_groups, _with_reporter, open_world
from tessera.utils.ranks.liveness import STORE_LOST

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
