"""Temporary files of a killed process."""

from __future__ import annotations

from pathlib import Path

from tessera.utils.files import atomic_write


def leave_behind(path: Path) -> Path:
    """Return the temporary file of a process that was killed on this host while it wrote `path`."""
    with atomic_write(path):
        (temporary,) = path.parent.glob(f".{path.name}.*.tmp")
    return path.rename(temporary)
