"""Tessera from Python: `train(data="shapes.yaml")`, `val`, `detect`, `export`, `compare` and `Detector`.

The functions take the names of their command's flags. Importing this costs nothing: what a name needs, torch among it,
is loaded when the name is first used.

`data`, `models`, `utils`, `analysis` and `deploy` are links to what lies beside this folder, so every module has one
name wherever it is imported from: `tessera.utils.boxes`, never `utils.boxes`. Type checkers, editors and the build
follow links, but not a `__path__` set at run time. A ZIP unpacked on Windows has text files in place of links: there
`__path__` names the folders.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if not Path(__file__).with_name("utils").is_dir():
    __path__.append(str(Path(__file__).parents[1]))

from tessera.utils.flags.version import __version__

if TYPE_CHECKING:
    from tessera.commands.compare import run as compare
    from tessera.commands.detect import run as detect
    from tessera.commands.export import run as export
    from tessera.commands.train import run as train
    from tessera.commands.val import run as val
    from tessera.deploy.inference.detector import Detector

__all__ = ["Detector", "__version__", "compare", "detect", "export", "train", "val"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'tessera' has no attribute {name!r}; it has {', '.join(__all__)}")
    if name == "Detector":
        return importlib.import_module("tessera.deploy.inference.detector").Detector
    return importlib.import_module(f"tessera.commands.{name}").run


def __dir__() -> list[str]:
    return __all__
