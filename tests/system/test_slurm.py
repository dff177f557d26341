"""A real SLURM on this machine: its daemons, srun and sbatch, in a folder of the test's own."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tessera.analysis.charts import read_results
from tests.system.launch import ROOT, free_port, wait_until
from tests.system.tiny import FLAGS, flags, make_data

pytestmark = pytest.mark.slow

CONF = """
ClusterName=tessera
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldPort={port1}
SlurmdPort={port2}
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1
KillWait=20
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol", "squeue")


class Cluster:
    """Daemons of a cluster of one node; a context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.daemons: list[subprocess.Popen[bytes]] = []
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}

    def __enter__(self) -> Cluster:
        folder = self.folder
        for name in ("state", "spool"):
            (folder / name).mkdir()
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        ports = {"port1": free_port(), "port2": free_port()}
        host, cpus = socket.gethostname().split(".")[0], max(os.cpu_count() or 1, 2)
        (folder / "slurm.conf").write_text(CONF.format(folder=folder, host=host, cpus=cpus, **ports))
        own = [f"--{what}={folder / name}" for what, name in (("socket", "munge.sock"), ("pid-file", "munge.pid"))]
        own += [f"--log-file={folder / 'munge.log'}", f"--seed-file={folder / 'munge.seed'}"]
        self._start("munged", "--foreground", "--force", f"--key-file={key}", *own)
        self._start("slurmctld", "-D", "-c")
        self._start("slurmd", "-D", "-c")
        end = time.monotonic() + 60
        while time.monotonic() < end:
            if "idle" in self.said("sinfo", "--noheader"):
                return self
            time.sleep(0.3)
        logs = {log.name: log.read_text()[-500:] for log in folder.glob("*.log")}
        self.__exit__()
        pytest.skip(f"SLURM's daemons do not run here: {logs}")

    def __exit__(self, *_: object) -> None:
        for daemon in reversed(self.daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def said(self, *command: str) -> str:
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=300, check=False)
        return done.stdout + done.stderr

    def _start(self, program: str, *words: str) -> None:
        with (self.folder / f"{program}.log").open("wb") as log:
            command = [str(shutil.which(program, path=SEARCH)), *words]
            self.daemons.append(subprocess.Popen(command, env=self.env, stdout=log, stderr=log))


SEARCH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    missing = [name for name in PROGRAMS if shutil.which(name, path=SEARCH) is None]
    if missing:
        pytest.skip(f"needs SLURM (apt install slurmctld slurmd slurm-client munge), found no {', '.join(missing)}")
    if os.geteuid() != 0:
        pytest.skip("needs root, for whom slurmd starts tasks")
    folder = tmp_path / "slurm"
    folder.mkdir()
    with Cluster(folder) as running:
        yield running


def test_srun_starts_the_ranks(cluster: Cluster, tmp_path: Path) -> None:
    words = flags(make_data(tmp_path), tmp_path / "runs", "--epochs", "1")
    said = cluster.said("srun", "--ntasks=2", f"--chdir={ROOT}", sys.executable, "train.py", *words)
    assert "2 ranks (2 on " in said, said
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["exp"]
    assert read_results(tmp_path / "runs" / "exp" / "results.csv")["epoch"].tolist() == [0], said


def test_the_sbatch_file_of_the_docs_stops_at_the_warning_and_is_queued_again(cluster: Cluster, tmp_path: Path) -> None:
    text = (ROOT / "docs" / "distributed.md").read_text()
    script = next(block for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) if "#SBATCH" in block)
    assert "#SBATCH --signal=USR1@120\n" in script
    changes = {
        "--nodes=2": "--nodes=1",
        "--ntasks-per-node=8": "--ntasks-per-node=2",
        "#SBATCH --gpus-per-node=8\n": "",
        "--cpus-per-task=8": "--cpus-per-task=1",
        "python train.py": f"{sys.executable} {ROOT / 'train.py'}",
        "--data coco.yaml --cfg yolov5s.yaml --batch-size 128": f"{' '.join(FLAGS)} --data {make_data(tmp_path)}",
        "--save-steps 1000": "--save-steps 1 --epochs 3",
    }
    for old, new in changes.items():
        assert old in script, old
        script = script.replace(old, new)
    (tmp_path / "job.sh").write_text(script)
    job = cluster.said("sbatch", "--parsable", f"--chdir={tmp_path}", str(tmp_path / "job.sh")).split()[0]
    run = tmp_path / "runs" / "train" / f"job{job}"
    log = tmp_path / f"slurm-{job}.out"

    def said() -> str:
        return log.read_text() if log.exists() else f"{log}: nothing was said"

    wait_until((run / "weights" / "last.pt").exists, 300, said)
    cluster.said("scancel", "--signal=USR1", job)  # what SLURM sends to the ranks before the time is over
    wait_until(lambda: "Best epoch" in said(), 300, said)
    wait_until(lambda: job not in cluster.said("squeue", "--noheader"), 300, said)
    assert said().count("Stopped as requested") == 1 and said().count("Resuming ") == 1, said()
    assert [path.name for path in run.parent.iterdir()] == [run.name]
    assert read_results(run / "results.csv")["epoch"].tolist() == [0, 1, 2]
