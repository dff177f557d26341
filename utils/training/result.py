"""What a training ends with, and what a restarted call had ended with."""

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
class Ended:
    """How a training ended; of a search, its last training here. Without one all but the flags' is None."""

    metrics: Metrics | None = None  # of the best epoch
    run: Path | None = None  # its folder; of a search, the search's
    data: str | None = None  # what `--data` named
    epochs: int | None = None  # that are done
    best_epoch: int | None = None  # from 0; None where none is better than what the run began with
    stopped_early: bool | None = None  # by `--patience`
    checked: dict[str, Any] | None = None  # what `--check-data` found
    exit_code: int = 0

    def of_search(self) -> Ended:
        """The same, of which only the search's folder stays."""
        return replace(self, run=self.run.parent if self.run else None)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for `--json`."""
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


def remember_end(ended: Ended, world: World) -> None:
    """Let the launcher keep what this call of tessera.train ended with: restarted, it must not train again."""
    plain = {**vars(ended), "metrics": ended.metrics and vars(ended.metrics), "run": ended.run and str(ended.run)}
    world.remember("ended", json.dumps(plain, default=np.ndarray.tolist))


def recall_end(world: World) -> Ended | None:
    """What this call had ended with before the launcher restarted the ranks; None where it had not. Every rank."""
    kept = world.recall("ended")
    if kept is None:
        return None
    log.info("Restarted by the launcher: this training had ended; its result is the one that was measured then.")
    plain = json.loads(kept)
    run = plain["run"] and Path(plain["run"])
    return Ended(**{**plain, "run": run, "metrics": plain["metrics"] and _metrics(plain["metrics"])})


def _metrics(values: dict[str, Any]) -> Metrics:
    values |= {name: np.array(values[name], dtype) for name, dtype in _ARRAYS.items()}
    values |= {name: tuple(values[name]) for name in ("losses", "speed_ms", "names")}
    return Metrics(**{**values, "per_class": values["per_class"].reshape(-1, 4)})
