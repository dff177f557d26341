"""Where a process stands, as its launcher says."""

from __future__ import annotations

import os
import re

import pytest

from tessera.utils.environment import Launch, connecting_over_loopback, first_slurm_host, peer_timeout_s
from tessera.utils.errors import ConfigError


def test_torchrun() -> None:
    env = {
        "RANK": "3",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "5",
    }
    launch = Launch.from_environment(env={**env, "TORCHELASTIC_RESTART_COUNT": "2"})
    assert (launch.rank, launch.size, launch.local_rank, launch.local_size) == (3, 6, 1, 2)
    assert (launch.address, launch.port, launch.launcher) == ("a", 5, "torchrun")


def test_the_environment_wins_over_the_flag() -> None:
    assert Launch.from_environment(7, {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "2"}).local_rank == 2
    assert Launch.from_environment(7, {"RANK": "0", "WORLD_SIZE": "8"}).local_rank == 7


def test_alone() -> None:
    assert Launch.from_environment(env={}) == Launch()
    assert Launch.from_environment(env={"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}).launcher == "plain"


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [("gpu[03-05,9],cpu1", "gpu03"), ("node1", "node1"), ("a-1,b-2", "a-1"), ("n[7]", "n7"), ("10.0.0.1", "10.0.0.1")],
)
def test_first_host_of_a_slurm_list(nodelist: str, host: str) -> None:
    assert first_slurm_host(nodelist) == host


@pytest.mark.parametrize(
    ("env", "found"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK='2': expected a number from 0 to 1"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x'"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE='0'"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "99999"}, "MASTER_PORT='99999': expected a number from 0 to"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "9" * 6000}, "SLURM_NTASKS="),
    ],
)
def test_variables_that_no_launcher_sets_are_refused(env: dict[str, str], found: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(found)) as refused:
        Launch.from_environment(env=env)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("value", ["soon", "-3", "0", "nan", "inf"])
def test_a_time_limit_is_a_number_of_seconds(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("TESSERA_PEER_TIMEOUT", value)
    with pytest.raises(ConfigError, match=r"TESSERA_PEER_TIMEOUT=.*expected seconds"):
        peer_timeout_s()


@pytest.mark.parametrize(("users", "on", "inside"), [("", True, "lo"), ("", False, None), ("eth0", True, "eth0")])
def test_the_choice_of_loopback_ends_with_the_making_of_groups(
    monkeypatch: pytest.MonkeyPatch, users: str, on: bool, inside: str | None
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if users:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", users)
    with pytest.raises(ZeroDivisionError), connecting_over_loopback(on):
        assert os.environ.get("GLOO_SOCKET_IFNAME") == inside
        raise ZeroDivisionError
    assert os.environ.get("GLOO_SOCKET_IFNAME", "") == users
