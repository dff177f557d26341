"""Packages that are installed for some commands only: imported where they are needed, with a message where missing."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tessera.utils.environment import forbid_telemetry
from tessera.utils.errors import UserError, explained
from tessera.utils.flags.program import installed_by, version_of
from tessera.utils.text import first_line

_TELEMETRY = "openvino_telemetry"


class MissingExtra(UserError):
    """A package of an extra is not installed, or does not load."""


def import_extra(module: str, extra: str, what: str) -> Any:
    """A module of an optional package.

    OpenVINO and its tools report their import to a server, unless the package that does so is missing: for them it is.
    ONNX Runtime reports its use, unless a variable forbids it: it does.

    Args:
        module: as in an import statement, such as "onnxruntime".
        extra: of pyproject.toml, that installs it.
        what: needs it, for the message, such as "best.onnx".

    Raises:
        MissingExtra: it is not installed, or does not load.
    """
    forbid_telemetry()
    try:
        with _without_telemetry():
            return importlib.import_module(module)
    except Exception as error:  # one that another version of its own dependencies breaks raises anything
        package = _package(module)
        raise MissingExtra(
            f"{what}: needs the package {package}, which does not load here ({first_line(error)}; found "
            f"{version_of(package)}). Install it with: {installed_by(extra)}"
        ) from error


@contextmanager
def explain_failures(what: str, modules: Sequence[str], extra: str) -> Iterator[None]:
    """Turn an exception that a library raises into one message with the versions found and needed.

    Exceptions of this program's own code, and those that `explained` knows, stay as they are.

    Args:
        what: is done, for the message, such as "--include onnx".
        modules: of the packages that do it, beside torch.
        extra: of pyproject.toml, that installs them; "" where torch alone does it.

    Raises:
        UserError: a library has failed.
    """
    try:
        yield
    except (UserError, OSError):
        raise
    except Exception as error:
        library = _raised_in(error)
        if library is None or explained(error) is not None:
            raise
        versions = "; ".join(version_of(_package(name)) for name in ("torch", *modules))
        remedy = f" with: {installed_by(extra)}" if extra else ""
        raise UserError(
            f"{what}: {library} failed ({type(error).__name__}: {first_line(error)}). Found {versions}. Where one is "
            f"not what is needed, install that version{remedy}"
        ) from error


def _raised_in(error: Exception) -> str | None:
    """The library that our code called last when the exception was raised; None where that is our code itself."""
    called = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__")).partition(".")[0]
        called = None if module == "tessera" else called or module
    called = called or type(error).__module__.partition(".")[0]  # what is compiled has no frame
    return None if called == "tessera" or called in sys.stdlib_module_names else called


def _package(module: str) -> str:
    return module.partition(".")[0].replace("_", "-")


@contextmanager
def _without_telemetry() -> Iterator[None]:
    """Inside, openvino_telemetry cannot be imported; where it was imported before, the user's program did so."""
    if _TELEMETRY in sys.modules:
        yield
        return
    sys.modules[_TELEMETRY] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[_TELEMETRY]
