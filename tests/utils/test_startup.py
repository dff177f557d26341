"""Start of a command before torch is imported; full, closed and broken stdout and stderr."""

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
from tessera.utils.environment import configure_command
from tests.data.source.made_yaml import BODY, dataset, write

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = {"WORLD_SIZE": "4", "TORCHELASTIC_USE_AGENT_STORE": "True"}


def run(*words: str) -> tuple[int, str, list[str], set[str]]:
    """Exit code, stdout, the lines of stderr, and the modules that were imported."""
    command = [sys.executable, "-X", "importtime", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    lines, start = done.stderr.splitlines(), "import time:"
    imported = {line.rpartition("|")[2].strip() for line in lines if line.startswith(start)}
    return done.returncode, done.stdout, [line for line in lines if not line.startswith(start)], imported


@pytest.mark.parametrize("script", ["train.py", "val.py", "detect.py", "export.py", "compare.py"])
@pytest.mark.parametrize(
    ("flag", "code"), [("--help", 0), ("--list-weights", 0), ("--batch-sise=3", 2), ("--imgsz=-1", 2)]
)
def test_help_lists_and_wrong_flags_are_answered_without_torch(script: str, flag: str, code: int) -> None:
    found, out, lines, imported = run(script, flag)
    assert found == code
    assert {"argparse", "tessera.utils.startup"} <= imported and not imported & {"torch", "numpy", "pandas", "cv2"}
    if code:
        assert len(lines) == 1 and lines[0].startswith("error: ") and flag.partition("=")[0] in lines[0]
    else:
        assert lines == [] and ("yolox_s.pth" if flag == "--list-weights" else "--device STR") in out


@pytest.mark.parametrize(
    ("mistake", "flags"), [("clases: [cat]", ()), ("clases: [cat]", ("--check-data",)), ("", ("--check-data",))]
)
def test_a_dataset_is_checked_and_a_mistake_in_its_yaml_is_reported_without_torch(
    tmp_path: Path, mistake: str, flags: tuple[str, ...]
) -> None:
    yaml = write(dataset(tmp_path) / "a.yaml", BODY + mistake)
    found, out, lines, imported = run("train.py", "--data", str(yaml), "--tile", "64", *flags)
    assert "numpy" in imported and not imported & {"torch", "torchvision", "pandas", "matplotlib"}
    if mistake:
        assert found == 2 and len(lines) == 1 and lines[0].startswith(f"error: {yaml}:4: "), lines
    else:
        assert found == 3 and "2 images with 2 objects can be used" in out and "--tile 64" in lines[-1], (out, lines)


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
    monkeypatch.setattr(startup.time, "sleep", lambda _: waited.append(True))
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
        configure_command()
        assert os.environ.get("GOMP_SPINCOUNT") == spins


PROGRAM = """
import os, sys
from tessera.utils.startup import protect_streams
protect_streams()
with open(sys.argv[1], "w") as file:
    for _ in range(3):
        print("out", flush=True)
        print("err", file=sys.stderr, flush=True)
    os.write(1, b"from C\\n")
    os.write(2, b"from C\\n")
    print("kept back until the end")
    file.write("done")
"""


FULL_FOR_A_MOMENT = """
import os, sys
from tessera.utils.startup import protect_streams
reader, writer = os.pipe()
os.set_blocking(reader, False)
os.set_blocking(writer, False)
os.dup2(writer, 1)
protect_streams()
for _ in range(300):
    print("x" * 1000, flush=True)
while len(os.read(reader, 1 << 20)) == 1 << 20:
    pass
print("afterwards", flush=True)
assert b"afterwards" in os.read(reader, 1 << 20)
for _ in range(300):  # full again, at the end
    print("x" * 1000)
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("streams", ["", ">/dev/full", "2>/dev/full", ">/dev/full 2>&1", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_program_goes_on_and_its_files_are_its_own(tmp_path: Path, streams: str) -> None:
    words = ["sh", "-c", f'exec "$@" {streams}', "sh", sys.executable, "-c", PROGRAM, str(tmp_path / "file")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "file").read_text() == "done"
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    if streams == ">/dev/full":
        assert done.stderr.splitlines()[0].startswith("WARNING: stdout: No space left on device")
        assert done.stderr.count("WARNING") == 1 and done.stderr.count("err\n") == 3
    if streams == "2>/dev/full":
        assert "WARNING: stderr: No space left" in done.stdout and done.stdout.count("out\n") == 3
    if not streams:
        assert done.stdout == "out\nout\nout\nfrom C\nkept back until the end\n"
        assert done.stderr == "err\nerr\nerr\nfrom C\n"


def test_a_pipe_that_is_full_for_a_moment_loses_what_is_printed_then_and_nothing_later() -> None:
    """Who reads may have made the pipe non-blocking; a write to a full one fails instead of waiting."""
    command = [sys.executable, "-c", FULL_FOR_A_MOMENT]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}  # it would hide the error
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr
