"""Stages of a training, whose time `--profile` records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TypeVar

from tessera.utils.extensions import extension
from tessera.utils.ranks.world import World

T = TypeVar("T")


class NoProfile:
    """Profile that measures nothing and costs nothing."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Add the time inside to a stage; stages do not nest."""
        return nullcontext()

    def waited(self, items: Iterable[T]) -> Iterable[T]:
        """Yield the same items, and add the time until each arrives to "data wait"."""
        return items

    def step(self) -> None:
        """End an optimizer step."""

    def epoch(self, epoch: int, seconds: float) -> None:
        """End an epoch that took `seconds`."""


@contextmanager
def open_profile(on: bool, run: Path, world: World) -> Iterator[NoProfile]:
    """Return a context with a `Profile` on rank 0 if `on`, else with a `NoProfile`."""
    if not (on and world.is_main):
        yield NoProfile()
        return
    profile = extension("profile").Profile(run, world.accelerator)
    with profile.tracer:
        yield profile
