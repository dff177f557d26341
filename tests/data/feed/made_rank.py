"""A stand-in for `World`, without a process group."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


def rank(number: int, size: int, node_first: Callable[[Any], Any] = lambda value: value) -> Any:
    """What the loader looks at of a World of one node; `node_first` gives what its first rank has."""
    return SimpleNamespace(
        rank=number,
        size=size,
        local_rank=number,
        local_size=size,
        is_main=number == 0,
        node_first=node_first,
        accelerator=SimpleNamespace(pins_memory=False),
        node_gather=lambda value: [value] * size,
        cpus=16,
    )
