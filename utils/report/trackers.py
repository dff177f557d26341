"""Experiment trackers: TensorBoard, and wandb, MLflow, ClearML, Comet where `--log` asks for them.

No tracker may break or delay a run. Each is imported only when asked for, before the run starts, and then lives in a
daemon thread of its own behind a bounded queue: `Loggers` never waits for one but, for a bounded time, at the end. A
tracker that raises, hangs or falls behind is switched off with one warning.
"""

from __future__ import annotations

import importlib
import logging
import math
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

import cv2

from utils.errors import ConfigError, did_you_mean
from utils.files import atomic_write

CALL_TIMEOUT_S = 600.0  # a call that takes longer, even the upload of a checkpoint, counts as hung
CLOSE_TIMEOUT_S = 60.0  # for all trackers together, to send what they still hold
FAILED_CLOSE_TIMEOUT_S = 3.0  # the same after an error, which must end all ranks within seconds
QUEUE_LENGTH = 1000  # calls; each holds a few numbers or a path

logger = logging.getLogger(__name__)


class Tracker(ABC):
    """What `Loggers` asks of a tracker. Every method runs in the tracker's own thread and may raise anything.

    Attributes:
        module, package: what is imported and then handed to the constructor, and what brings it.
        run_id: what continues this run after `--resume`; None where the run directory is enough.
    """

    module: ClassVar[str]
    package: ClassVar[str]
    run_id: str | None = None

    @abstractmethod
    def __init__(self, api: Any, run: Path, config: Mapping[str, Any], previous_id: str | None) -> None:
        """Open a run of the tracker, or continue `previous_id`."""

    @abstractmethod
    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Report numbers by name."""

    @abstractmethod
    def image(self, tag: str, path: Path, step: int) -> None:
        """Report a picture file under a name."""

    @abstractmethod
    def checkpoint(self, path: Path) -> None:
        """Keep a checkpoint."""

    @abstractmethod
    def close(self) -> None:
        """Send everything and end the tracker's run."""


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
        pixels = cv2.imread(str(path))
        if pixels is None:
            raise ValueError(f"{path} is not a picture")
        self._writer.add_image(tag, cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB), step, dataformats="HWC")

    def checkpoint(self, path: Path) -> None:
        """Nothing: TensorBoard keeps no files, and the checkpoint lies beside its events."""

    def close(self) -> None:
        self._writer.close()


class Wandb(Tracker):
    """Weights & Biases (docs.wandb.ai). WANDB_MODE, WANDB_ENTITY and their kin are obeyed."""

    module = package = "wandb"

    def __init__(self, api: Any, run: Path, config: Mapping[str, Any], previous_id: str | None) -> None:
        self._api = api
        self._run = api.init(
            project=_project(config),
            name=run.name,
            dir=str(run),
            config=dict(config),
            id=previous_id,
            resume="allow",
            # A login prompt in the middle of the progress bar would be answered by nobody.
            settings=api.Settings(login_timeout=30, init_timeout=90),
        )
        self.run_id = str(self._run.id)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def image(self, tag: str, path: Path, step: int) -> None:
        self._run.log({tag: self._api.Image(str(path))}, step=step)

    def checkpoint(self, path: Path) -> None:
        artifact = self._api.Artifact(f"run_{self.run_id}_model", type="model")
        artifact.add_file(str(path))
        self._run.log_artifact(artifact, aliases=["latest", path.stem])

    def close(self) -> None:
        self._run.finish()


class MLflow(Tracker):
    """MLflow (mlflow.org/docs), by its client, which has no global current run. MLFLOW_TRACKING_URI is obeyed."""

    module = package = "mlflow"

    def __init__(self, api: Any, run: Path, config: Mapping[str, Any], previous_id: str | None) -> None:
        self._entities = api.entities
        self._client = api.MlflowClient()
        if previous_id is not None:
            self._client.update_run(previous_id, status="RUNNING")
            self.run_id = previous_id
            return
        name = _project(config)
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(name)
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


class ClearML(Tracker):
    """ClearML (clear.ml/docs). Its configuration file or CLEARML_* variables are obeyed."""

    module = package = "clearml"

    def __init__(self, api: Any, run: Path, config: Mapping[str, Any], previous_id: str | None) -> None:
        self._task = api.Task.init(
            project_name=_project(config),
            task_name=run.name,
            reuse_last_task_id=False,
            continue_last_task=previous_id or False,
            # What is to be reported is reported here; patching argparse, torch.save and matplotlib is not wanted.
            auto_connect_arg_parser=False,
            auto_connect_frameworks=False,
        )
        self.run_id = str(self._task.id)
        if previous_id is None:
            self._task.connect(dict(config), name="config")
        else:
            self._task.set_initial_iteration(0)  # epochs go on counting by themselves
        self._reports = self._task.get_logger()

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            title, _, series = name.partition("/")
            self._reports.report_scalar(title=title, series=series or title, value=value, iteration=step)

    def image(self, tag: str, path: Path, step: int) -> None:
        self._reports.report_image(title="images", series=tag, iteration=step, local_path=str(path))

    def checkpoint(self, path: Path) -> None:
        self._task.upload_artifact(name=path.stem, artifact_object=str(path), auto_pickle=False)

    def close(self) -> None:
        self._task.close()


class Comet(Tracker):
    """Comet (comet.com/docs). Its configuration file or COMET_* variables are obeyed."""

    module = "comet_ml"
    package = "comet-ml"

    def __init__(self, api: Any, run: Path, config: Mapping[str, Any], previous_id: str | None) -> None:
        automatic = dict.fromkeys(
            ("auto_metric_logging", "auto_param_logging", "auto_output_logging", "auto_histogram_weight_logging"), False
        )
        if previous_id is not None:
            self._experiment = api.ExistingExperiment(previous_experiment=previous_id, **automatic)
            self.run_id = previous_id
            return
        self._experiment = api.Experiment(project_name=_project(config), **automatic)
        self.run_id = str(self._experiment.get_key())
        self._experiment.set_name(run.name)
        self._experiment.log_parameters(dict(config))

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self._experiment.log_metrics(dict(values), step=step, epoch=step)

    def image(self, tag: str, path: Path, step: int) -> None:
        self._experiment.log_image(str(path), name=tag, step=step)

    def checkpoint(self, path: Path) -> None:
        self._experiment.log_model("weights", str(path), overwrite=True)

    def close(self) -> None:
        self._experiment.end()


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
    for name in _asked_for(names):
        _import(name)


def _asked_for(names: Sequence[str]) -> tuple[str, ...]:
    """Names without "none", each once, in their order."""
    known = (*TRACKERS, "none")
    for name in names:
        if name and name not in known:
            raise ConfigError(f"--log: unknown tracker '{name}'.{did_you_mean(name, known)} Known: {', '.join(known)}.")
    return tuple(dict.fromkeys(name for name in names if name in TRACKERS))


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
            f"--log {name}: the package {tracker.package} {what}. Install it with `pip install {tracker.package}` "
            f"or `uv pip install {tracker.package}`, or choose {others} or none."
        ) from error


class Loggers:
    """The trackers of a run behind one interface; a context manager that closes them.

    Off rank 0, and with no tracker asked for, it holds none and does nothing. Only the constructor raises.

    Args:
        names: keys of `TRACKERS`, or "none".
        run: run directory; each remote tracker keeps its own run's id there, in `<tracker>.id`.
        config: flags and hyperparameters, shown as the run's parameters.
        is_main: whether this is rank 0.
        resume: continue the trackers' runs whose ids `run` holds.
        call_timeout_s: a call that lasts longer switches its tracker off.
        close_timeout_s: how long `close` waits, for all trackers together.

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
        call_timeout_s: float = CALL_TIMEOUT_S,
        close_timeout_s: float = CLOSE_TIMEOUT_S,
    ) -> None:
        self._close_timeout_s = close_timeout_s
        self._channels = [
            _Channel(name, _import(name), run, config, resume, call_timeout_s)
            for name in (_asked_for(names) if is_main else ())
        ]

    def __enter__(self) -> Loggers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(None if kind is None else FAILED_CLOSE_TIMEOUT_S)

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

    def checkpoint(self, path: Path) -> None:
        """Upload a checkpoint."""
        self._send(lambda tracker: tracker.checkpoint(path))

    def close(self, timeout_s: float | None = None) -> None:
        """Let the trackers send what they hold, for `timeout_s` or the constructor's time; again is harmless."""
        timeout_s = self._close_timeout_s if timeout_s is None else min(timeout_s, self._close_timeout_s)
        deadline = time.monotonic() + timeout_s
        for channel in self._channels:
            channel.finish()
        for channel in self._channels:
            channel.join(deadline)

    def _send(self, call: Callable[[Tracker], None]) -> None:
        for channel in self._channels:
            channel.put(call)


class _Channel:
    """One tracker in its own daemon thread."""

    def __init__(
        self, name: str, api: Any, run: Path, config: Mapping[str, Any], resume: bool, call_timeout_s: float
    ) -> None:
        self.name = name
        self.alive = True
        self._api, self._run, self._config, self._resume = api, run, dict(config), resume
        self._call_timeout_s = call_timeout_s
        self._calls: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(QUEUE_LENGTH)
        self._busy_since: float | None = time.monotonic()  # None while it waits for a call
        self._off = threading.Lock()
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def put(self, call: Callable[[Tracker], None] | None) -> None:
        """Queue a call (None ends the thread), unless the tracker is off or turns out to hang."""
        since = self._busy_since
        if self.alive and since is not None and time.monotonic() - since > self._call_timeout_s:
            self._switch_off(f"a call has not returned for {self._call_timeout_s:g} s")
        if not self.alive:
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._switch_off(f"it is {QUEUE_LENGTH} calls behind")

    def finish(self) -> None:
        """Ask the thread to close the tracker when all calls are done."""
        self.put(None)

    def join(self, deadline: float) -> None:
        """Wait for the thread until `deadline`, on the monotonic clock."""
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

    def _open(self) -> Tracker:
        """Make the tracker, and leave its id for a later `--resume`."""
        kept = self._run / f"{self.name}.id"
        previous = kept.read_text().strip() if self._resume and kept.is_file() else None
        tracker = TRACKERS[self.name](self._api, self._run, self._config, previous)
        if tracker.run_id is not None and tracker.run_id != previous:
            with atomic_write(kept) as file:
                file.write(tracker.run_id.encode())
        return tracker

    def _switch_off(self, why: str) -> None:
        """Stop using the tracker; one warning, whoever notices first."""
        with self._off:
            if not self.alive:
                return
            self.alive = False
        logger.warning("%s is switched off, the run goes on without it: %s", self.name, why)


def _project(config: Mapping[str, Any]) -> str:
    """Name of the project in a tracker: that of the folder of runs, unless it is the default one."""
    name = Path(str(config.get("project", ""))).name
    return name if name and name != "train" else "tessera"


def _mlflow_key(name: str) -> str:
    """`name` in the characters that every MLflow server accepts."""
    return "".join(c if c.isalnum() or c in "_-. /" else "-" for c in name)
