"""Start of a command before torch is imported, and its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from tessera.utils import startup
from tessera.utils.config import TrainConfig
from tessera.utils.environment import limit_openmp_spinning

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = {"WORLD_SIZE": "4", "TORCHELASTIC_USE_AGENT_STORE": "True"}


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "importtime", *words], cwd=ROOT, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("script", ["train.py", "val.py", "detect.py", "export.py", "compare.py"])
@pytest.mark.parametrize(
    ("flag", "code"), [("--help", 0), ("--list-weights", 0), ("--batch-sise=3", 2), ("--imgsz=-1", 2)]
)
def test_help_lists_and_wrong_flags_are_answered_without_torch(script: str, flag: str, code: int) -> None:
    done = run(script, flag)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    lines = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert done.returncode == code
    assert {"argparse", "tessera.utils.startup"} <= imported and not imported & {"torch", "numpy", "pandas", "cv2"}
    if code:
        assert len(lines) == 1 and lines[0].startswith("error: ") and flag.partition("=")[0] in lines[0]
    else:
        assert lines == [] and ("yolox_s.pth" if flag == "--list-weights" else "--device STR") in done.stdout


def test_a_working_directory_that_was_deleted_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    script = 'cd "$1" && rmdir "$1" && exec "$2" "$3" --epochs 1'
    words = ["sh", "-c", script, "sh", str(tmp_path / "gone"), sys.executable, str(ROOT / "train.py")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith("error: the working directory was deleted. Change to")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ({"RANK": "3", "WORLD_SIZE": "4"}, "rank 3: error: "),
        ({"RANK": "2", "LOCAL_RANK": "0", **TORCHRUN}, "rank 2: error: "),
        ({"RANK": "3", "LOCAL_RANK": "1", **TORCHRUN}, ""),
        ({"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "3"}, ""),
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "3"}, "error: "),
    ],
    ids=["by hand", "first of a node", "second of a node", "task", "first task"],
)
def test_a_wrong_flag_is_printed_once_for_each_command_line(
    place: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(startup, "protect_streams", lambda: None)
    monkeypatch.setattr(sys, "argv", ["train.py", "--imgsz", "-1"])
    waited: list[bool] = []  # of a rank that says nothing: its end must not be the job's before another one has spoken
    monkeypatch.setattr(startup, "rank_0_reports", lambda: waited.append(True))
    with pytest.raises(SystemExit, match="2"):
        startup.check_command_line(TrainConfig)
    found = capsys.readouterr().err
    assert found.startswith(message) and bool(found) == bool(message), found
    assert bool(waited) == (not message)


def test_ctrl_c_while_torch_is_imported_is_quiet() -> None:
    program = """
import time
from tessera.utils.config import TrainConfig
from tessera.utils.startup import check_command_line
check_command_line(TrainConfig)
print("importing", flush=True)
time.sleep(60)
"""
    command, pipe = [sys.executable, "-c", program, "--epochs", "3", "--quad"], subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == "WARNING: --quad: YOLOv5 flags that have no effect.\ninterrupted\n"


@pytest.mark.parametrize(
    ("given", "spins"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)]
)
def test_waiting_threads_sleep_soon_unless_the_user_has_set_how_they_wait(
    given: dict[str, str], spins: str | None
) -> None:
    with patch.dict(os.environ, given, clear=True):
        limit_openmp_spinning()
        assert os.environ.get("GOMP_SPINCOUNT") == spins


def test_a_process_ends_with_its_code_once_threads_and_what_is_registered_are_done() -> None:
    program = """
import atexit, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from tessera.utils.startup import end_process

class Late:
    def __del__(self):
        print("freed")

late = Late()
ThreadPoolExecutor(1).submit(lambda: (time.sleep(0.3), sys.stdout.write("pool done\\n")))  # never shut down
threading.Thread(target=lambda: (time.sleep(0.3), sys.stdout.write("thread done\\n"))).start()
atexit.register(print, "registered")
sys.stderr.write("said")
end_process(7)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (7, "said")
    assert sorted(done.stdout.split("\n")) == ["", "pool done", "registered", "thread done"]


def test_a_program_that_runs_the_command_has_the_last_word(tmp_path: Path) -> None:
    """os._exit lost the statistics of `python -m cProfile -o out train.py`."""
    command, out = tmp_path / "command.py", tmp_path / "out"
    command.write_text("from tessera.utils.startup import end_process\nend_process(7)\n")
    profiled = [sys.executable, "-m", "cProfile", "-o", str(out), str(command)]
    subprocess.run(profiled, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60, check=False)
    assert out.stat().st_size > 0
