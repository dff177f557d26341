"""The program itself: where its files lie, how its commands are called, and its revision.

It runs from a clone, or as a package that was installed.
"""

from __future__ import annotations

import subprocess
from importlib import metadata
from pathlib import Path

HOME = Path(__file__).resolve().parents[2]  # holds data, models and utils: the clone, or the package's folder
IS_CLONE = (HOME / "train.py").is_file()
BASE = HOME if IS_CLONE else Path()  # datasets are looked for and written below it: nothing is written into a package


def called(program: str) -> str:
    """A command's name in messages: train.py in a clone, else `tessera train`."""
    return program if IS_CLONE else f"tessera {program.removesuffix('.py')}"


def started(program: str) -> str:
    """What starts a command: `uv run train.py` in a clone, else `tessera train`."""
    return f"uv run {program}" if IS_CLONE else called(program)


def installed_by(extra: str) -> str:
    """What installs the packages of an extra of pyproject.toml."""
    if IS_CLONE:
        return f"uv sync --extra {extra}"
    return f"pip install '{distribution() or '.'}[{extra}]'"


def distribution() -> str | None:
    """The package that was installed; None in a source archive that was only unpacked."""
    return next(iter(metadata.packages_distributions().get("tessera", ())), None)


def git_revision() -> str | None:
    """Commit of the program, with "-dirty" where files differ from it; None outside a git checkout or without git."""
    if not (HOME / ".git").exists():  # a repository further up would be another project's
        return None
    try:
        commit, changed = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}-dirty" if changed else commit


def _git(*words: str) -> str:
    """What a git command says; without optional locks, it writes nothing into the repository."""
    command = ["git", "--no-optional-locks", "-C", str(HOME), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
