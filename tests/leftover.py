"""Temporary files of a killed process."""

from __future__ import annotations

from pathlib import Path

from tessera.utils.files import open_temporary


def leave_behind(path: Path, ending: str = "") -> Path:
    """Return the temporary file of a process that was killed on this host while it wrote `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file, temporary = open_temporary(path, ending)
    file.close()
    return temporary
