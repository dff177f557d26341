"""The trackers on servers, each written for what its package documents."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tessera.utils.report.trackers.tracker import Tracker, project_name


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
        # Into the newest row: what comes for an earlier step, such as the pictures of the best epoch, would be dropped.
        self._run.log({tag: self._api.Image(str(path), caption=f"epoch {step}")}, commit=False)

    def checkpoint(self, path: Path) -> None:
        artifact = self._api.Artifact(f"run_{self.run_id}_model", type="model")
        artifact.add_file(str(path))
        self._run.log_artifact(artifact, aliases=["latest", path.stem])

    def close(self) -> None:
        self._run.finish()


class MLflow(Tracker):
    """MLflow (mlflow.org/docs), by its client, which has no global current run. MLFLOW_TRACKING_URI applies."""

    module = package = "mlflow"

    def __init__(self, api: Any, run: Path, config: Mapping[str, Any], previous_id: str | None) -> None:
        self._entities = api.entities
        self._client = api.MlflowClient()
        if previous_id is not None:
            self._client.update_run(previous_id, status="RUNNING")
            self.run_id = previous_id
            return
        name = project_name(config)
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


def _mlflow_key(name: str) -> str:
    """`name` in the characters that every MLflow server accepts."""
    return "".join(c if c.isalnum() or c in "_-. /" else "-" for c in name)


class ClearML(Tracker):
    """ClearML (clear.ml/docs). Its configuration file or CLEARML_* variables apply."""

    module = package = "clearml"

    def __init__(self, api: Any, run: Path, config: Mapping[str, Any], previous_id: str | None) -> None:
        self._task = api.Task.init(
            project_name=project_name(config),
            task_name=run.name,
            reuse_last_task_id=False,
            continue_last_task=previous_id or False,
            # Everything is reported here; it must not patch argparse, torch.save and matplotlib.
            auto_connect_arg_parser=False,
            auto_connect_frameworks=False,
        )
        self.run_id = str(self._task.id)
        if previous_id is None:
            self._task.connect(dict(config), name="config")
        else:
            self._task.set_initial_iteration(0)  # our epochs already continue from there
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
    """Comet (comet.com/docs). Its configuration file or COMET_* variables apply."""

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
        self._experiment = api.Experiment(project_name=project_name(config), **automatic)
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
