"""Refused releases: a tag, version and changelog that differ, a tree with changes; and the CI workflows."""

from __future__ import annotations

import re
import subprocess
import sysconfig
from pathlib import Path

import pytest
import yaml

import tessera
from tests.layers import ROOT
from tests.release import source_problems, version_of

CHANGELOG = (
    "# Changelog\n\n## [Unreleased]\n\n## [1.2.0] - 2030-01-31\n\n### Added\n\n- A thing.\n\n## [1.1.0] - 2029-01-31\n"
)


def git(root: Path, *words: str) -> None:
    subprocess.run(
        ["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True, capture_output=True
    )


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    root = tmp_path / "clone"
    (root / "utils" / "flags").mkdir(parents=True)
    (root / "utils" / "flags" / "version.py").write_text('"""Doc."""\n\n__version__ = "1.2.0"\n')
    (root / "CHANGELOG.md").write_text(CHANGELOG)
    (root / "NOTICE").write_text("of the clone")
    git(root, "init", "-q")
    commit(root)
    git(root, "tag", "v1.2.0")
    return root


def commit(root: Path) -> None:
    git(root, "add", ".")
    git(root, "commit", "-qm", "a change")


def test_a_tagged_clean_commit_is_to_be_released(clone: Path) -> None:
    git(clone, "tag", "latest")
    assert source_problems(clone) == []
    (clone / "NOTICE").write_text("changed")
    (clone / "new.py").touch()
    assert source_problems(clone) == ["the tree has changes:  M NOTICE, ?? new.py. Commit or remove them."]


def test_a_commit_without_the_tag_of_its_version(clone: Path) -> None:
    git(clone, "tag", "-d", "v1.2.0")
    git(clone, "tag", "v1.3.0")
    (problem,) = source_problems(clone)
    assert problem.startswith("the commit has the tag v1.3.0, but utils/flags/version.py says 1.2.0.")


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("[1.2.0]", "[1.1.9]", "its newest section is 1.1.9, but"),
        (" - 2030-01-31", "", "its newest section is 1.2.0 without a date, but"),
        ("[Unreleased]\n", "[Unreleased]\n\n- Late.\n", "Unreleased has entries, which belong to 1.2.0."),
    ],
)
def test_a_changelog_that_is_not_of_this_version(clone: Path, before: str, after: str, said: str) -> None:
    (clone / "CHANGELOG.md").write_text(CHANGELOG.replace(before, after, 1))
    commit(clone)
    git(clone, "tag", "-f", "v1.2.0")
    (problem,) = source_problems(clone)
    assert problem.startswith("CHANGELOG.md: ") and said in problem


def test_this_version_is_the_newest_of_the_changelog() -> None:
    assert version_of(ROOT) == tessera.__version__
    assert f"\n## [{tessera.__version__}] - " in (ROOT / "CHANGELOG.md").read_text().split("## [Unreleased]")[1]


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
