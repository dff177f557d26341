"""The folder of a dataset that is made from another one: whole, or not there."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tessera.utils.errors import UserError
from tessera.utils.text import shown


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
