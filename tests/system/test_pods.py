"""What Kubernetes gives two pods, on two hosts: Kubeflow's variables and the same bare command on both."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.system.hosts import Job, two_hosts
from tests.system.launch import ROOT, free_port, run_command, run_python, torchrun
from tests.system.test_two_hosts import hidden, make_disks, own_folders, said
from tests.system.tiny import flags, losses, make_data

pytestmark = pytest.mark.slow

FLAGS = ("--batch", "12", "--epochs", "1", "--sync-bn", "--amp", "off", "--name", "pods")


def test_the_variables_of_kubeflow_and_a_bare_torchrun_train_as_one_rank_does(tmp_path: Path) -> None:
    disks = make_disks(tmp_path, shared=False)
    with two_hosts(hidden(disks)) as hosts:
        port = str(free_port())
        policy = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1"}
        policy |= {"PET_MASTER_ADDR": hosts[0].address, "PET_MASTER_PORT": port}
        own = [{**policy, "PET_NODE_RANK": str(n), **folders} for n, folders in enumerate(own_folders(disks))]
        commands = [["-m", "tessera", "train", *flags(d / "data" / "tiny.yaml", Path("runs"), *FLAGS)] for d in disks]
        outcomes = Job(hosts, ([], []), commands, disks, own, tmp_path / "job").wait(240)
    assert [outcome.code for outcome in outcomes] == [0, 0], said(outcomes)
    assert "2 ranks (1 on tess-" in outcomes[0].err, said(outcomes)
    assert not (disks[1] / "runs").exists()
    data = disks[0] / "data" / "tiny.yaml"
    alone = run_python(ROOT / "train.py", *flags(data, tmp_path / "alone", *FLAGS), timeout=240)
    assert alone.code == 0, alone.said
    ratio = losses(disks[0] / "runs" / "pods").to_numpy() / losses(tmp_path / "alone" / "pods").to_numpy()
    assert abs(ratio - 1).max() < 0.01


def test_the_check_tells_a_mistake_from_a_failure_and_torchrun_does_not(tmp_path: Path) -> None:
    data = make_data(tmp_path, train=4, val=2)
    check = [sys.executable, "-m", "tessera", "train", "--check-data"]
    assert run_command([*check, "--data", str(data)]).code == 0
    next((tmp_path / "shapes" / "labels" / "train").glob("*.txt")).write_text("99 0.5 0.5 0.1 0.1\n")
    assert run_command([*check, "--data", str(data)]).code == 1
    assert run_command([*check, "--dataa", str(data)]).code == 2
    assert torchrun(ROOT / "train.py", "--dataa", str(data), ranks=1).code == 1
    assert run_command([sys.executable, "-m", "torch.distributed.run", "--nonsense", "train.py"]).code == 2
