"""What a file says of where it comes from: the program that wrote it; of a checkpoint also its run and its metrics."""

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
    """Return the values of `DESCRIPTION_KEYS`, which describe the run of a checkpoint; `date` is now, in UTC.

    Args:
        model: the raw model.
        config, hyp: plain values.
        imgsz: training size in pixels.
        dataset_hash: digest of the training index.
        git: from `git_revision`.
        pixels: the dataset's rule for levels of more than 8 bits.
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
    """Return the values of `MEASURED_KEYS`, metrics and the confidences where F1 is best; None if not validated."""
    if metrics is None:
        return {"metrics": None, "thresholds": None}
    figures = ("precision", "recall", "map50", "map", "fitness", "images", "objects")
    return {
        "metrics": {name: getattr(metrics, name) for name in figures},
        "thresholds": {"confidence": metrics.confidence, "class_confidences": metrics.class_confidences.tolist()},
    }


def written_by() -> dict[str, str | None]:
    """The program, under the names that its files have for it: its version, and the commit of a clone."""
    return {"tessera_version": __version__, "git": git_revision()}
