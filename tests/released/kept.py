"""Checkpoints of released minor versions in tests/released, and their detections and metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tessera
from tessera.commands import val
from tessera.deploy.inference.detector import Detector
from tests.released.squares import COUNTS, SIZE, draw

FOLDER = Path(__file__).parent
CONFIDENCE = 0.3


def minor_version() -> str:
    """The folder of this version: "0.1" of 0.1.7."""
    return ".".join(tessera.__version__.split(".")[:2])


def kept_files() -> list[Path]:
    return sorted(FOLDER.glob("*/*/*.pt"))


def expected(weights: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(weights.with_name("expected.json").read_text())
    return found


def flags(data: Path, project: Path) -> dict[str, Any]:
    fixed = {"imgsz": SIZE, "batch_size": 8, "workers": 0, "noplots": True, "loggers": "none", "device": "cpu"}
    return {"data": str(data), "project": str(project), **fixed}


def detections(weights: Path, confidence: float = CONFIDENCE) -> list[list[list[float]]]:
    """Return a checkpoint's detections in each validation image, from left to right: box in pixels, score, class."""
    detector = Detector(str(weights), device="cpu", conf_thres=confidence)
    results = [next(iter(detector(draw(number)[0]))) for number in range(COUNTS["val"])]
    return [
        sorted([*box, score, kind] for box, score, kind in zip(*found, strict=True))
        for found in ((r.boxes_xyxy.tolist(), r.scores.tolist(), r.classes.tolist()) for r in results)
    ]


def measured(weights: Path, data: Path, project: Path) -> dict[str, float]:
    metrics = val.run(weights=str(weights), data=str(data), project=str(project), device="cpu", workers=0)
    return {"map50": metrics.map50, "map": metrics.map}
