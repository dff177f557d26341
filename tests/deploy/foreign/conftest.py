"""Fixtures for files of other programs."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.foreign.made import Tensors, small_yolox

MEMORY = 3 << 30  # bytes of address space beside what is there before; the files have some megabytes


@pytest.fixture(scope="session")
def small(shared: Path) -> Tensors:
    """The tensors of a small YOLOX; not to be changed."""
    return small_yolox(shared)


@pytest.fixture
def bounded() -> Iterator[None]:
    """No more memory than this; where it cannot be known what the process has, as much as there is."""
    statm = Path("/proc/self/statm")
    before = resource.getrlimit(resource.RLIMIT_AS)
    if statm.is_file():
        used = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)
