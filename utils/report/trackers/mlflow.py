"""MLflow."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tessera.utils.report.trackers.tracker import Tracker, project_name


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
