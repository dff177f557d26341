"""The table of exit codes in docs/exit-codes.md: each row is produced by real processes."""

from __future__ import annotations

import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tessera.utils.ranks.run_lock import RunLock
from tests.deploy.exporting.made import ANCHORED, checkpoint
from tests.system.jobs import slurm_variables, started
from tests.system.launch import ROOT, Outcome, python_command, run_command, run_python, torchrun, wait_until
from tests.system.tiny import flags, make_data

FAULTY = ROOT / "tests" / "system" / "fault_program.py"
TABLE = (ROOT / "docs" / "exit-codes.md").read_text().partition("## Exit codes")[2].partition("\n## ")[0]
ROWS = [
    (words, int(code))
    for code, words in re.findall(r"^\| (\d+)(?: \(Linux\))? \| ([^|]+?) \|", TABLE, flags=re.MULTILINE)
]


def in_a_shell(command: list[str], limit: str = "true", **env: str) -> Outcome:
    """A command as a shell and a container see its end, under a limit."""
    return run_command(["bash", "-c", f'{limit}; "$@"; exit $?', "bash", *command], env=env)


def check(data: Path, *more: str) -> Outcome:
    return run_python("-m", "tessera", "train", "--check-data", "--data", str(data), *more)


def done_again(folder: Path) -> Outcome:
    name = ("--epochs", "1", "--name", "night", "--resume", "auto")
    args = flags(folder / "tiny.yaml", folder / "done", *name)
    first = run_python(ROOT / "train.py", *args)
    assert first.code == 0 and "night; starting the run" in first.err, first.said
    table = folder / "done" / "night" / "results.csv"
    before = table.read_bytes()
    again = run_python(ROOT / "train.py", *args)
    assert table.read_bytes() == before and [path.name for path in (folder / "done").iterdir()] == ["night"]
    return again


def too_little_memory(folder: Path) -> Outcome:
    args = flags(folder / "tiny.yaml", folder / "memory", "--epochs", "1")
    return in_a_shell(python_command(ROOT / "train.py", *args), limit="ulimit -v 500000")


def bad_data(folder: Path) -> Outcome:
    copy = shutil.copytree(folder, folder.with_name("bad")) / "tiny.yaml"
    copy.write_text(copy.read_text().replace(str(folder), str(copy.parent)))
    next((copy.parent / "shapes" / "labels" / "train").glob("*.txt")).write_text("99 0.5 0.5 0.1 0.1\n")
    return check(copy)


def lost_labels(folder: Path) -> Outcome:
    copy = shutil.copytree(folder, folder.with_name("lost")) / "tiny.yaml"
    copy.write_text(copy.read_text().replace(str(folder), str(copy.parent)))
    for label in sorted((copy.parent / "shapes" / "labels" / "train").glob("*.txt"))[:6]:
        label.unlink()
    outcome = check(copy)
    assert "no errors; 1 problem costs labels or trust in the metrics" in outcome.out, outcome.said
    return outcome


def half_a_source(folder: Path) -> Outcome:
    images = shutil.copytree(folder / "shapes" / "images" / "val", folder / "images")
    (images / "broken.jpg").write_bytes(b"\xff\xd8\xff broken")
    weights = checkpoint(folder / "best.pt", ANCHORED)
    where = ("--device", "cpu", "--project", str(folder / "detected"))
    return run_python("-m", "tessera", "detect", "--weights", str(weights), "--source", str(images), *where)


def an_unmet_requirement(folder: Path) -> Outcome:
    weights = str(checkpoint(folder / "compared.pt", ANCHORED))
    where = ("--device", "cpu", "--workers", "0", "--project", str(folder / "compared"))
    on = ("--data", str(folder / "tiny.yaml"), "--single-cls", "--imgsz", "64")
    return run_python("-m", "tessera", "compare", weights, weights, *on, *where, "--require", "map > 0.01")


def a_run_of_another_process(folder: Path) -> Outcome:
    with RunLock(folder / "locked" / "night") as lock:
        assert lock.take() is None
        args = flags(folder / "tiny.yaml", folder / "locked", "--name", "night", "--resume", "auto")
        return run_python(ROOT / "train.py", *args, env={"TESSERA_LOCK_TIMEOUT": "1"})


def struck(folder: Path, name: str) -> Outcome:
    args = flags(folder / "tiny.yaml", folder / name, "--epochs", "1")
    return in_a_shell(python_command(FAULTY, *args), limit="ulimit -c 0", FAULT=f"0 step 2 {name}")


def a_lost_rank(folder: Path) -> Outcome:
    args = flags(folder / "tiny.yaml", folder / "lost", "--epochs", "1")
    envs = [{**env, "FAULT": "1 step 1 kill"} for env in slurm_variables()]
    with started(folder / "said", [python_command(FAULTY, *args)] * 2, envs) as (first, _):
        return first.wait()


def ranks_that_end(folder: Path, ranks: int, fault: str) -> tuple[list[int], str]:
    """Return the codes of ranks without a launcher that restarts, and stderr; the first end brings SIGTERM to all."""
    where = folder / re.sub(r"\W", "_", fault)
    args = flags(folder / "tiny.yaml", where, "--epochs", "2", "--batch-size", str(4 * ranks))
    envs = [{**env, "FAULT": fault} for env in slurm_variables(ranks)]
    with started(where / "said", [python_command(FAULTY, *args)] * ranks, envs) as jobs:
        wait_until(lambda: any(job.process.poll() is not None for job in jobs), 300, lambda: jobs[0].said)
        for job in jobs:
            job.process.send_signal(signal.SIGTERM)  # as launchers do; nothing to a process that has ended
        ends = [job.wait() for job in jobs]
    return [end.code for end in ends], "".join(end.err for end in ends)


def torchruns_own(*words: str) -> Outcome:
    return run_command([sys.executable, "-m", "torch.distributed.run", *words])


PRODUCED: dict[str, tuple[Callable[[Path], Outcome], str]] = {
    "the work is done; also a run that `--resume auto` finds done": (done_again, "is finished, after 1 epoch"),
    "the dataset, the weights or a folder": (bad_data, "--check-data: "),
    "out of memory, on the device or the host": (too_little_memory, "no more memory"),
    "compare.py: a `--require` is not met": (an_unmet_requirement, '--require "map > 0.01": not met'),
    "another rank was lost or failed; a bug, with its traceback": (a_lost_rank, "rank 1"),
    "a flag, a hyperparameter, or the YAML of a model or dataset": (
        lambda d: check(d / "tiny.yaml", "--epoches", "3"),
        "--epoches",
    ),
    "detect.py could not read some of the sources, and has done the others": (half_a_source, "broken.jpg"),
    "`--check-data`: no error, but problems that cost labels or trust in the metrics": (lost_labels, ""),
    "another process still writes the run directory": (a_run_of_another_process, "is still being written by process"),
    "Ctrl-C": (lambda d: struck(d, "SIGINT"), "Stopped as requested"),
    "SIGUSR1": (lambda d: struck(d, "SIGUSR1"), "Stopped as requested"),
    "SIGTERM": (lambda d: struck(d, "SIGTERM"), "Stopped as requested"),
    "SIGABRT: C++ code aborted, such as NCCL's watchdog": (lambda d: struck(d, "SIGABRT"), ""),
    "`kill -9`, or the kernel's OOM killer": (lambda d: struck(d, "kill"), ""),
    "torchrun, whatever ended its ranks": (
        lambda d: torchrun(ROOT / "train.py", "--epoches", "3", ranks=1),
        "--epoches",
    ),
    "torchrun does not know one of its own options": (lambda d: torchruns_own("--nonsense", "train.py"), "--nonsense"),
}
ON_LINUX = {"out of memory, on the device or the host", "SIGUSR1"}  # elsewhere no limit, another number


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("codes") / "data", train=24, val=2).parent


def test_each_row_has_a_process() -> None:
    assert [words for words, _ in ROWS] == list(PRODUCED)


@pytest.mark.slow
@pytest.mark.parametrize(("words", "code"), ROWS)
def test_the_table_of_exit_codes(words: str, code: int, folder: Path) -> None:
    if words in ON_LINUX and sys.platform != "linux":
        pytest.skip("needs Linux, whose limit of memory and numbers of signals the row is about")
    produce, said = PRODUCED[words]
    outcome = produce(folder)
    assert outcome.code == code and said in outcome.err, outcome.said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "fault", "code", "sentence"),
    [
        (2, "0 step 2 SIGTERM;1 step 2 SIGINT", 130, "Stopped as requested in epoch 0"),
        (3, "2 step 2 SIGINT;1 step 2 SIGUSR1", 138, "Stopped as requested in epoch 0"),
        (2, "1 batch 1 SIGUSR1", 138, "Stopped as requested in the validation of epoch 0"),
        (2, "0 scan 1 SIGUSR1", 138, "Stopped by SIGUSR1 before the first step"),  # it serves the store
        (3, "2 scan 1 SIGUSR1;1 scan 1 SIGUSR1", 138, "Stopped by SIGUSR1 before the first step"),
        (2, "1 end 1 SIGUSR1", 138, "Stopped by SIGUSR1 after the last epoch"),
        (1, "0 scan 1 SIGTERM", 143, "Stopped by SIGTERM before the first step was done."),
        (1, "0 end 1 SIGINT", 130, "Stopped by SIGINT after the last epoch, whose checkpoint is saved; validate"),
        (2, "1 step 2 SIGINT;1 step 2 SIGINT", 130, "Ended immediately by Ctrl-C"),
    ],
)
def test_all_ranks_end_with_the_one_signal_that_was_taken(
    folder: Path, ranks: int, fault: str, code: int, sentence: str
) -> None:
    codes, said = ranks_that_end(folder, ranks, fault)
    assert codes == [code] * ranks and said.count(sentence) == 1, said
    assert "error:" not in said and not list((folder / re.sub(r"\W", "_", fault)).rglob("*.tmp")), said
