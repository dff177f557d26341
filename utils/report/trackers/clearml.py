"""ClearML."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tessera.utils.report.trackers.tracker import Tracker, project_name


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
