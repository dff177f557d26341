"""Progress bar of an epoch: losses, speed and data wait."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from torch import Tensor
from tqdm import tqdm

from tessera.utils.ranks.world import World

_WIDTH = 10
_BAR = "{desc} {percentage:3.0f}%|{bar:10}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}]"
_REFRESH_S = 0.5  # reading the losses makes the host wait for the device, so not at every step
_PLAIN_REFRESH_S = 60.0  # where each refresh is a line of its own

T = TypeVar("T")


class EpochBar:
    """Header and progress bar of an epoch, labelled such as "3/99"; a context manager.

    On a terminal the bar moves. Elsewhere, as in a log file, a plain line is printed at the end of the epoch and once a
    minute before. Ranks other than 0 only measure. After a resume in the middle of the epoch, `start` batches are done.
    """

    def __init__(self, label: str, batches: int, world: World, loss_names: Sequence[str], start: int = 0) -> None:
        losses = (f"{name}_loss" for name in loss_names)
        self.columns = ("Epoch", "GPU_mem", *losses, "Instances", "Size", "Data_wait")
        self.label, self.batches = label, batches
        self.done = self._start = start
        self.wait_s = 0.0
        self._accelerator = world.accelerator
        self._stream = sys.stderr
        self._prints = world.is_main
        self._plain = not self._stream.isatty()
        if not self._plain:
            with suppress(OSError):  # no size known
                self._plain = os.get_terminal_size(self._stream.fileno()).columns == 0  # as in some containers
        self._started = self._shown = time.monotonic()
        self._ended: float | None = None
        self._latest: tuple[Tensor | Sequence[float], int, int] | None = None
        self._bar: tqdm[Any] | None = None

    def __enter__(self) -> EpochBar:
        self._started = time.monotonic()
        self._shown = self._started if self._plain else -math.inf  # a bar shows its first batch immediately
        if self._prints:
            tqdm.write("".join(f"{name:>{_WIDTH}}" for name in self.columns), file=self._stream)
            if not self._plain:
                self._bar = tqdm(
                    total=self.batches, initial=self.done, bar_format=_BAR, file=self._stream, dynamic_ncols=True
                )
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self._accelerator.synchronize()  # what was queued belongs to the epoch; after an error it may never end
        self._ended = time.monotonic()
        if kind is None:
            self._show()
        if self._bar is not None:
            self._bar.close()

    @property
    def seconds(self) -> float:
        """Seconds since the epoch began, or its duration once it has ended."""
        return (self._ended or time.monotonic()) - self._started

    @property
    def data_wait(self) -> float:
        """Fraction of the time so far spent waiting for batches."""
        return min(self.wait_s / max(self.seconds, 1e-9), 1.0)

    @property
    def batches_per_s(self) -> float:
        """Batches per second over all ranks, since the epoch began or was resumed."""
        return (self.done - self._start) / max(self.seconds, 1e-9)

    def timed(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the batches, adding the time waited for each to `wait_s`."""
        iterator = iter(batches)
        while True:
            before = time.monotonic()
            batch = next(iterator, None)
            self.wait_s += time.monotonic() - before
            if batch is None:
                return
            yield batch

    def update(self, batches: int, losses: Tensor | Sequence[float], instances: int, size: int) -> None:
        """Count `batches` since the last call as done, and refresh the output when it is due.

        Losses are means of the epoch so far, read only when they are shown; `instances` are the objects in the last
        batch, and `size` is its longer side in pixels.
        """
        self.done += batches
        self._latest = (losses, instances, size)
        if self._bar is not None:
            self._bar.update(batches)
        if time.monotonic() - self._shown >= (_PLAIN_REFRESH_S if self._plain else _REFRESH_S):
            self._show()

    def line(self) -> str:
        """Format the values of the latest batch, aligned with `columns`."""
        assert self._latest is not None, "no batch yet"
        losses, instances, size = self._latest
        cells = [self.label, f"{self._accelerator.reserved_memory() / 2**30:.3g}G"]
        cells += [f"{float(loss):.4g}" for loss in losses]
        cells += [str(instances), str(size), f"{self.data_wait:.0%}"]
        return "".join(f"{cell:>{_WIDTH}}" for cell in cells)

    def _show(self) -> None:
        self._shown = time.monotonic()
        if not self._prints or self._latest is None:
            return
        if self._bar is not None:
            self._bar.set_description_str(self.line())
        else:
            rate = f"{self.done}/{self.batches} in {self.seconds:.1f} s, {self.batches_per_s:.3g} batches/s"
            tqdm.write(f"{self.line()}  {rate}", file=self._stream)
