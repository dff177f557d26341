"""Experiment trackers of a run behind one interface.

No tracker may break or delay a run. Each is imported only if requested, before the run starts, and works in a daemon
thread behind a bounded queue. A tracker that raises, hangs or falls behind is switched off with one warning.
"""

from __future__ import annotations

import importlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tessera.utils.errors import ConfigError
from tessera.utils.files import atomic_write
from tessera.utils.report.trackers.trackers import ClearML, Comet, MLflow, TensorBoard, Tracker, Wandb

log = logging.getLogger(__name__)

CALL_S = 600.0  # a call that takes longer, even the upload of a checkpoint, counts as hung
CLOSE_S = 60.0  # at the end, for all trackers together, to send what they still hold
CLOSE_FAILED_S = 3.0  # the same after an error, which must end all ranks within seconds
MOST_CALLS = 1000  # that a tracker may be behind; each holds a few numbers or a path

# In the order of `LOGGER_NAMES` in utils/config.py, which imports nothing.
TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": MLflow,
    "clearml": ClearML,
    "comet": Comet,
}


def import_tracker(name: str) -> Any:
    """Import a tracker; raise ConfigError if it is missing or cannot be imported."""
    tracker = TRACKERS[name]
    try:
        return importlib.import_module(tracker.module)
    except Exception as error:  # a foreign package may fail in any way while it is imported
        missing = isinstance(error, ModuleNotFoundError) and error.name in {tracker.module, tracker.package}
        what = "is not installed" if missing else f"cannot be imported ({type(error).__name__}: {error})"
        raise ConfigError(
            f"--loggers {name}: the package {tracker.package} {what}. Install it with `pip install {tracker.package}` "
            f"or `uv pip install {tracker.package}`, or choose another tracker or none."
        ) from error


class Channel:
    """One tracker in a daemon thread, behind a bounded queue.

    `open_tracker` is called in the thread, as it may wait for a server; `alive` until the tracker is switched off.
    """

    def __init__(self, name: str, open_tracker: Callable[[], Tracker]) -> None:
        self.name = name
        self.alive = True
        self._open = open_tracker
        self._calls: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(MOST_CALLS)
        self._busy_since: float | None = time.monotonic()  # None while it waits for a call
        self._off = threading.Lock()
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def put(self, call: Callable[[Tracker], None] | None) -> None:
        """Queue a call, unless the tracker is off or hangs; None closes it after all calls."""
        since = self._busy_since
        if self.alive and since is not None and time.monotonic() - since > CALL_S:
            self._switch_off(f"a call has not returned for {CALL_S:g} s")
        if not self.alive:
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._switch_off(f"it is {MOST_CALLS} calls behind")

    def join(self, deadline: float) -> None:
        """Wait for the thread until `deadline` on the monotonic clock."""
        if self.alive:
            self._thread.join(max(deadline - time.monotonic(), 0))
            if self._thread.is_alive():
                self._switch_off("it did not finish in time; what it had not sent yet is lost")
        self.alive = False

    def _work(self) -> None:
        try:
            tracker = self._open()
            while True:
                self._busy_since = None
                call = self._calls.get()
                self._busy_since = time.monotonic()
                if not self.alive:
                    return
                if call is None:
                    tracker.close()
                    return
                call(tracker)
        except BaseException as error:  # a tracker may even call sys.exit(), and must not end more than its thread
            self._switch_off(f"{type(error).__name__}: {error}")

    def _switch_off(self, why: str) -> None:
        """Stop using the tracker, with one warning."""
        with self._off:
            if not self.alive:
                return
            self.alive = False
        log.warning("%s is switched off, the run continues without it: %s", self.name, why)


class Loggers:
    """All trackers of a run. Only the constructor raises, as `import_tracker`.

    Each remote tracker stores its run id in the run directory, in `<tracker>.id`; with `resume` its run continues.
    """

    def __init__(self, names: Sequence[str], run: Path, config: Mapping[str, Any], *, resume: bool = False) -> None:
        # Imported here, so that a missing package raises; opened in the tracker's thread.
        self._channels = [
            Channel(name, partial(_open, name, import_tracker(name), run, dict(config), resume)) for name in names
        ]

    def close(self, *, failed: bool = False) -> None:
        """Let the trackers send their queues for a bounded time, shorter after an error; idempotent."""
        deadline = time.monotonic() + (CLOSE_FAILED_S if failed else CLOSE_S)
        for channel in self._channels:
            channel.put(None)
        for channel in self._channels:
            channel.join(deadline)

    def scalars(self, values: Mapping[str, float], epoch: int) -> None:
        """Log finite numbers by name, such as a row of results.csv."""
        finite = {name: float(value) for name, value in values.items() if math.isfinite(value)}
        self._send(lambda tracker: tracker.scalars(finite, epoch))

    def image(self, tag: str, path: Path, epoch: int) -> None:
        """Log an image file under a name, such as "val_batch0_pred"."""
        self._send(lambda tracker: tracker.image(tag, path, epoch))

    def checkpoint(self, path: Path) -> None:
        """Upload a checkpoint."""
        self._send(lambda tracker: tracker.checkpoint(path))

    def _send(self, call: Callable[[Tracker], None]) -> None:
        for channel in self._channels:
            channel.put(call)


def _open(name: str, api: Any, run: Path, config: dict[str, Any], resume: bool) -> Tracker:
    """Open the tracker's run, and store its id for `--resume`."""
    id_file = run / f"{name}.id"
    previous = id_file.open().read(1000).strip() if resume and id_file.is_file() else None
    tracker = TRACKERS[name](api, run, config, previous)
    if tracker.run_id is not None and tracker.run_id != previous:
        with atomic_write(id_file) as file:
            file.write(tracker.run_id.encode())
    return tracker
