"""Parts of the user's own, named `module:name` on the command line: transforms, optimizer, callbacks, head.

A part is imported only if its name was given, on the command line or in Python: never because a checkpoint names it.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from tessera.utils.errors import ConfigError, UserError, did_you_mean
from tessera.utils.text import one_line, shown

EXPECTED = "expected module:name, such as examples.custom_optimizer:lion for lion in examples/custom_optimizer.py"


def load_part(name: str, flag: str) -> Any:
    """Import `module:name`; the working directory is searched first, as by `python -m`.

    Args:
        flag: named in messages, such as --optimizer.

    Raises:
        ConfigError: not of this form, or no such module or name.
        UserError: the module raises while it is imported.
    """
    module_name, colon, path = name.partition(":")
    if not (colon and path and all(part.isidentifier() for part in (*module_name.split("."), *path.split(".")))):
        raise ConfigError(f"{flag}: found {shown(name)}, {EXPECTED}.")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not (error.name and f"{module_name}.".startswith(f"{error.name}.")):
            raise UserError(f"{flag} {name}: {module_name} needs a module that is missing: {error.name}.") from error
        raise ConfigError(f"{flag} {name}: no module {error.name} in {here} or among the installed ones.") from error
    except Exception as error:
        text = one_line(f"{type(error).__name__}: {error}", 200)
        raise UserError(f"{flag} {name}: importing {module_name} failed: {text}.") from error
    for part in path.split("."):
        if not hasattr(found, part):
            hint = did_you_mean(part, [known for known in vars(found) if not known.startswith("_")])
            raise ConfigError(f"{flag} {name}: {module_name} has no {part}.{hint}")
        found = getattr(found, part)
    return found


def part_name(part: Any, keyword: str) -> str:
    """Return the `module:name` of a function or class given in Python, so that every process and a resume finds it.

    Raises:
        ConfigError: it has no such name, as a lambda, an instance, or a function inside a function.
    """
    module, path = getattr(part, "__module__", ""), getattr(part, "__qualname__", "")
    spec = sys.modules["__main__"].__spec__ if module == "__main__" else None
    if spec is not None:  # of `python -m examples.custom_loss`, which another process imports by its name
        return f"{spec.name}:{path}"
    name = f"{module}:{path}"
    if "<" in name or name.startswith(":") or name.endswith(":") or load_part(name, keyword) is not part:
        raise ConfigError(f"{keyword}: found {shown(str(part))}, expected a function or class at the top of a module.")
    return name


def part_names(given: Any, keyword: str) -> Any:
    """Return module:name in place of the functions and classes among given values."""
    if isinstance(given, (list, tuple)):
        return tuple(part_names(part, keyword) for part in given)
    return given if given is None or isinstance(given, str) else part_name(given, keyword)


def placed_part_names(parts: Any, keyword: str) -> tuple[str, ...]:
    """Return `module:name` or `module:name@place` of parts given as names, functions or (function, place) pairs."""
    found = []
    for part in parts if isinstance(parts, (list, tuple)) else [parts]:
        own, place = part if isinstance(part, (list, tuple)) and len(part) == 2 else (part, "")
        name = own if isinstance(own, str) else part_name(own, keyword)
        found.append(f"{name}@{place}" if place else name)
    return tuple(found)
