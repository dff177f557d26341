"""Packages that are installed for some commands only: imported where they are needed, with a message where missing."""

from __future__ import annotations

import errno
import importlib
import logging
import sys
import tomllib
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tessera.utils.environment import forbid_telemetry
from tessera.utils.errors import UserError, explained
from tessera.utils.flags.program import HOME, IS_CLONE, distribution, installed_by
from tessera.utils.text import first_line

log = logging.getLogger(__name__)

_TELEMETRY = "openvino_telemetry"
_DISK = (errno.EACCES, errno.EDQUOT, errno.ENOSPC, errno.EROFS)  # another OSError is that of a library


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
            f"{version_of(package, extra)}). Install it with: {installed_by(extra)}"
        ) from error


@contextmanager
def explain_failures(what: str, modules: Sequence[str], extra: str) -> Iterator[None]:
    """Turn an exception that a library raises into one message with the versions found and needed.

    Exceptions of this program's own code, those that `explained` knows and those of a disk stay as they are.

    Args:
        what: is done, for the message, such as "--include onnx".
        modules: of the packages that do it, beside torch.
        extra: of pyproject.toml, that installs them; "" where torch alone does it.

    Raises:
        UserError: a library has failed.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        library = _raised_in(error)
        of_disk = isinstance(error, OSError) and error.errno in _DISK
        if library is None or of_disk or explained(error) is not None:
            raise
        log.debug(f"{what}: {library} failed", exc_info=error)
        packages = [_package(name) for name in ("torch", *modules)]
        remedy = "All are as needed: please report it."
        if not all(_is_as_needed(package, extra) for package in packages):
            remedy = f"Install what is needed with: {installed_by(extra)}" if extra else "Install what is needed."
        raise UserError(
            f"{what}: {library} failed ({type(error).__name__}: {first_line(error)}). Found "
            f"{'; '.join(version_of(package, extra) for package in packages)}. {remedy}"
        ) from error


def version_of(package: str, extra: str = "") -> str:
    """Return the version of a package that is installed, and the versions that are needed where these are declared.

    Args:
        package: as a registry calls it.
        extra: whose bounds count beside those of the core.
    """
    found = _installed(package)
    needed = str(_needed(package, extra))
    return (f"{package} {found}" if found else f"{package} is not installed") + (f", needed {needed}" if needed else "")


def _is_as_needed(package: str, extra: str) -> bool:
    found = _installed(package)
    return found is not None and _needed(package, extra).contains(found, prereleases=True)


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _needed(package: str, extra: str) -> SpecifierSet:
    """The versions that the core and an extra need; where neither needs the package, those that another extra does."""
    declared = {of: requirement.specifier for of, requirement in _requirements() if requirement.name == package}
    joined = SpecifierSet()
    for specifier in [declared[of] for of in ("", extra) if of in declared] or declared.values():
        joined &= specifier
    return joined


@cache
def _requirements() -> list[tuple[str, Requirement]]:
    """What the program depends on, each with the extra that adds it; "" of the core."""
    if IS_CLONE:
        project = tomllib.loads((HOME / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        groups = {"": project["dependencies"], **project["optional-dependencies"]}
        return [(extra, Requirement(text)) for extra, texts in groups.items() for text in texts]
    name = distribution()
    texts = [text.partition("extra ==") for text in (name and metadata.requires(name)) or []]
    return [(extra.strip(" \"'"), Requirement(text.rpartition(";")[0] or text)) for text, _, extra in texts]


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
