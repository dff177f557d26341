"""`--profile`: time per stage of an epoch as a table, and a torch.profiler trace of a few steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
import torch

from tessera.utils.engine.profile import NoProfile
from tessera.utils.files import atomic_write
from tessera.utils.machine.accelerator import Accelerator

log = logging.getLogger(__name__)

T = TypeVar("T")
STAGES = ("data wait", "copy", "forward", "loss", "backward", "optimizer", "EMA", "validation", "plots", "saving")
SKIPPED_STEPS, TRACED_STEPS = 3, 5  # the first steps are slower


class Profile(NoProfile):
    """Profile of one rank. On CUDA every stage waits for the device, which costs some overlap.

    Writes profile.csv, a row of seconds per epoch, and profile.json, a trace of the fifth to ninth step for
    chrome://tracing or Perfetto.

    Attributes:
        tracer: torch's profiler, a context manager around the training.
    """

    def __init__(self, run: Path, accelerator: Accelerator) -> None:
        self._run, self._accelerator = run, accelerator
        self._seconds = dict.fromkeys(STAGES, 0.0)
        table = run / "profile.csv"
        self._rows: list[dict[Any, Any]] = pd.read_csv(table).to_dict("records") if table.is_file() else []
        self.tracer = torch.profiler.profile(
            activities=accelerator.profiler_activities(),
            schedule=torch.profiler.schedule(skip_first=SKIPPED_STEPS, wait=0, warmup=1, active=TRACED_STEPS, repeat=1),
            on_trace_ready=self._write_trace,
        )

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        started = self._now()
        with torch.profiler.record_function(name):
            yield
        self._seconds[name] += self._now() - started

    def waited(self, items: Iterable[T]) -> Iterable[T]:
        iterator = iter(items)
        ended = object()
        while True:
            with self.stage("data wait"):
                item: Any = next(iterator, ended)
            if item is ended:
                return
            yield item

    def step(self) -> None:
        self.tracer.step()

    def epoch(self, epoch: int, seconds: float) -> None:
        """Log the table of `epoch` and add its row to profile.csv."""
        spent = {**self._seconds, "other": max(seconds - sum(self._seconds.values()), 0.0)}
        self._seconds = dict.fromkeys(STAGES, 0.0)
        self._rows = [row for row in self._rows if row["epoch"] < epoch]
        self._rows.append({"epoch": epoch, "seconds": seconds, **spent})
        with atomic_write(self._run / "profile.csv") as file:
            file.write(pd.DataFrame(self._rows).to_csv(index=False, float_format="%.4f").encode())
        lines = [f"  {name:<12}{value:10.2f} s {value / max(seconds, 1e-9):8.1%}" for name, value in spent.items()]
        log.info("\n".join([f"Epoch {epoch} took {seconds:.2f} s:", *lines]))

    def _now(self) -> float:
        self._accelerator.synchronize()
        return time.perf_counter()

    def _write_trace(self, tracer: torch.profiler.profile) -> None:
        path = self._run / "profile.json"
        tracer.export_chrome_trace(str(path))
        log.info(f"Trace of up to {TRACED_STEPS} steps: {path}")
