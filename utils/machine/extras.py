"""Packages that are installed for some commands only: imported where they are needed, with a message where missing."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tessera.utils.environment import forbid_telemetry
from tessera.utils.errors import UserError
from tessera.utils.flags.program import installed_by

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
    except ImportError as error:
        package = module.partition(".")[0].replace("_", "-")
        raise MissingExtra(
            f"{what}: needs the package {package}, which does not load here ({error}). Install it with: "
            f"{installed_by(extra)}"
        ) from error


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
