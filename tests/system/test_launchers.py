"""Launchers: torch.distributed.launch, bare variables, none at all; SLURM is in test_slurm.py."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tessera.commands import train
from tests.deploy.exporting.made import ANCHORED, checkpoint
from tests.system.jobs import started
from tests.system.launch import ROOT, Command, Outcome, free_port, python_command, run_command, torchrun
from tests.system.tiny import flags, make_data
from tests.utils.test_environment import launch_of

TRAIN = ROOT / "train.py"


def test_plain_python_with_two_devices_explains_torchrun(tmp_path: Path, command: Command) -> None:
    outcome = command(train.main, *flags(tmp_path / "none.yaml", tmp_path), "--device", "0,1")
    assert outcome.code == 2, outcome.said
    assert "torchrun --standalone --nproc-per-node 2" in outcome.err
    assert "Traceback" not in outcome.err


@pytest.mark.slow
def test_torch_distributed_launch_trains(tmp_path: Path) -> None:
    """It gives each rank the flag --local-rank beside the variables."""
    data = make_data(tmp_path)
    command = [sys.executable, "-m", "torch.distributed.launch", "--nproc-per-node=2", f"--master-port={free_port()}"]
    outcome = run_command([*command, str(TRAIN), *flags(data, tmp_path / "runs", "--epochs", "1")])
    assert_trained_by_two(outcome, tmp_path / "runs")


@pytest.mark.slow
def test_mpirun_trains(tmp_path: Path) -> None:
    if (mpirun := shutil.which("mpirun")) is None:
        pytest.skip("needs Open MPI (apt install openmpi-bin)")
    command = [mpirun, "--allow-run-as-root", "--oversubscribe", "-np", "2", "--bind-to", "none"]
    words = flags(make_data(tmp_path), tmp_path / "runs", "--epochs", "1")
    assert_trained_by_two(run_command([*command, *python_command(TRAIN, *words)]), tmp_path / "runs")


@pytest.mark.slow
def test_an_export_under_a_launcher_is_refused_with_one_message(tmp_path: Path) -> None:
    weights = checkpoint(tmp_path / "best.pt", ANCHORED, data=str(make_data(tmp_path, train=1, val=2)))
    outcome = torchrun(ROOT / "export.py", "--weights", str(weights), "--include", "pt")
    assert outcome.code != 0 and not (tmp_path / "best-weights.pt").exists(), outcome.said
    assert outcome.err.count("export.py runs as one process. Start it without a launcher.") == 1, outcome.said


def assert_trained_by_two(outcome: Outcome, project: Path) -> None:
    assert outcome.code == 0 and "2 ranks (2 on " in outcome.err, outcome.said
    assert [path.name for path in project.iterdir()] == ["exp"]
    assert (project / "exp" / "weights" / "last.pt").is_file()


SLURM = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
TORCHRUN |= {"MASTER_ADDR": "n1", "MASTER_PORT": "1234"}
UNEVEN = {"SLURM_PROCID": "2", "SLURM_LOCALID": "1", "SLURM_NTASKS": "6", "SLURM_STEP_ID": "0"}
UNEVEN |= {"SLURM_JOB_NODELIST": "gpu[03-05,9]", "SLURM_JOB_ID": "70001"}
STEP = {**SLURM, "SLURM_JOB_ID": "1"}
STEP |= {"SLURM_JOB_NODELIST": "gpu[03-05]", "SLURM_STEP_NODELIST": "gpu[04-05]"}


@pytest.mark.parametrize(
    ("env", "ranks", "meeting"),
    [
        pytest.param({**SLURM, **TORCHRUN}, (3, 1, 4), ("n1", 1234, "torchrun"), id="torchrun"),
        pytest.param(UNEVEN, (2, 1, 6), ("gpu03", 30001, "srun"), id="other ranks a node"),
        pytest.param(STEP, (0, 0, 2), ("gpu04", 20001, "srun"), id="a step on some of the nodes"),
    ],
)
def test_variables_of_launchers(env: dict[str, str], ranks: tuple[int, ...], meeting: tuple[str, int, str]) -> None:
    """Those of torchrun win over SLURM's."""
    launch = launch_of(env)
    assert (launch.rank, launch.local_rank, launch.size) == ranks
    assert (launch.address, launch.port, launch.launcher) == meeting


@pytest.mark.slow
def test_local_rank_as_a_flag_alone(tmp_path: Path) -> None:
    """Old launchers set no LOCAL_RANK; either spelling is accepted."""
    data = make_data(tmp_path)
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    words = flags(data, tmp_path / "runs", "--epochs", "1")
    commands = [python_command(TRAIN, one, *words) for one in ("--local-rank=0", "--local_rank=1")]
    with started(tmp_path, commands, [{**common, "RANK": str(rank)} for rank in range(2)]) as jobs:
        first, second = (job.wait() for job in jobs)
    assert second.code == 0, second.said
    assert_trained_by_two(first, tmp_path / "runs")
