"""`make gpu` on a machine as it is: without a GPU, and without the packages that only other tests need."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
OPTIONAL = ("hypothesis", "pycocotools", "scipy", "albumentations")


def run_target(target: str, *more: str) -> subprocess.CompletedProcess[str]:
    """The tests of a target of the Makefile, in a process that lacks the optional packages."""
    asked = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    _, _, words = asked.splitlines()[0].partition(" -m pytest ")
    absent = f"import sys; sys.modules.update(dict.fromkeys({OPTIONAL}))"
    program = f"{absent}; import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, *shlex.split(words), "-p", "no:cacheprovider", *more]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # plugins of the absent packages
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_no_optional_package_is_needed() -> None:
    done = run_target("gpu-stand-in", "--collect-only", "-m", "gpu or not gpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_batches_come_pinned_for_a_gpu" in done.stdout and "test_fused_parts_are_the_plain_ones" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_one_sentence_says_so() -> None:
    done = run_target("gpu")
    assert done.returncode != 0
    said = (done.stdout + done.stderr).strip().splitlines()
    assert len(said) == 1 and "finds no CUDA device; make gpu-stand-in needs none" in said[0], said
