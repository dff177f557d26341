"""Two hosts with 1 and 2 ranks: torchrun on both, gradients over the wire, disks shared or not."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tessera.analysis.charts import read_results
from tests.system.hosts import Host, Job, elastic, fixed, two_hosts
from tests.system.launch import ROOT, Outcome, run_python
from tests.system.test_parity import CASES, arguments, compare
from tests.system.tiny import flags, losses, make_data

pytestmark = pytest.mark.slow

RANKS = (1, 2)
PROGRAM = Path(__file__).with_name("parity_program.py")
FLAGS = ("--batch", "12", "--epochs", "2", "--sync-bn", "--amp", "off", "--save-steps", "1")


def make_disks(folder: Path, shared: bool) -> tuple[Path, Path]:
    """Make a folder for each host with the dataset in `data`; with `shared` they are the same."""
    first, second = folder / "a", folder / "a" if shared else folder / "b"
    make_data(first / "data", train=36, val=6)
    if not shared:
        shutil.copytree(first / "data", second / "data")
        yaml = second / "data" / "tiny.yaml"
        yaml.write_text(yaml.read_text().replace(str(first), str(second)))
    return first, second


def own_folders(disks: Sequence[Path]) -> list[dict[str, str]]:
    return [{"TESSERA_CACHE": str(disk / "cache"), "TESSERA_DATASETS": str(disk / "datasets")} for disk in disks]


def hidden(disks: Sequence[Path]) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """Return the folders that each host does not see."""
    first, second = disks
    return ((), ()) if first == second else ((second,), (first,))


def test_three_steps_on_two_hosts_are_those_of_one_rank(tmp_path: Path) -> None:
    disks = make_disks(tmp_path, shared=False)
    args = [*arguments(CASES["free"], tmp_path, batch=12), *CASES["free"].flags]

    def words(disk: Path, out: Path) -> list[str]:
        return [str(disk / "data" / "tiny.yaml"), str(out / "free.pt"), *args]

    alone = run_python(PROGRAM, *words(disks[0], tmp_path), timeout=240)
    assert alone.code == 0, alone.said
    with two_hosts(hidden(disks)) as hosts:
        commands = [[str(PROGRAM), *words(disk, disk)] for disk in disks]
        outcomes = Job(hosts, fixed(hosts, RANKS), commands, disks, own_folders(disks), tmp_path / "job").wait(240)
    assert [outcome.code for outcome in outcomes] == [0, 0], "\n".join(outcome.said for outcome in outcomes)
    assert not list(disks[1].glob("*.pt"))
    one, three = (torch.load(folder / "free.pt", weights_only=True) for folder in (tmp_path, disks[0]))
    print(f"1 + 2 ranks on two hosts: {compare(one, three)}")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> NDArray[np.float64]:
    folder = tmp_path_factory.mktemp("alone")
    data = make_data(folder, train=36, val=6)
    outcome = run_python(ROOT / "train.py", *flags(data, folder, *FLAGS), timeout=240)
    assert outcome.code == 0, outcome.said
    return losses(folder / "exp").to_numpy()


@pytest.mark.parametrize("shared", [False, True], ids=["nothing-shared", "all-shared"])
def test_a_run_on_two_hosts_survives_the_death_of_both(
    tmp_path: Path, shared: bool, alone: NDArray[np.float64]
) -> None:
    disks, ranks = make_disks(tmp_path, shared), (1, 1) if shared else RANKS
    with two_hosts(hidden(disks)) as hosts:
        # Each host has the data where it likes: without a shared disk the paths differ.
        first = [flags(disk / "data" / "tiny.yaml", Path("runs"), *FLAGS) for disk in disks]
        job = train(hosts, ranks, disks, first, tmp_path / "first")
        last = disks[0] / "runs" / "exp" / "weights" / "last.pt"
        job.until(last.is_file)
        for host in reversed(hosts):
            host.power_off()
        outcomes = job.wait(60)
        assert last.exists() and all(outcome.code for outcome in outcomes), said(outcomes)
        assert not (disks[1] / "runs").exists() or shared
        stopped = torch.load(last, weights_only=True)
        assert stopped["step"] < 6, "it was killed before its end"

        again = [["--resume", "--data", str(disk / "data" / "tiny.yaml"), "--project", "runs"] for disk in disks]
        outcomes = train(hosts, ranks, disks, again, tmp_path / "again").wait(240)
        assert [outcome.code for outcome in outcomes] == [0, 0], said(outcomes)
    assert f"after batch {stopped['step_in_epoch']}" in outcomes[0].err, outcomes[0].said
    assert f"{sum(ranks)} ranks (1 on tess-" in outcomes[0].err, outcomes[0].said
    assert [path.name for path in (disks[0] / "runs").iterdir()] == ["exp"]
    assert not (disks[1] / "runs").exists() or shared
    assert torch.load(last, weights_only=True)["step"] == 6
    run = disks[0] / "runs" / "exp"
    assert read_results(run / "results.csv")["epoch"].tolist() == [0, 1]
    ratio = losses(run).to_numpy() / alone
    print(f"losses of the stopped and resumed run on two hosts over those of one rank: {ratio.tolist()}")
    assert abs(ratio - 1).max() < 0.01


def test_the_job_continues_with_one_host_when_the_other_is_gone(tmp_path: Path) -> None:
    disks = make_disks(tmp_path, shared=False)
    with two_hosts(hidden(disks)) as hosts:
        args = [flags(disk / "data" / "tiny.yaml", Path("runs"), *FLAGS) for disk in disks]
        commands = [[str(ROOT / "train.py"), *words] for words in args]
        job = Job(hosts, elastic(hosts, (1, 1)), commands, disks, own_folders(disks), tmp_path / "job")
        last = disks[0] / "runs" / "exp" / "weights" / "last.pt"
        job.until(last.is_file)
        hosts[1].power_off()
        outcomes = job.wait(240)
    assert outcomes[0].code == 0, said(outcomes)
    assert "2 ranks (1 on tess-" in outcomes[0].err, said(outcomes)
    assert "Restarted by the launcher: resuming" in outcomes[0].err, said(outcomes)
    assert "1 rank (1 on tess-" in outcomes[0].err, said(outcomes)
    assert torch.load(last, weights_only=True)["step"] == 6
    run = disks[0] / "runs" / "exp"
    assert [path.name for path in run.parent.iterdir()] == ["exp"]
    assert read_results(run / "results.csv")["epoch"].tolist() == [0, 1]


def train(
    hosts: Sequence[Host], ranks: Sequence[int], disks: Sequence[Path], args: Sequence[Sequence[str]], logs: Path
) -> Job:
    commands = [[str(ROOT / "train.py"), *words] for words in args]
    return Job(hosts, fixed(hosts, ranks), commands, disks, own_folders(disks), logs)


def said(outcomes: Sequence[Outcome]) -> str:
    return "\n".join(outcome.said for outcome in outcomes)
