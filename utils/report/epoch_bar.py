"""Progress of one epoch on the console: header, losses, speed, waiting."""

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
    """Header and progress bar of one epoch; a context manager.

    On a terminal the bar moves; elsewhere, as in a log file, there is a plain line at the end of the epoch, and one a
    minute before. Ranks other than 0 print nothing, but measure as rank 0 does.

    Args:
        label: of the epoch, such as "3/99".
        batches: in the whole epoch; `start` of them were done before a resume in its middle.
        loss_names: of the criterion.
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
        self._shown = self._started if self._plain else -math.inf  # a bar shows its first batch at once
        if self._prints:
            tqdm.write("".join(f"{name:>{_WIDTH}}" for name in self.columns), file=self._stream)
            if not self._plain:
                self._bar = tqdm(
                    total=self.batches, initial=self.done, bar_format=_BAR, file=self._stream, dynamic_ncols=True
                )
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._accelerator.synchronize()  # what was queued belongs to the epoch
        self._ended = time.monotonic()
        if kind is None:
            self._show()
        if self._bar is not None:
            self._bar.close()

    @property
    def seconds(self) -> float:
        """Since the epoch began; when it is over, how long it took."""
        return (self._ended or time.monotonic()) - self._started

    @property
    def data_wait(self) -> float:
        """Share, 0 to 1, of the time so far that was spent waiting for batches."""
        return min(self.wait_s / max(self.seconds, 1e-9), 1.0)

    @property
    def batches_per_s(self) -> float:
        """Batches a second so far, over all ranks; of this call of the run, where it was resumed in the epoch."""
        return (self.done - self._start) / max(self.seconds, 1e-9)

    def timed(self, batches: Iterable[T]) -> Iterator[T]:
        """The same batches, with the time that each is waited for added to `wait_s`."""
        iterator = iter(batches)
        while True:
            before = time.monotonic()
            batch = next(iterator, None)
            self.wait_s += time.monotonic() - before
            if batch is None:
                return
            yield batch

    def update(self, batches: int, losses: Tensor | Sequence[float], instances: int, size: int) -> None:
        """Count `batches` more as done, and show the rest when it is time to.

        Args:
            batches: since the last call.
            losses: means of the epoch so far, one for each of `loss_names`; read only when they are shown.
            instances: objects in the batch.
            size: its longer side in pixels.
        """
        self.done += batches
        self._latest = (losses, instances, size)
        if self._bar is not None:
            self._bar.update(batches)
        if time.monotonic() - self._shown >= (_PLAIN_REFRESH_S if self._plain else _REFRESH_S):
            self._show()

    def line(self) -> str:
        """The figures of the latest batch, below `columns`."""
        assert self._latest is not None, "no batch yet"
        losses, instances, size = self._latest
        cells = [self.label, f"{self._accelerator.reserved_memory() / 2**30:.3g}G"]
        cells += [f"{float(loss):.4g}" for loss in losses]
        cells += [str(instances), str(size), f"{self.data_wait:.0%}"]
        return "".join(f"{cell:>{_WIDTH}}" for cell in cells)

    def _show(self) -> None:
        """Print the line, or put it in front of the bar."""
        self._shown = time.monotonic()
        if not self._prints or self._latest is None:
            return
        if self._bar is not None:
            self._bar.set_description_str(self.line())
        else:
            rate = f"{self.done}/{self.batches} in {self.seconds:.1f} s, {self.batches_per_s:.3g} batches/s"
            tqdm.write(f"{self.line()}  {rate}", file=self._stream)
