"""The folder of a dataset that is made from another one: new, apart from its pictures, and whole or not there."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tessera.utils.errors import ConfigError, UserError
from tessera.utils.text import shown
from tessera.utils.types import DatasetSpec


def require_new(folder: Path, spec: DatasetSpec, flag: str) -> None:
    """Refuse a folder that a dataset cannot be written to without touching what is there.

    Args:
        folder: where to.
        spec: the dataset that it is made from.
        flag: that named the folder.

    Raises:
        ConfigError: something is in it, or the dataset lists the pictures that would be.
    """
    try:
        taken = any(folder.iterdir())
    except FileNotFoundError:
        taken = False
    except OSError as error:
        raise ConfigError(f"{flag} {shown(folder)}: found {error.strerror}, expected a folder to be made.") from error
    if taken:
        raise ConfigError(f"{flag} {shown(folder)}: it is not empty, and nothing in it is replaced. Name a new folder.")
    for entry in (entry for entries in spec.splits.values() for entry in entries):
        if folder.resolve().is_relative_to(entry.resolve()):
            raise ConfigError(
                f"{flag} {shown(folder)}: it lies in {shown(entry)}, whose pictures are those of the dataset: those of "
                "the copy would be too. Name a folder elsewhere."
            )


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to write to, which becomes `folder` at the end; where something fails, nothing is left.

    Args:
        folder: absolute; not there, or empty.

    Raises:
        UserError: it cannot be written, or something cannot be read meanwhile.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name[:100]}.") as staging:
            staged = Path(staging) / folder.name
            staged.mkdir()
            yield staged
            staged.replace(folder)
    except OSError as error:
        at = f" ({shown(Path(error.filename))})" if isinstance(error.filename, str) else ""
        raise UserError(f"{shown(folder)}: it cannot be written: {error.strerror}{at}. Name another folder.") from error
