"""Environment variables of launchers and of time limits."""

from __future__ import annotations

import os
import re
from unittest.mock import patch

import pytest

from tessera.utils.environment import Launch, over_loopback, peer_timeout_s
from tessera.utils.errors import ConfigError


def launch_of(env: dict[str, str], local_rank_flag: int = -1) -> Launch:
    with patch.dict(os.environ, env, clear=True):
        return Launch.from_environment(local_rank_flag)


def test_the_environment_wins_over_the_flag_and_without_one_a_process_is_alone() -> None:
    assert launch_of({"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "2"}, 7).local_rank == 2
    assert launch_of({"RANK": "0", "WORLD_SIZE": "8"}, 7).local_rank == 7
    assert launch_of({}) == Launch()
    assert launch_of({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}).launcher == "plain"


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [("gpu[03-05,9],cpu1", "gpu03"), ("node1", "node1"), ("a-1,b-2", "a-1"), ("n[7]", "n7"), ("10.0.0.1", "10.0.0.1")],
)
def test_first_host_of_a_slurm_list(nodelist: str, host: str) -> None:
    assert launch_of({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": nodelist}).address == host


@pytest.mark.parametrize(
    ("env", "found"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK='2': expected a number from 0 to 1"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x'"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE='0'"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "99999"}, "MASTER_PORT='99999': expected a number from 0 to"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "9" * 6000}, "SLURM_NTASKS="),
        ({"SLURM_PROCID": "x", "SLURM_NTASKS": "2"}, "SLURM_PROCID='x'"),
    ],
)
def test_variables_that_no_launcher_sets_are_refused(env: dict[str, str], found: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(found)) as refused:
        launch_of(env)
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
    with pytest.raises(ZeroDivisionError), over_loopback(on):
        assert os.environ.get("GLOO_SOCKET_IFNAME") == inside
        raise ZeroDivisionError
    assert os.environ.get("GLOO_SOCKET_IFNAME", "") == users
