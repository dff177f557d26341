"""Environment variables of launchers and of time limits."""

from __future__ import annotations

import os
import re
from unittest.mock import patch

import pytest

from tessera.utils.environment import Launch, over_loopback, peer_timeout_s
from tessera.utils.errors import ConfigError
from tessera.utils.ranks.launch import open_world


def launch_of(env: dict[str, str], local_rank_flag: int = -1) -> Launch:
    with patch.dict(os.environ, env, clear=True):
        return Launch.from_environment(local_rank_flag)


def test_the_environment_wins_over_the_flag_and_without_one_a_process_is_alone() -> None:
    assert launch_of({"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "2"}, 7).local_rank == 2
    assert launch_of({"RANK": "0", "WORLD_SIZE": "8"}, 7).local_rank == 7
    assert launch_of({}) == Launch()


TASK = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}  # of srun
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
ONE_HOST = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "1468792833", "PMIX_RANK": "1"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0"}
MEETING = {"MASTER_ADDR": "n1", "MASTER_PORT": "1234"}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    "env",
    [
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
        {**BATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"},  # srun --pty bash in a larger allocation
        {**BATCH, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"},  # mpirun -np 1
        {**BATCH, **OPEN_MPI, "WORLD_SIZE": "1", "RANK": "0"},
        {"PMIX_RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "PET_NNODES": "1", "SM_HOSTS": '["algo-1"]'},
    ],
)
def test_one_process_works_in_any_environment(env: dict[str, str]) -> None:
    launch = launch_of(env)
    assert (launch.rank, launch.size, launch.problem) == (0, 1, "")


@pytest.mark.parametrize(
    ("env", "launcher", "address"),
    [
        (ONE_HOST, "mpirun", "127.0.0.1"),
        ({**BATCH, **ONE_HOST}, "mpirun", "127.0.0.1"),
        ({**TASK, **OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4", **MEETING}, "mpirun", "n1"),  # its daemons are tasks of srun
        ({**MPICH, **MEETING}, "mpiexec", "n1"),
        ({**TASK, **MPICH, "SLURM_PROCID": "1", "SLURM_JOB_NODELIST": "n3"}, "srun", "n3"),  # srun --mpi=pmi2
    ],
)
def test_ranks_of_other_launchers_join(env: dict[str, str], launcher: str, address: str) -> None:
    launch = launch_of(env)
    assert (launch.rank, launch.launcher, launch.address, launch.problem) == (1, launcher, address, "")
    assert launch.port == launch_of({**env, "PMIX_RANK": "0"}).port > 0


@pytest.mark.parametrize(
    ("env", "found"),
    [
        (OPEN_MPI, "process 1 of 2 of mpirun"),
        ({**ONE_HOST, "OMPI_COMM_WORLD_SIZE": "4"}, "process 1 of 4 of mpirun"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", **MEETING}, "process 1 of 2 of mpiexec"),  # which GPU is unknown
        (BATCH, "SLURM_NTASKS=4, but this process is no task of srun"),
        (
            {**BATCH, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"},
            "SLURM_NTASKS=4",
        ),  # the shell of salloc
        ({"RANK": "0"}, "RANK='0' without WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 without RANK"),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK=1 without RANK"),
        ({"PMIX_RANK": "1"}, "PMIX_RANK=1 without RANK"),
        ({"PET_NNODES": "1:2"}, "PET_NNODES='1:2': each host"),
        ({"SM_HOSTS": '["algo-1","algo-2"]'}, "SM_HOSTS="),
        ({"SKYPILOT_NUM_NODES": "2"}, "SKYPILOT_NUM_NODES=2"),
    ],
)
def test_a_process_that_cannot_join_the_others_says_so(env: dict[str, str], found: str) -> None:
    problem = launch_of(env).problem
    assert problem.startswith(found) and "set WORLD_SIZE=1 and RANK=0" in problem and "\n" not in problem
    with patch.dict(os.environ, env, clear=True), pytest.raises(ConfigError, match=re.escape(found)), open_world():
        pass


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [("gpu[03-05,9],cpu1", "gpu03"), ("node1", "node1"), ("a-1,b-2", "a-1"), ("n[7]", "n7"), ("10.0.0.1", "10.0.0.1")],
)
def test_first_host_of_a_slurm_list(nodelist: str, host: str) -> None:
    assert launch_of({**TASK, "SLURM_JOB_NODELIST": nodelist}).address == host


@pytest.mark.parametrize(
    ("env", "found"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK='2': expected a number from 0 to 1"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x'"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE='0'"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "99999"}, "MASTER_PORT='99999': expected a number from 0 to"),
        ({**TASK, "SLURM_NTASKS": "9" * 6000}, "SLURM_NTASKS="),
        ({**TASK, "SLURM_PROCID": "x"}, "SLURM_PROCID='x'"),
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
