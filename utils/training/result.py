"""TrainingResult, printed by --json; kept by the launcher, so that restarted ranks return it without retraining."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tessera.utils.ranks.world import World
from tessera.utils.report.console import plain_folder, plain_metrics
from tessera.utils.types import Metrics

log = logging.getLogger(__name__)

_ARRAYS = {
    **dict.fromkeys(("class_ids", "images_per_class", "objects_per_class"), np.int64),
    **dict.fromkeys(("per_class", "class_confidences"), np.float64),
}


@dataclass(frozen=True)
class TrainingResult:
    """Result of a training; of a search, of its last training here. Values that do not apply are None."""

    metrics: Metrics | None = None  # of the best epoch
    run: Path | None = None  # run directory, or the directory of a search
    data: str | None = None  # `--data`
    epochs: int | None = None  # finished
    best_epoch: int | None = None  # from 0; None if none is better than the initial weights
    stopped_early: bool | None = None  # by `--patience`
    checked: dict[str, Any] | None = None  # result of `--check-data`
    exit_code: int = 0

    def as_search_result(self) -> TrainingResult:
        """Return the result with the directory of the search instead of the run."""
        return replace(self, run=self.run.parent if self.run else None)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for `--json`."""
        saved = sorted((self.run / "weights").glob("*.pt")) if self.run else []
        return {
            "data": self.data,
            "epochs": self.epochs,
            "best_epoch": self.best_epoch,
            "stopped_early": self.stopped_early,
            "metrics": self.metrics and plain_metrics(self.metrics),
            "checkpoints": [str(path) for path in saved],
            "checked": self.checked,
            **plain_folder(self.run),
        }


def remember_result(ended: TrainingResult, world: World) -> None:
    """Store the result of this call with the launcher: a restarted call must not train again."""
    plain = {**vars(ended), "metrics": ended.metrics and vars(ended.metrics), "run": ended.run and str(ended.run)}
    world.remember("ended", json.dumps(plain, default=np.ndarray.tolist))


def recall_result(world: World) -> TrainingResult | None:
    """Return the result that this call had before the launcher restarted the ranks, or None. Every rank calls this."""
    stored = world.recall("ended")
    if stored is None:
        return None
    log.info("Restarted by the launcher: this training had ended; returning its result.")
    plain = json.loads(stored)
    run = plain["run"] and Path(plain["run"])
    return TrainingResult(**{**plain, "run": run, "metrics": plain["metrics"] and _metrics(plain["metrics"])})


def _metrics(values: dict[str, Any]) -> Metrics:
    values |= {name: np.array(values[name], dtype) for name, dtype in _ARRAYS.items()}
    values |= {name: tuple(values[name]) for name in ("losses", "speed_ms", "names")}
    return Metrics(**{**values, "per_class": values["per_class"].reshape(-1, 4)})
