"""A watchdog that says what it would end the process with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tessera.utils.ranks.watchdog import Watchdog


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def guard(said: list[str]) -> Iterator[Watchdog]:
    with contextlib.closing(Watchdog(1, said.append)) as made:
        yield made
