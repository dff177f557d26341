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
from typing import Any

from tessera.models.detector import GraphNode
from tessera.utils.errors import ConfigError
from tessera.utils.files import atomic_write
from tessera.utils.report.trackers.channel import CLOSE_FAILED_S, CLOSE_S, Channel
from tessera.utils.report.trackers.servers import ClearML, Comet, MLflow, Trackio, Wandb
from tessera.utils.report.trackers.tensorboard import TensorBoard
from tessera.utils.report.trackers.tracker import Tracker

# In the order of `LOGGER_NAMES` in utils/config.py, which imports nothing.
TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": MLflow,
    "trackio": Trackio,
    "clearml": ClearML,
    "comet": Comet,
}


def check_trackers(names: Sequence[str]) -> None:
    """Import each tracker, so that a missing one ends the run before it starts.

    Raises:
        ConfigError: its package is not installed or cannot be imported.
    """
    for name in names:
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

    Without any it does nothing. Only the constructor raises.

    Args:
        names: keys of `TRACKERS`.
        run: run directory; each remote tracker keeps its own run's id there, in `<tracker>.id`.
        config: flags and hyperparameters, shown as the run's parameters.
        resume: continue the trackers' runs whose ids `run` holds.

    Raises:
        ConfigError: as `check_trackers`.
    """

    def __init__(self, names: Sequence[str], run: Path, config: Mapping[str, Any], *, resume: bool = False) -> None:
        # Imported here, so that a missing package raises; opened in the tracker's thread.
        self._channels = [
            Channel(name, partial(_open, name, _import(name), run, dict(config), resume)) for name in names
        ]

    def __enter__(self) -> Loggers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Let the trackers send what they hold, for a bounded time; idempotent."""
        deadline = time.monotonic() + (CLOSE_S if kind is None else CLOSE_FAILED_S)
        for channel in self._channels:
            channel.put(None)
        for channel in self._channels:
            channel.join(deadline)

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
