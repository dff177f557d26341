"""Which heads there are: one folder each, found by looking."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import tessera.models.heads
from tessera.models.heads.head import Head


def find_heads() -> dict[str, type[Head]]:
    """Every head by its name in a model YAML: the class names of `models/heads/*/head.py`.

    Folders that were added to `tessera.models.heads.__path__` count as well.
    """
    found: dict[str, type[Head]] = {}
    for folder in pkgutil.iter_modules(tessera.models.heads.__path__, "tessera.models.heads."):
        if folder.ispkg:
            module = importlib.import_module(f"{folder.name}.head")
            for name, kind in inspect.getmembers(module, inspect.isclass):
                if issubclass(kind, Head) and kind.__module__ == module.__name__:
                    found[name] = kind
    return found
