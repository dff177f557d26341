"""CI workflows: clean by their linter, with the documented commands, on each Python version."""

from __future__ import annotations

import re
import subprocess
import sysconfig
from pathlib import Path

import pytest
import yaml

from tests.layers import ROOT

FOLDER = ROOT / ".github" / "workflows"
WORKFLOWS = {path.name: yaml.safe_load(path.read_text()) for path in sorted(FOLDER.glob("*.yml"))}


def test_the_linter_finds_nothing() -> None:
    linter = Path(sysconfig.get_path("scripts")) / "zizmor"
    if not linter.exists():
        pytest.skip("needs zizmor, which is installed with Python 3.11 and later")
    command = [linter, "--offline", "--no-progress", "--no-config", "--persona=auditor", FOLDER]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "No findings to report" in found.stdout


def test_they_run_what_the_documents_say() -> None:
    steps = [step for flow in WORKFLOWS.values() for job in flow["jobs"].values() for step in job["steps"]]
    commands = {step["run"] for step in steps if "run" in step}
    assert commands <= {
        "pip install uv",
        "make lint type",
        "make test",
        "make build",
        "make docs",
        "make release",
        ".ci/run",
    }
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert {word for command in commands if command.startswith("make") for word in command.split()[1:]} <= set(targets)


def test_each_python_is_tried() -> None:
    requires = re.search(r'^requires-python = ">=3\.(\d+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    tested = re.search(r"tested on 3\.(\d+) to 3\.(\d+)", (ROOT / "README.md").read_text())
    assert requires is not None and tested is not None and tested[1] == requires[1]
    versions = [f"3.{minor}" for minor in range(int(tested[1]), int(tested[2]) + 1)]
    assert WORKFLOWS["ci.yml"]["jobs"]["test"]["strategy"]["matrix"]["python"] == versions


def test_only_the_publishing_jobs_have_an_identity() -> None:
    jobs = {(name, job): one["permissions"] for name, flow in WORKFLOWS.items() for job, one in flow["jobs"].items()}
    assert {key: given for key, given in jobs.items() if given != {"contents": "read"}} == {
        ("release.yml", "publish"): {"id-token": "write"},
        ("docs.yml", "publish"): {"pages": "write", "id-token": "write"},
    }
    assert all(flow["permissions"] == {} for flow in WORKFLOWS.values())
    assert WORKFLOWS["release.yml"]["jobs"]["publish"]["environment"] == "pypi"
