"""Who reports a job's failure."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.distributed import DistNetworkError, HashStore

from utils.environment import Launch
from utils.errors import ConfigError, Diverged, Interrupted, UserError
from utils.machine.accelerator import Accelerator
from utils.ranks.failures import PeerError
from utils.ranks.heartbeat import STORE_LOST
from utils.ranks.launch import _make_groups, _with_reporter


@pytest.mark.parametrize(
    "error",
    [
        UserError("no such file"),
        ConfigError("no such flag"),
        Diverged("the loss"),
        Interrupted("Stopped", signal.SIGINT),
        Interrupted("Stopped", 0),
    ],
    ids=lambda error: type(error).__name__,
)
def test_the_first_rank_to_fail_raises_an_equal_error_with_its_number(error: UserError | Interrupted) -> None:
    """And leaves the one that was caught as it is."""
    store = HashStore()
    raised = _with_reporter(error, 3, store, None)
    assert isinstance(raised, (UserError, Interrupted)) and type(raised) is type(error)
    assert (str(raised), raised.exit_code, raised.reporter) == (str(error), error.exit_code, 3)
    assert error.reporter is None
    second = _with_reporter(error, 1, store, None)
    assert isinstance(second, PeerError) and second.exit_code == error.exit_code


def test_a_defect_is_raised_as_it_is() -> None:
    error = ZeroDivisionError()
    assert _with_reporter(error, 1, None, None) is error


def test_a_store_that_is_lost_in_the_midst_of_the_work_is_one_message() -> None:
    class Lost(HashStore):
        def compare_set(self, *_: object) -> bytes:
            raise DistNetworkError("Broken pipe")

    raised = _with_reporter(DistNetworkError("Broken pipe"), 1, Lost(), None)
    assert isinstance(raised, UserError) and str(raised) == STORE_LOST and raised.reporter == 1


@pytest.mark.parametrize("gone", [[], ["rank 1"]])
def test_living_ranks_that_cannot_connect_are_told_what_to_name(
    monkeypatch: pytest.MonkeyPatch, gone: list[str]
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise RuntimeError("Gloo connectFullMesh failed with [...] connect [127.0.1.1]:4711: Connection refused")

    monkeypatch.setattr(dist, "init_process_group", refused)
    heartbeat = SimpleNamespace(silent=lambda: gone)
    with pytest.raises(RuntimeError if gone else UserError, match="refused" if gone else "GLOO_SOCKET_IFNAME"):
        _make_groups(Launch(), Accelerator(), HashStore(), heartbeat)  # type: ignore[arg-type]
