"""Experiment trackers of a run: TensorBoard, the default, and Weights & Biases and MLflow.

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
from typing import Any, ClassVar

from tessera.utils.engine.state import Training
from tessera.utils.errors import ConfigError
from tessera.utils.files import atomic_write
from tessera.utils.machine.opencv import cv2
from tessera.utils.report.observers import EpochResult, Observer, RunResult
from tessera.utils.report.results_csv import results_row

log = logging.getLogger(__name__)

CALL_S = 600.0  # a call that takes longer, even the upload of a checkpoint, counts as hung
CLOSE_S = 60.0  # at the end, for all trackers together, to send what they still hold
CLOSE_FAILED_S = 3.0  # the same after an error, which must end all ranks within seconds
MOST_CALLS = 1000  # that a tracker may be behind; each holds a few numbers or a path
# Viewers read an event file of TensorBoard whole, with some 25 images: these are small copies of the files beside it.
_SIDE, _QUALITY = 800, 50  # pixels of the longer side


class Tracker:
    """Interface of a tracker. Every method runs in the tracker's own thread and may raise anything.

    Attributes:
        module, package: name to import, and name to install.
        run_id: identifies the run for `--resume`; None if the run directory is enough.
    """

    module: ClassVar[str]
    package: ClassVar[str]
    run_id: str | None = None

    def __init__(self, api: Any, run: Path, config: Mapping[str, Any], previous_id: str | None) -> None:
        """Open a run of the tracker, or continue `previous_id`."""

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Log numbers by name."""

    def image(self, tag: str, path: Path, step: int) -> None:
        """Log an image file."""

    def checkpoint(self, path: Path) -> None:
        """Upload a checkpoint, if the tracker stores files."""

    def close(self) -> None:
        """Send everything and end the tracker's run."""


def project_name(config: Mapping[str, Any]) -> str:
    """Return the project's name: that of the folder of runs, unless that is the default."""
    name = Path(str(config.get("project", ""))).name
    return name if name and name != "train" else "tessera"


class TensorBoard(Tracker):
    """Event files in the run directory."""

    module = "torch.utils.tensorboard"
    package = "tensorboard"

    def __init__(self, api: Any, run: Path, config: Mapping[str, Any], previous_id: str | None) -> None:
        self._writer = api.SummaryWriter(log_dir=str(run))
        rows = "\n".join(f"| {key} | {value} |" for key, value in config.items())
        self._writer.add_text("config", f"| key | value |\n|---|---|\n{rows}", 0)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def image(self, tag: str, path: Path, step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        pixels = cv2.imread(str(path))
        if pixels is None:
            raise ValueError(f"{path} is not an image")
        scale = min(_SIDE / max(pixels.shape), 1)
        shown = cv2.resize(pixels, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA)
        encoded = cv2.imencode(".jpg", shown, [cv2.IMWRITE_JPEG_QUALITY, _QUALITY])[1].tobytes()
        image = Summary.Image(height=shown.shape[0], width=shown.shape[1], colorspace=3, encoded_image_string=encoded)
        self._writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=tag, image=image)]), step)

    def close(self) -> None:
        self._writer.close()


class Wandb(Tracker):
    """Weights & Biases (docs.wandb.ai). WANDB_MODE, WANDB_ENTITY and the like apply."""

    module = package = "wandb"

    def __init__(self, api: Any, run: Path, config: Mapping[str, Any], previous_id: str | None) -> None:
        self._api = api
        self._run = api.init(
            project=project_name(config),
            name=run.name,
            dir=str(run),
            config=dict(config),
            id=previous_id,
            resume="allow",
            # Nobody would answer a login prompt in the middle of the progress bar.
            settings=api.Settings(login_timeout=30, init_timeout=90),
        )
        self.run_id = str(self._run.id)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def image(self, tag: str, path: Path, step: int) -> None:
        # In the newest row: images of an earlier step, such as those of the best epoch, would be dropped.
        self._run.log({tag: self._api.Image(str(path), caption=f"epoch {step}")}, commit=False)

    def checkpoint(self, path: Path) -> None:
        artifact = self._api.Artifact(f"run_{self.run_id}_model", type="model")
        artifact.add_file(str(path))
        self._run.log_artifact(artifact, aliases=["latest", path.stem])

    def close(self) -> None:
        self._run.finish()


class MLflow(Tracker):
    """MLflow (mlflow.org/docs), by its client, which has no global current run. MLFLOW_TRACKING_URI applies.

    Without it the runs of a project are in mlflow.db beside their run directories. MLflow's own default is the working
    directory; from 3.13 on it refuses plain files.
    """

    module = package = "mlflow"

    def __init__(self, api: Any, run: Path, config: Mapping[str, Any], previous_id: str | None) -> None:
        self._entities = api.entities
        local = None if api.is_tracking_uri_set() else run.parent
        self._client = api.MlflowClient(local and f"sqlite:///{local / 'mlflow.db'}")
        if previous_id is not None:
            self._client.update_run(previous_id, status="RUNNING")
            self.run_id = previous_id
            return
        name = project_name(config)
        experiment = self._client.get_experiment_by_name(name)
        files = local and (local / "mlartifacts").as_uri()
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(name, files)
        self.run_id = str(self._client.create_run(experiment_id, run_name=run.name).info.run_id)
        params = [self._entities.Param(_mlflow_key(key), str(value)[:500]) for key, value in config.items()]
        for start in range(0, len(params), 100):  # the server's limit for a batch
            self._client.log_batch(self.run_id, params=params[start : start + 100])

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        metrics = [self._entities.Metric(_mlflow_key(key), value, now, step) for key, value in values.items()]
        self._client.log_batch(self.run_id, metrics=metrics)

    def image(self, tag: str, path: Path, step: int) -> None:
        self._client.log_artifact(self.run_id, str(path), artifact_path="images")

    def checkpoint(self, path: Path) -> None:
        self._client.log_artifact(self.run_id, str(path), artifact_path="weights")

    def close(self) -> None:
        self._client.set_terminated(self.run_id)


def _mlflow_key(name: str) -> str:
    """Replace characters that some MLflow servers refuse."""
    return "".join(c if c.isalnum() or c in "_-. /" else "-" for c in name)


# In the order of `LOGGER_NAMES` in utils/config.py, which imports nothing.
TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": MLflow}


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


class Trackers(Observer):
    """The trackers of `--loggers`; a resumed run continues their runs."""

    def require(self, names: Sequence[str]) -> None:
        """Raise ConfigError if a tracker cannot be imported."""
        for name in names:
            import_tracker(name)

    def begin(self, training: Training) -> None:
        context = training.context
        self._training, self._folder = training, context.folder
        if not context.resumed:
            for events in self._folder.glob("events.out.tfevents.*"):  # of the run that this one replaces
                events.unlink()
        flags = {**context.config.as_dict(), "optimizer": context.optimizer}
        flags |= {f"hyp_{key}" if key in flags else key: value for key, value in context.hyp.as_dict().items()}
        self._loggers = Loggers(context.config.logger_names, self._folder, flags, resume=context.resumed)
        self._plots = not context.config.noplots
        self._start_is_new = self._plots and not context.resumed
        if self._start_is_new:
            self._send("labels.jpg")

    def epoch(self, epoch: EpochResult) -> None:
        self._loggers.scalars(results_row(epoch, self._training.criterion.names), epoch.number)
        if self._start_is_new:
            self._send("train_batch*.jpg")
            self._start_is_new = False
        predictions = self._folder / f"predictions_epoch{epoch.number}.jpg"
        if self._plots and predictions.is_file():
            self._loggers.image("predictions", predictions, epoch.number)

    def end(self, result: RunResult) -> None:
        if self._plots:
            self._send("*.png", result.epoch)
            self._send("val_batch*.jpg", result.epoch)
        if result.best.is_file():
            self._loggers.checkpoint(result.best)

    def close(self, *, failed: bool) -> None:
        self._loggers.close(failed=failed)

    def _send(self, pattern: str, epoch: int = 0) -> None:
        for path in sorted(self._folder.glob(pattern)):
            self._loggers.image(path.stem, path, epoch)


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
