"""The trackers of a run behind one interface.

No tracker may break or delay a run. Each is imported only when asked for, before the run starts, and then lives in a
daemon thread of its own behind a bounded queue: `Loggers` never waits for one but, for a bounded time, at the end. A
tracker that raises, hangs or falls behind is switched off with one warning.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from tessera.models.detector import GraphNode
from tessera.utils.config import tracker_names
from tessera.utils.errors import ConfigError
from tessera.utils.files import atomic_write
from tessera.utils.report.trackers.channel import Channel, Limits
from tessera.utils.report.trackers.clearml import ClearML
from tessera.utils.report.trackers.comet import Comet
from tessera.utils.report.trackers.mlflow import MLflow
from tessera.utils.report.trackers.tensorboard import TensorBoard
from tessera.utils.report.trackers.tracker import Tracker
from tessera.utils.report.trackers.wandb import Wandb

TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": MLflow,
    "clearml": ClearML,
    "comet": Comet,
}


def check_trackers(names: Sequence[str]) -> None:
    """Import each tracker, so that a missing one ends the run before it starts. "none" and "" stand for no tracker.

    Raises:
        ConfigError: a name is unknown, or its package is not installed or cannot be imported.
    """
    for name in tracker_names(names):
        _import(name)


def _import(name: str) -> Any:
    """The tracker's module."""
    tracker = TRACKERS[name]
    try:
        return importlib.import_module(tracker.module)
    except Exception as error:  # a foreign package may fail in any way while it is imported
        missing = isinstance(error, ModuleNotFoundError) and error.name in {tracker.module, tracker.package}
        what = "is not installed" if missing else f"cannot be imported ({type(error).__name__}: {error})"
        others = "another tracker" if name == "tensorboard" else "tensorboard"
        raise ConfigError(
            f"--loggers {name}: the package {tracker.package} {what}. Install it with `pip install {tracker.package}` "
            f"or `uv pip install {tracker.package}`, or choose {others} or none."
        ) from error


class Loggers:
    """All trackers of a run; a context manager that closes them.

    On other ranks than 0, and where no tracker is asked for, it does nothing. Only the constructor raises.

    Args:
        names: keys of `TRACKERS`, or "none".
        run: run directory; each remote tracker keeps its own run's id there, in `<tracker>.id`.
        config: flags and hyperparameters, shown as the run's parameters.
        is_main: whether this is rank 0.
        resume: continue the trackers' runs whose ids `run` holds.
        limits: how long a call may last and `close` may wait.

    Raises:
        ConfigError: as `check_trackers`.
    """

    def __init__(
        self,
        names: Sequence[str],
        run: Path,
        config: Mapping[str, Any],
        *,
        is_main: bool,
        resume: bool = False,
        limits: Limits | None = None,
    ) -> None:
        self._limits = limits = limits or Limits()
        # Imported here, so that a missing package raises; opened in the tracker's thread.
        self._channels = [
            Channel(name, partial(_open, name, _import(name), run, dict(config), resume), limits)
            for name in (tracker_names(names) if is_main else ())
        ]

    def __enter__(self) -> Loggers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(None if kind is None else self._limits.close_failed_s)

    @property
    def active(self) -> tuple[str, ...]:
        """Names of the trackers that have not been switched off."""
        return tuple(channel.name for channel in self._channels if channel.alive)

    def scalars(self, values: Mapping[str, float], epoch: int) -> None:
        """Report numbers by name, such as a row of results.csv; those that are not finite are left out."""
        finite = {name: float(value) for name, value in values.items() if math.isfinite(value)}
        self._send(lambda tracker: tracker.scalars(finite, epoch))

    def image(self, tag: str, path: Path, epoch: int) -> None:
        """Report a picture file under a name, such as "val_batch0_pred"."""
        self._send(lambda tracker: tracker.image(tag, path, epoch))

    def graph(self, nodes: Sequence[GraphNode]) -> None:
        """Report the layers of the model."""
        self._send(lambda tracker: tracker.graph(nodes))

    def checkpoint(self, path: Path) -> None:
        """Upload a checkpoint."""
        self._send(lambda tracker: tracker.checkpoint(path))

    def close(self, timeout_s: float | None = None) -> None:
        """Let the trackers send what they hold, for at most `timeout_s` or the constructor's time; idempotent."""
        deadline = time.monotonic() + min(self._limits.close_s, math.inf if timeout_s is None else timeout_s)
        for channel in self._channels:
            channel.finish()
        for channel in self._channels:
            channel.join(deadline)

    def _send(self, call: Callable[[Tracker], None]) -> None:
        for channel in self._channels:
            channel.put(call)


def _open(name: str, api: Any, run: Path, config: dict[str, Any], resume: bool) -> Tracker:
    """Open the tracker's run, and keep its id for a later `--resume`."""
    kept = run / f"{name}.id"
    previous = kept.read_text().strip() if resume and kept.is_file() else None
    tracker = TRACKERS[name](api, run, config, previous)
    if tracker.run_id is not None and tracker.run_id != previous:
        with atomic_write(kept) as file:
            file.write(tracker.run_id.encode())
    return tracker
