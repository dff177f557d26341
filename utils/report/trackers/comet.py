"""Comet."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tessera.utils.report.trackers.tracker import Tracker, project_name


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
