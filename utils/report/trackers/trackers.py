"""Tracker interface, and the trackers: TensorBoard, the default, and Weights & Biases, MLflow, ClearML, Comet."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from tessera.utils.machine.opencv import cv2

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


class ClearML(Tracker):
    """ClearML (clear.ml/docs). Its configuration file or CLEARML_* variables apply."""

    module = package = "clearml"

    def __init__(self, api: Any, run: Path, config: Mapping[str, Any], previous_id: str | None) -> None:
        # On Linux it would fork a reporting process while its own thread runs git: that thread can hang for ever.
        api.Task._report_subprocess_enabled = False
        self._task = api.Task.init(
            project_name=project_name(config),
            task_name=run.name,
            reuse_last_task_id=previous_id or False,
            continue_last_task=False if previous_id is None else 0,  # 0: our epochs already continue, no offset
            # Everything is reported here; it must not patch argparse, torch.save and matplotlib.
            auto_connect_arg_parser=False,
            auto_connect_frameworks=False,
        )
        self.run_id = str(self._task.id)
        if previous_id is None:
            self._task.connect(dict(config), name="config")
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
    """Comet (comet.com/docs). Its configuration file or COMET_* variables apply, COMET_START_ONLINE=0 among them."""

    module = "comet_ml"
    package = "comet-ml"

    def __init__(self, api: Any, run: Path, config: Mapping[str, Any], previous_id: str | None) -> None:
        kinds = ("metric_logging", "param_logging", "output_logging", "histogram_weight_logging")
        automatic = {f"auto_{kind}": False for kind in kinds}
        self._experiment = api.start(
            project_name=project_name(config),
            experiment_key=previous_id,
            mode="create" if previous_id is None else "get",
            experiment_config=api.ExperimentConfig(name=run.name, **automatic),
        )
        self.run_id = str(self._experiment.get_key())
        if previous_id is None:
            self._experiment.log_parameters(dict(config))

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self._experiment.log_metrics(dict(values), step=step, epoch=step)

    def image(self, tag: str, path: Path, step: int) -> None:
        self._experiment.log_image(str(path), name=tag, step=step)

    def checkpoint(self, path: Path) -> None:
        self._experiment.log_model("weights", str(path), overwrite=True)

    def close(self) -> None:
        self._experiment.end()
