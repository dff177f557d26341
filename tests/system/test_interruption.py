"""Interrupted and resumed runs: they end with the bits of an undisturbed one."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from tessera.analysis.charts import read_results
from tessera.commands import train as train_command
from tessera.commands import val
from tessera.utils.types import Metrics
from tests.at_once import at_once
from tests.system.jobs import start, train
from tests.system.tiny import assert_same_checkpoint, losses, make_data
from tests.system.tiny import flags as tiny_flags

pytestmark = pytest.mark.slow

BATCH = 12  # images, on one to four ranks
STEPS = 4  # optimizer steps an epoch
MORE = {3: ("--sync-bn", "--cfg", "tessera-n.yaml", "--imgsz", "64", "96")}  # flags by the number of ranks
Runs = Callable[[int], Path]  # run directories by the number of ranks


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"), train=BATCH * STEPS, val=4)


def flags(data: Path, project: Path, *more: str) -> list[str]:
    return tiny_flags(data, project, "--batch", str(BATCH), *more)


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Run directory of a training that nobody stops, by the number of ranks; trained when it is first needed."""

    @cache
    def trained(ranks: int) -> Path:
        folder = tmp_path_factory.mktemp("whole")
        outcome = train(folder, ranks, *flags(data, folder, "--epochs", "2", *MORE.get(ranks, ())))
        assert outcome.code == 0, outcome.said
        return folder / "exp"

    return trained


def assert_resumes(run: Path, ranks: int, whole: Path, *more: str) -> None:
    """A resume ends with the bits of the undisturbed run."""
    resumed = train(run.parent, ranks, "--resume", str(run / "weights" / "last.pt"), "--device", "cpu", *more)
    assert resumed.code == 0, resumed.said
    assert_same_checkpoint(run / "weights" / "last.pt", whole / "weights" / "last.pt")
    assert losses(run).equals(losses(whole))
    assert read_results(run / "results.csv")["epoch"].tolist() == [0, 1]
    assert not list(run.rglob("*.tmp"))


@pytest.mark.parametrize(
    ("name", "code", "step"),
    [
        ("SIGINT", 130, STEPS + 1),  # the first of an epoch
        ("SIGUSR1", 138, -1),  # the last of all
    ],
)
def test_a_signal_stops_after_the_step(
    data: Path, tmp_path: Path, undisturbed: Runs, name: str, code: int, step: int
) -> None:
    steps = torch.load(undisturbed(1) / "weights" / "last.pt", weights_only=True)["step"]
    step = steps if step < 0 else step
    args = flags(data, tmp_path, "--epochs", "2")
    stopped = train(tmp_path, 1, *args, fault=f"0 step {step} {name}")
    assert stopped.code == code, stopped.said
    last = tmp_path / "exp" / "weights" / "last.pt"
    assert f"Resume with: uv run train.py --resume {last}" in stopped.err
    assert "Traceback" not in stopped.err
    state = torch.load(last, weights_only=True)
    assert (state["step"], state["step_in_epoch"]) == (step, STEPS if step == steps else (step - 1) % STEPS + 1)
    assert_resumes(tmp_path / "exp", 1, undisturbed(1), "--workers", "2")


def test_a_stopped_run_can_be_reported_as_it_is_and_still_trains_on(
    data: Path, tmp_path: Path, undisturbed: Runs
) -> None:
    args = [flag for flag in flags(data, tmp_path, "--epochs", "2") if flag not in ("--noplots", "--noreport")]
    assert train(tmp_path, 1, *args, fault=f"0 step {STEPS + 3} SIGTERM").code == 143
    run, files = tmp_path / "exp", ("results.png", "report.html", "errors.jsonl")
    reported = train(tmp_path, 1, "--resume", str(run), "--epochs", "1", "--device", "cpu")
    assert reported.code == 0 and "Best epoch 0" in reported.out, reported.said
    for file in files:
        (run / file).unlink()
    assert_resumes(run, 1, undisturbed(1))
    assert all((run / file).is_file() for file in files)


@pytest.mark.parametrize(("ranks", "stop"), [(1, "SIGTERM"), (2, "kill")])
def test_an_abandoned_validation_loses_nothing(
    data: Path, tmp_path: Path, undisturbed: Runs, ranks: int, stop: str
) -> None:
    """last.pt is saved before it, and a resumed run begins with it; a signal abandons that one as well."""
    args = flags(data, tmp_path, "--epochs", "2", "--save-steps", str(STEPS))  # a kill may cut off the write itself
    stopped = train(tmp_path, ranks, *args, fault=f"{ranks - 1} batch 1 {stop}")
    assert stopped.code != 0, stopped.said
    last = tmp_path / "exp" / "weights" / "last.pt"
    state = torch.load(last, weights_only=True)
    assert (state["epoch"], state["step_in_epoch"], state["metrics"]) == (0, STEPS, None), stopped.said
    if stop != "kill":
        assert "Stopped as requested in the validation of epoch 0." in stopped.err, stopped.said
        again = train(tmp_path, 1, "--resume", str(last), "--device", "cpu", fault=f"0 batch 1 {stop}")
        assert again.code == 143 and "Stopped as requested in the validation of epoch 0." in again.err, again.said
    assert_resumes(tmp_path / "exp", ranks, undisturbed(ranks))


def test_train_and_val_run_in_any_thread(data: Path, tmp_path: Path) -> None:
    where = {"workers": 0, "device": "cpu", "imgsz": 64, "data": str(data), "project": str(tmp_path)}
    model = {"cfg": "yolov5n.yaml", "batch_size": 8, "noplots": True, "loggers": "none"}

    def work() -> list[Metrics | None]:
        before = signal.getsignal(signal.SIGTERM)
        found = [train_command.run(epochs=1, **model, **where)]
        found.append(val.run(weights=f"{tmp_path}/exp/weights/last.pt", name="val", **where))
        assert signal.getsignal(signal.SIGTERM) is before
        return found

    ((trained, measured),) = at_once([work])
    assert trained is not None and measured is not None and trained.images == measured.images == 4


def test_a_signal_to_one_rank_stops_all(data: Path, tmp_path: Path, undisturbed: Runs) -> None:
    args = flags(data, tmp_path, "--epochs", "2", *MORE[3])
    stopped = train(tmp_path, 3, *args, fault=f"1 step {STEPS + 3} SIGUSR1")
    assert stopped.code != 0
    assert stopped.err.count("Stopped as requested in epoch 1 after batch 3") == 1, stopped.said
    assert_resumes(tmp_path / "exp", 3, undisturbed(3), "--workers", "0")


def test_a_signal_to_the_launcher_stops_all(data: Path, tmp_path: Path, undisturbed: Runs) -> None:
    """Torchrun passes it on to the ranks' process groups, loader workers included."""
    with start(tmp_path, 2, *flags(data, tmp_path, "--epochs", "2", "--save-steps", "1")) as job:
        job.until((tmp_path / "exp" / "weights" / "last.pt").is_file)
        job.process.send_signal(signal.SIGTERM)
        stopped = job.wait(60)
        assert job.left_over() == [], stopped.said
    assert stopped.code != 0 and "DataLoader" not in stopped.err, stopped.said
    assert stopped.err.count("Stopped as requested") == 1, stopped.said
    assert_resumes(tmp_path / "exp", 2, undisturbed(2))


def test_another_number_of_ranks_continues_with_the_same_stream(data: Path, tmp_path: Path) -> None:
    more = ("--sync-bn", "--amp", "off", "--epochs", "2", "--name", "exp", "--resume", "auto")
    whole = train(tmp_path, 1, *flags(data, tmp_path / "whole", *more))
    assert whole.code == 0, whole.said
    args, run = flags(data, tmp_path / "changed", *more), tmp_path / "changed" / "exp"
    done = 0
    for ranks, steps in ((3, 2), (4, 3)):
        stopped = train(tmp_path, ranks, *args, fault=f"{ranks - 1} step {steps} SIGTERM")
        done += steps
        epoch, batch = divmod(done - 1, STEPS)
        assert f"in epoch {epoch} after batch {batch + 1}" in stopped.err, stopped.said
    resumed = train(tmp_path, 1, *args)
    assert resumed.code == 0 and f"in epoch {epoch} after batch {batch + 1}" in resumed.err, resumed.said
    # A batch that counts twice, or not at all, changes the first epoch's mean by 2 %.
    ratio = losses(run).to_numpy() / losses(tmp_path / "whole" / "exp").to_numpy()
    assert abs(ratio[0] - 1).max() < 0.005 and abs(ratio[1] - 1).max() < 0.02, ratio


def test_torchrun_restarts_a_killed_rank(data: Path, tmp_path: Path, undisturbed: Runs) -> None:
    args = flags(data, tmp_path, "--epochs", "2", "--save-steps", "1", "--resume", "auto", "--name", "exp", *MORE[3])
    outcome = train(tmp_path, 3, *args, fault=f"1 step {STEPS + 3} kill", options=("--max-restarts=3",))
    assert outcome.code == 0, outcome.said
    assert outcome.err.count("Restarted by the launcher") == 1, outcome.said
    assert sorted(p.name for p in tmp_path.glob("exp*")) == ["exp"]
    assert_same_checkpoint(tmp_path / "exp" / "weights" / "last.pt", undisturbed(3) / "weights" / "last.pt")
    assert losses(tmp_path / "exp").equals(losses(undisturbed(3)))


@pytest.mark.parametrize("fault", ["1 step 1 kill", "0 end 1 kill"], ids=["before-any-save", "in-the-end"])
def test_torchrun_restarts_in_the_same_folder(data: Path, tmp_path: Path, undisturbed: Runs, fault: str) -> None:
    args = flags(data, tmp_path, "--epochs", "2", "--exist-ok")
    stale = tmp_path / "exp" / "weights" / "last.pt"  # of an earlier job: not this one's own
    stale.parent.mkdir(parents=True)
    stale.write_bytes((undisturbed(2) / "weights" / "last.pt").read_bytes())
    outcome = train(tmp_path, 2, *args, fault=fault, options=("--max-restarts=1",))
    assert outcome.code == 0, outcome.said
    assert sorted(p.name for p in tmp_path.glob("exp*")) == ["exp"]
    assert_same_checkpoint(stale, undisturbed(2) / "weights" / "last.pt")
    assert losses(tmp_path / "exp").equals(losses(undisturbed(2)))
    assert outcome.out.count("Best epoch") == 1, outcome.said


def test_the_same_command_begins_and_goes_on_and_ends(data: Path, tmp_path: Path, undisturbed: Runs) -> None:
    args = flags(data, tmp_path, "--epochs", "2", "--save-steps", "1", "--resume", "auto", "--name", "night")
    killed = train(tmp_path, 2, *args, fault=f"1 step {STEPS + 3} kill")
    assert killed.code != 0 and "night; starting the run" in killed.said
    run = tmp_path / "night"
    assert torch.load(run / "weights" / "last.pt", weights_only=True)["step"] == STEPS + 2, "no saved step is lost"
    (run / "weights" / ".last.pt.torn_123.another-host.tmp").write_bytes(b"half")  # what a kill while saving leaves
    outcome = train(tmp_path, 2, *args)
    assert outcome.code == 0 and not list(run.rglob("*.tmp")), outcome.said
    assert_same_checkpoint(run / "weights" / "last.pt", undisturbed(2) / "weights" / "last.pt")
    assert losses(run).equals(losses(undisturbed(2)))
