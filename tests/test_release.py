"""What is refused as a release: tag, version and changelog that differ, a tree with changes, files without licences."""

from __future__ import annotations

import io
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

import tessera
from tests.house import ROOT
from tests.release import LICENCES, built_problems, source_problems, version_of

CHANGELOG = (
    "# Changelog\n\n## [Unreleased]\n\n## [1.2.0] - 2030-01-31\n\n### Added\n\n- A thing.\n\n## [1.1.0] - 2029-01-31\n"
)


def git(root: Path, *words: str) -> None:
    subprocess.run(
        ["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True, capture_output=True
    )


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository whose commit is to be released."""
    root = tmp_path / "clone"
    (root / "utils" / "flags").mkdir(parents=True)
    (root / "utils" / "flags" / "version.py").write_text('"""Doc."""\n\n__version__ = "1.2.0"\n')
    (root / "CHANGELOG.md").write_text(CHANGELOG)
    for name in LICENCES:
        (root / name).write_text(f"{name} of the clone\n")
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


def test_a_commit_without_the_tag_of_its_version(clone: Path) -> None:
    git(clone, "tag", "-d", "v1.2.0")
    assert source_problems(clone) == [
        "the commit has no tag, but utils/flags/version.py says 1.2.0. Tag it v1.2.0, or change the version."
    ]
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


def test_a_tree_with_changes(clone: Path) -> None:
    (clone / "NOTICE").write_text("changed")
    (clone / "new.py").touch()
    assert source_problems(clone) == ["the tree has changes:  M NOTICE, ?? new.py. Commit or remove them."]


def build(folder: Path, clone: Path, version: str = "1.2.0", without: str = "") -> Path:
    """A wheel and a source archive as setuptools lays them out; `without` is left out."""
    kept = [name for name in LICENCES if name != without]
    described = "".join([f"Metadata-Version: 2.4\nVersion: {version}\n", *(f"License-File: {n}\n" for n in kept), "\n"])
    folder.mkdir()
    with zipfile.ZipFile(folder / "name-1.2.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("name-1.2.0.dist-info/METADATA", described)
        wheel.writestr("name/vendored/NOTICE", "of another work")
        for name in kept:
            wheel.writestr(f"name-1.2.0.dist-info/licenses/{name}", (clone / name).read_bytes())
    with tarfile.open(folder / "name-1.2.0.tar.gz", "w:gz") as archive:
        for name, content in [("PKG-INFO", described.encode()), *((n, (clone / n).read_bytes()) for n in kept)]:
            member = tarfile.TarInfo(f"name-1.2.0/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return folder


def test_files_with_version_and_licences_are_to_be_published(clone: Path, tmp_path: Path) -> None:
    assert built_problems(build(tmp_path / "dist", clone), clone) == []


def test_files_of_another_version_or_without_a_licence(clone: Path, tmp_path: Path) -> None:
    wheel, archive = "name-1.2.0-py3-none-any.whl", "name-1.2.0.tar.gz"
    assert built_problems(build(tmp_path / "old", clone, version="1.1.0"), clone) == [
        f"{name}: it is version 1.1.0, expected 1.2.0." for name in (wheel, archive)
    ]
    lacking = built_problems(build(tmp_path / "bare", clone, without="NOTICE"), clone)
    assert lacking[:2] == [
        f"{wheel}: NOTICE of the clone is not in it.",
        f"{wheel}: its metadata does not name NOTICE as a License-File.",
    ]
    assert [line.partition(":")[0] for line in lacking] == [wheel, wheel, archive, archive]
    (clone / "NOTICE").write_text("newer")
    assert len(built_problems(tmp_path / "old", clone)) == 4


def test_a_folder_without_both_files(clone: Path, tmp_path: Path) -> None:
    folder = build(tmp_path / "dist", clone)
    (folder / "name-1.2.0.tar.gz").unlink()
    (problem,) = built_problems(folder, clone)
    assert "found name-1.2.0-py3-none-any.whl, expected one wheel and one source archive" in problem


def test_this_version_is_the_newest_of_the_changelog() -> None:
    assert version_of(ROOT) == tessera.__version__
    assert f"\n## [{tessera.__version__}] - " in (ROOT / "CHANGELOG.md").read_text().split("## [Unreleased]")[1]
