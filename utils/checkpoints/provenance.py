"""Provenance in files: program version, and for checkpoints the run and its metrics."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from tessera.models.detector import DetectionModel
from tessera.utils.bit_depth import PixelRule
from tessera.utils.checkpoints.format import FORMAT
from tessera.utils.flags.program import git_revision
from tessera.utils.flags.version import __version__
from tessera.utils.types import Metrics


def describe_run(
    model: DetectionModel,
    config: Mapping[str, Any],
    hyp: Mapping[str, Any],
    imgsz: int,
    dataset_hash: str,
    git: str | None = None,
    pixels: PixelRule | None = None,
) -> dict[str, Any]:
    """Return the values of `DESCRIPTION_KEYS` for a checkpoint of a raw model; `date` is now, in UTC.

    `config` and `hyp` hold plain values; `git` comes from `git_revision`.
    """
    return {
        "config": dict(config),
        "hyp": dict(hyp),
        "model_yaml": model.yaml,
        "names": list(model.names),
        "stride": list(model.head.strides),
        "imgsz": imgsz,
        "anchors": model.head.priors,
        "pixels": None if pixels is None else pixels.as_dict(),
        "dataset_hash": dataset_hash,
        "version": FORMAT,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "tessera_version": __version__,
        "git": git,
    }


def describe_metrics(metrics: Metrics | None) -> dict[str, Any]:
    """Return the values of `METRIC_KEYS`: metrics and the confidences with the best F1; None if not validated."""
    if metrics is None:
        return {"metrics": None, "thresholds": None}
    thresholds = {"confidence": metrics.confidence, "class_confidences": metrics.class_confidences.tolist()}
    names = ("precision", "recall", "map50", "map", "fitness", "images", "objects")
    return {
        "metrics": {name: getattr(metrics, name) for name in names},
        "thresholds": thresholds if metrics.objects else None,
    }


def program_version() -> dict[str, str | None]:
    """Return the program's version and git commit, under the names that its files use."""
    return {"tessera_version": __version__, "git": git_revision()}
