"""Import of optional packages, with error messages for missing or broken ones."""

from __future__ import annotations

import errno
import importlib
import logging
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from typing import Any

from tessera.utils.environment import configure_libraries
from tessera.utils.errors import UserError, explain_exception
from tessera.utils.flags.program import installed_by
from tessera.utils.text import first_line

log = logging.getLogger(__name__)

_DISK = (errno.EACCES, errno.EDQUOT, errno.ENOSPC, errno.EROFS)


class MissingExtra(UserError):
    """A package of an extra that is not installed, or that cannot be imported."""


def import_extra(module: str, extra: str, what: str) -> Any:
    """Import a module of an optional package without telemetry; raise MissingExtra if that fails.

    `extra` of pyproject.toml installs it; `what` needs it, such as "best.onnx", for the message.
    """
    configure_libraries()
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    try:
        return importlib.import_module(module)
    except Exception as error:  # broken dependencies raise any type
        raise MissingExtra(
            f"{what}: needs the package {_package(module)}, which does not load here ({first_line(error)}; found "
            f"{_version_of(module)}). Install it with: {installed_by(extra)}"
        ) from error


@contextmanager
def explain_library_errors(what: str, modules: Sequence[str], extra: str) -> Iterator[None]:
    """Turn an exception of a library into a UserError with the versions of torch and `modules`.

    Exceptions of our own code, of the disk, and those that `explain_exception` knows pass unchanged. `what` is the
    task, such as "--include onnx"; `extra` of pyproject.toml installs the packages, "" = none.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        library = _raised_in(error)
        of_disk = isinstance(error, OSError) and error.errno in _DISK
        if library is None or of_disk or explain_exception(error) is not None:
            raise
        log.debug(f"{what}: {library} failed", exc_info=error)
        remedy = f"Install what it needs with: {installed_by(extra)}; else report it." if extra else "Please report it."
        raise UserError(
            f"{what}: {library} failed ({type(error).__name__}: {first_line(error)}). Found "
            f"{', '.join(map(_version_of, ('torch', *modules)))}. {remedy}"
        ) from error


def _raised_in(error: Exception) -> str | None:
    """Return the library that raised the exception; None for our own code."""
    called = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__")).partition(".")[0]
        called = None if module == "tessera" else called or module
    called = called or type(error).__module__.partition(".")[0]  # compiled code has no frame
    return None if called == "tessera" or called in sys.stdlib_module_names else called


def _package(module: str) -> str:
    return module.partition(".")[0].replace("_", "-")


def _version_of(module: str) -> str:
    try:
        return f"{_package(module)} {metadata.version(_package(module))}"
    except metadata.PackageNotFoundError:
        return f"{_package(module)} is not installed"
