"""Weights & Biases."""

from __future__ import annotations

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
