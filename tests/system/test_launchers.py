"""Every way to start ranks: torch.distributed.launch, bare variables with either flag, SLURM, and none at all."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from tessera.commands import train
from tessera.utils.report.results import read_results
from tests.system.jobs import Job, sbatch_script, started
from tests.system.launch import ROOT, Command, Outcome, free_port, python_command, run_command, torchrun
from tests.system.tiny import flags, make_data
from tests.utils.exporting.made import ANCHORED, checkpoint
from tests.utils.test_environment import launch_of

TRAIN = ROOT / "train.py"


def srun_environments(ranks: int = 2) -> list[dict[str, str]]:
    """What srun sets for the tasks of a job on one node."""
    common = {
        "SLURM_JOB_ID": str(free_job()),
        "SLURM_JOB_NODELIST": "127.0.0.1",
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_STEP_TASKS_PER_NODE": str(ranks),
        "SLURM_NTASKS": str(ranks),
        "SLURM_NODEID": "0",
    }
    return [{**common, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(ranks)]


def free_job() -> int:
    for number in range(os.getpid() % 20000, 20000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", 20000 + number))
            return number
    raise AssertionError("no port is free")


def test_plain_python_with_two_devices_explains_torchrun(tmp_path: Path, command: Command) -> None:
    outcome = command(train.main, *flags(tmp_path / "none.yaml", tmp_path), "--device", "0,1")
    assert outcome.code == 2, outcome.said
    assert "torchrun --standalone --nproc-per-node 2 -m tessera train --device 0,1" in outcome.err
    assert "Traceback" not in outcome.err


@pytest.mark.slow
def test_an_export_under_a_launcher_is_refused_by_all_ranks_at_once(tmp_path: Path) -> None:
    weights = checkpoint(tmp_path / "best.pt", ANCHORED, data=str(make_data(tmp_path, train=1, val=2)))
    outcome = torchrun(ROOT / "export.py", "--weights", str(weights), "--include", "pt")
    assert outcome.code != 0, outcome.said
    assert outcome.err.count("export.py is one process: start it without a launcher.") == 1, outcome.said
    assert not (tmp_path / "best-weights.pt").exists()


@pytest.mark.slow
def test_torch_distributed_launch_trains(tmp_path: Path) -> None:
    """It gives each rank the flag --local-rank beside the variables."""
    data = make_data(tmp_path)
    command = [sys.executable, "-m", "torch.distributed.launch", "--nproc-per-node=2", f"--master-port={free_port()}"]
    outcome = run_command([*command, str(TRAIN), *flags(data, tmp_path / "runs", "--epochs", "1")])
    assert_trained_by_two(outcome, tmp_path / "runs")


@pytest.mark.slow
def test_local_rank_as_a_flag_alone(tmp_path: Path) -> None:
    """Launchers of old set no LOCAL_RANK; either spelling is accepted."""
    data = make_data(tmp_path)
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    words = flags(data, tmp_path / "runs", "--epochs", "1")
    commands = [python_command(TRAIN, one, *words) for one in ("--local-rank=0", "--local_rank=1")]
    with started(tmp_path, commands, [{**common, "RANK": str(rank)} for rank in range(2)]) as jobs:
        first, second = (job.wait() for job in jobs)
    assert second.code == 0, second.said
    assert_trained_by_two(first, tmp_path / "runs")


SRUN = """#!/bin/bash
shift
for rank in 0 1; do
    SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" &
    ids="$ids $!"
done
echo $ids > ranks
for id in $ids; do
    wait $id || { this=$?; [ $this -gt ${code:-0} ] && code=$this; }
done
exit ${code:-0}
"""


@pytest.mark.slow
def test_the_sbatch_file_stops_at_the_warning_and_resumes_when_requeued(tmp_path: Path) -> None:
    """The file from docs/distributed.md as it is, but for what it trains, with a stand-in for SLURM's commands."""
    (tmp_path / "job.sh").write_text(sbatch_script(make_data(tmp_path), {"train.py": str(TRAIN)}))
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, content in {
        "srun": SRUN,
        "scontrol": '#!/bin/sh\necho "$@" >> asked\n',
        "python": f'#!/bin/sh\nexec {sys.executable} "$@"\n',
    }.items():
        (commands / name).write_text(content)
        (commands / name).chmod(0o755)
    environment = {**srun_environments()[0], "PATH": f"{commands}:{os.environ['PATH']}"}
    run = tmp_path / "runs" / "train" / f"job{environment['SLURM_JOB_ID']}"

    with Job(["bash", "job.sh"], tmp_path / "said", environment, cwd=tmp_path) as job:
        job.until((run / "weights" / "last.pt").exists)
        for rank in (tmp_path / "ranks").read_text().split():  # SLURM signals every task of the step
            os.kill(int(rank), signal.SIGUSR1)
        outcome = job.wait()
    assert outcome.code == 128 + signal.SIGUSR1, outcome.said
    assert outcome.err.count("Stopped as asked") == 1, outcome.said
    assert (tmp_path / "asked").read_text().split() == ["requeue", environment["SLURM_JOB_ID"]]

    outcome = run_command(["bash", "job.sh"], env=environment, cwd=tmp_path)
    assert outcome.code == 0, outcome.said
    assert "Resuming " in outcome.err
    assert [path.name for path in run.parent.iterdir()] == [run.name]
    assert read_results(run / "results.csv")["epoch"].tolist() == [0, 1, 2]
    assert len((tmp_path / "asked").read_text().splitlines()) == 1, "not queued again"


def assert_trained_by_two(outcome: Outcome, project: Path) -> None:
    assert outcome.code == 0 and "2 ranks (2 on " in outcome.err, outcome.said
    assert [path.name for path in project.iterdir()] == ["exp"]
    assert (project / "exp" / "weights" / "last.pt").is_file()


# ------------------------------------------------------------------------------- what the variables are read as


def test_torchruns_variables_win_over_slurms() -> None:
    env = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "n1"}
    launch = launch_of({**srun_environments()[0], **env, "MASTER_PORT": "1234"})
    assert (launch.rank, launch.local_rank, launch.size, launch.local_size) == (3, 1, 4, 2)
    assert (launch.address, launch.port, launch.launcher) == ("n1", 1234, "torchrun")


def test_slurm_with_different_ranks_a_node() -> None:
    env = {"SLURM_PROCID": "2", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_NTASKS": "6"}
    env |= {"SLURM_STEP_TASKS_PER_NODE": "1,2(x2),1", "SLURM_JOB_NODELIST": "gpu[03-05,9]", "SLURM_JOB_ID": "70001"}
    launch = launch_of(env)
    assert (launch.rank, launch.local_rank, launch.size, launch.local_size) == (2, 1, 6, 2)
    assert (launch.address, launch.port, launch.launcher) == ("gpu03", 30001, "slurm")


def test_a_step_on_some_of_a_jobs_nodes_meets_on_its_own_first() -> None:
    env = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    env |= {"SLURM_JOB_NODELIST": "gpu[03-05]", "SLURM_STEP_NODELIST": "gpu[04-05]"}
    assert launch_of(env).address == "gpu04"
