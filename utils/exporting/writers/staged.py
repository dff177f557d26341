"""Files that a library writes by name are written elsewhere first, then put in place whole."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tessera.utils.errors import UserError
from tessera.utils.files import atomic_write


@contextmanager
def staged_file(path: Path) -> Iterator[Path]:
    """Where to write the one file that takes the place of `path` afterwards, whole or not at all.

    Raises:
        UserError: it cannot be written.
    """
    with tempfile.TemporaryDirectory() as folder:
        staged = Path(folder) / path.name
        yield staged
        put_in_place({staged: path})


def put_in_place(files: Mapping[Path, Path]) -> None:
    """Copy each file to where it belongs, whole or not at all.

    Args:
        files: where each was written → where it belongs, in the order in which they should appear.

    Raises:
        UserError: a file cannot be written.
    """
    for staged, path in files.items():
        try:
            with staged.open("rb") as source, atomic_write(path) as target:
                shutil.copyfileobj(source, target)
        except OSError as error:
            raise UserError(
                f"{path}: cannot write the export: {error.strerror or error}. Make room, or the folder writable."
            ) from error
