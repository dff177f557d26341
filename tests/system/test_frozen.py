"""Processes that stop without dying, and a cut cable: every rank ends by its own clock and names what is silent."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tessera.utils.checkpoints.format import load_checkpoint
from tests.system.hosts import Job as HostsJob
from tests.system.hosts import fixed, two_hosts
from tests.system.jobs import Job, slurm_variables, start, started
from tests.system.launch import ROOT, python_command
from tests.system.test_two_hosts import hidden, make_disks, own_folders
from tests.system.tiny import flags, make_data

pytestmark = pytest.mark.slow

TIMEOUT_S = 5
END_S = 60.0  # on a busy machine; a hang lasts for ever
ENV = {"TESSERA_PEER_TIMEOUT": str(TIMEOUT_S)}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"), train=32, val=4)


def arguments(data: Path, folder: Path) -> list[str]:
    return flags(data, folder, "--epochs", "500", "--save-steps", "1")


def ends(job: Job, pids: list[int]) -> None:
    end = time.monotonic() + END_S
    while set(job.processes()) & set(pids) and time.monotonic() < end:
        time.sleep(0.1)
    if left := set(job.processes()) & set(pids):
        job.tell_where()
        raise AssertionError(f"{left} hang\n{job.said}")


def test_ranks_end_when_torchrun_is_stopped(data: Path, tmp_path: Path) -> None:
    last = tmp_path / "exp" / "weights" / "last.pt"
    with start(tmp_path, 2, *arguments(data, tmp_path), env=ENV) as job:
        job.until(last.is_file)
        pids = [pid for pid in job.processes() if pid != job.process.pid]
        job.process.send_signal(signal.SIGSTOP)
        ends(job, pids)
        said = job.err
    found = re.findall(r"rank (\d): error: torchrun on \S+, which serves the job's store, has not answered for", said)
    assert sorted(found) == ["0", "1"], said
    assert "Traceback" not in said and "frame #" not in said, said
    load_checkpoint(last)


def test_a_rank_ends_when_the_one_that_keeps_the_store_is_stopped(data: Path, tmp_path: Path) -> None:
    last = tmp_path / "exp" / "weights" / "last.pt"
    command = python_command(ROOT / "train.py", *arguments(data, tmp_path))
    envs = [{**env, **ENV} for env in slurm_variables()]
    with started(tmp_path, [command] * 2, envs) as jobs:
        jobs[0].until(last.is_file)
        jobs[0].process.send_signal(signal.SIGSTOP)
        outcome = jobs[1].wait(END_S)
        assert outcome.code != 0
        assert len(re.findall(r"rank 1: error: .*rank 0 on .* has not answered for", outcome.err)) == 1, outcome.said
        assert "Traceback" not in outcome.err and "frame #" not in outcome.err, outcome.said
        assert jobs[0].left_over() == jobs[1].left_over() == []  # the stopped one is killed
    load_checkpoint(last)


def test_a_stopped_loader_worker_ends_the_run(data: Path, tmp_path: Path) -> None:
    last = tmp_path / "exp" / "weights" / "last.pt"
    with start(tmp_path, 2, *arguments(data, tmp_path), env={**ENV, "TESSERA_LOADER_TIMEOUT": str(TIMEOUT_S)}) as job:
        job.until(last.is_file)
        worker = job.children(job.rank(0))[0]
        os.kill(worker, signal.SIGSTOP)
        outcome = job.wait(END_S)
        assert job.left_over() == []
    assert outcome.code != 0
    assert outcome.err.count(f"no batch for {TIMEOUT_S} s (TESSERA_LOADER_TIMEOUT)") == 1, outcome.said
    assert outcome.err.count("error: a loader worker is gone") == 1, outcome.said
    load_checkpoint(last)


def test_ranks_on_both_hosts_end_when_the_cable_is_cut(tmp_path: Path) -> None:
    disks = make_disks(tmp_path, shared=False)
    args = [flags(disk / "data" / "tiny.yaml", Path("runs"), "--epochs", "500", "--save-steps", "1") for disk in disks]
    with two_hosts(hidden(disks)) as hosts:
        commands = [[str(ROOT / "train.py"), *words] for words in args]
        envs = [{**env, **ENV} for env in own_folders(disks)]
        job = HostsJob(hosts, fixed(hosts, (1, 1)), commands, disks, envs, tmp_path / "job")
        job.until((disks[0] / "runs" / "exp" / "weights" / "last.pt").is_file)
        hosts[1].cut_off()
        outcomes = job.wait(END_S)
    said = "\n".join(outcome.said for outcome in outcomes)
    assert all(outcome.code != 0 for outcome in outcomes), said
    assert "rank 0: error: rank 1 on tess-" in outcomes[0].err, said
    assert "rank 1: error: torchrun on 10.213.0.1" in outcomes[1].err, said
    load_checkpoint(disks[0] / "runs" / "exp" / "weights" / "last.pt")
