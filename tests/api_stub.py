"""The stub of the Python API, tessera/__init__.pyi, made from the flags of the commands.

uv run python -m tests.api_stub      # write it again
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import tessera
from tests.layers import ROOT

STUB = ROOT / "tessera" / "__init__.pyi"
HEAD = '''"""Types of the Python API. `python -m tests.api_stub` writes this file from the flags of the commands."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from tessera.analysis.comparison.comparison import Comparison
from tessera.commands.detect import DetectionSummary
from tessera.deploy.inference.detector import Detector as Detector
from tessera.utils.types import Metrics

__version__: str
'''


def content() -> str:
    """The text of the stub."""
    commands = (tessera.train, tessera.val, tessera.detect, tessera.export, tessera.compare)
    return "\n".join([HEAD, *map(_function, ("train", "val", "detect", "export", "compare"), commands)]) + "\n"


def _function(name: str, function: Callable[..., Any]) -> str:
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    keywords = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    first = ["*models: str | Path"] if len(keywords) < len(parameters) else ["*"]
    listed = [*first, *(f"{p.name}: {p.annotation} = {_shown(p.default)}" for p in keywords)]
    arguments = "".join(f"    {one},\n" for one in listed)
    return f"def {name}(\n{arguments}) -> {signature.return_annotation}: ..."


def _shown(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).replace("'", '"')


if __name__ == "__main__":
    STUB.write_text(content())
