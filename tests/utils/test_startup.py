"""What a command answers before torch is imported."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "importtime", *words], cwd=ROOT, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("script", ["train.py", "val.py"])
@pytest.mark.parametrize(("flag", "code"), [("--help", 0), ("--batch-sise=3", 2), ("--imgsz=-1", 2)])
def test_help_and_wrong_flags_are_answered_without_torch(script: str, flag: str, code: int) -> None:
    done = run(script, flag)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    said = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert done.returncode == code
    assert {"argparse", "utils.startup"} <= imported and not imported & {"torch", "numpy", "pandas", "cv2"}
    if code:
        assert len(said) == 1 and said[0].startswith("error: ") and flag.partition("=")[0] in said[0]
    else:
        assert (said == [] and "--epochs" in done.stdout) or "--conf-thres" in done.stdout


def test_ctrl_c_while_torch_is_imported_is_quiet() -> None:
    program = """
import time
from utils.config import TrainConfig
from utils.startup import check_command_line
check_command_line(TrainConfig, ["--epochs", "3"])
print("importing", flush=True)
time.sleep(60)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (130, "interrupted\n")
