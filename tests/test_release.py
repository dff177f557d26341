"""Refused releases: a tag, version and changelog that differ, and a tree with changes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

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
