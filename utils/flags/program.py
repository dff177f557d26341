"""The installation: a clone or an installed package, its commands' names, and its git revision."""

from __future__ import annotations

import subprocess
from importlib import metadata
from pathlib import Path

from tessera.utils.flags.version import __version__

HOME = Path(__file__).resolve().parents[2]  # parent of data, models and utils
IS_CLONE = (HOME / "train.py").is_file()
BASE = HOME if IS_CLONE else Path()  # datasets lie below it; nothing is written into a package


def called(program: str) -> str:
    """Return a command's name for messages: train.py in a clone, else `tessera train`."""
    return program if IS_CLONE else f"tessera {program.removesuffix('.py')}"


def started(program: str) -> str:
    """Return a command line that starts a command."""
    extra = "--extra export " if program == "export.py" else ""
    return f"uv run {extra}{program}" if IS_CLONE else called(program)


def installed_by(extra: str) -> str:
    """Return the command line that installs an extra of pyproject.toml."""
    if IS_CLONE:
        return f"uv sync --extra {extra}"
    return f"pip install '{distribution() or '.'}[{extra}]'"


def distribution() -> str | None:
    """Return the name of the installed distribution; None in an unpacked source archive."""
    return next(iter(metadata.packages_distributions().get("tessera", ())), None)


def git_revision() -> str | None:
    """Return the git commit, with "-dirty" for modified files; None outside a git checkout or without git."""
    if not (HOME / ".git").exists():  # a repository further up would be another project's
        return None
    try:
        commit, changed = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}-dirty" if changed else commit


def program_version() -> dict[str, str | None]:
    """Return the program's version and git commit, under the names that its files use."""
    return {"tessera_version": __version__, "git": git_revision()}


def _git(*words: str) -> str:
    command = ["git", "--no-optional-locks", "-C", str(HOME), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
