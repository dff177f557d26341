"""Results as plain values, for `--json`; docs/json.md explains the keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tessera.utils.ranks.run_lock import LOCK
from tessera.utils.types import Metrics


def plain_metrics(metrics: Metrics) -> dict[str, Any]:
    """Of all classes together, and of each that has objects."""
    _, *rows = metrics.rows()
    columns = ("name", "images", "objects", "precision", "recall", "ap50", "ap")
    classes = metrics.class_ids.tolist()
    return {
        "map": metrics.map,
        "map50": metrics.map50,
        "precision": metrics.precision,
        "recall": metrics.recall,
        "fitness": metrics.fitness,
        "confidence": metrics.confidence,
        "images": metrics.images,
        "objects": metrics.objects,
        "speed_ms": dict(zip(("preparation", "inference", "nms"), metrics.speed_ms, strict=True)),
        "classes": [
            {"class": c, **dict(zip(columns, row, strict=True)), "confidence": float(metrics.class_confidences[c])}
            for c, row in zip(classes, rows, strict=True)
        ],
    }


def plain_folder(run: Path | None) -> dict[str, Any]:
    """A run's folder, and what lies in it: files, and folders with a slash; None where there is no folder."""
    entries = sorted(path for path in run.iterdir() if path.name != LOCK) if run is not None else []
    return {"run": run and str(run), "files": [path.name + "/" * path.is_dir() for path in entries]}
