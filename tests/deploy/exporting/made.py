"""Helpers for tests of exports: small checkpoints, the reference pipeline, comparison of detections."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from numpy.typing import NDArray

from tessera.deploy.runtime.pipeline import letterbox_image
from tessera.models.detector import DetectionModel
from tessera.models.nms import NmsSettings, non_max_suppression, undo_letterbox
from tessera.utils.checkpoints.format import describe_metrics, describe_run, save_checkpoint
from tessera.utils.machine.opencv import cv2
from tessera.utils.types import Detections
from tests.system.tiny import make_data

LAYERS: list[tuple[str, list[int]]] = [
    *(("Conv", [8, 6, 2, 2]), ("Conv", [16, 3, 2]), ("C3", [16]), ("Conv", [32, 3, 2]), ("Conv", [32, 3, 2]))
]
BACKBONE = {"nc": 3, "depth_multiple": 1.0, "width_multiple": 1.0, "backbone": [[-1, 1, *layer] for layer in LAYERS]}
HEAD = [[[3, 4], 1, "Detect", ["nc", "anchors"]]]
ANCHORED = {**BACKBONE, "anchors": [[8, 9, 20, 14], [30, 40, 60, 50]], "head": HEAD}
FREE = {**BACKBONE, "head": [[[3, 4], 1, "DetectFree", ["nc", 8, 1, True]]]}
NAMES = ("circle", "square", "star")


def lively(model: DetectionModel, seed: int = 0) -> DetectionModel:
    """Features of unit variance, and scores from near 0 to near 1: those of a fresh model are all alike."""
    generator = torch.Generator().manual_seed(seed)
    norms = [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    with torch.no_grad():
        for norm in norms:
            norm.momentum = 1.0
        model.train()(torch.from_numpy(made_image(128, 128, seed))[None].permute(0, 3, 1, 2) / 255)
        for name, parameter in model.head.named_parameters():
            if parameter.ndim == 4 and parameter.shape[2:] == (1, 1) and ".conv." not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return model


def checkpoint(path: Path, described: Mapping[str, Any], data: str = "shapes.yaml") -> Path:
    """A checkpoint like best.pt, of a model that was not trained."""
    torch.manual_seed(0)
    model = lively(DetectionModel(described, names=NAMES))
    thresholds = {"confidence": 0.375, "class_confidences": [0.25, 0.375, 0.5]}
    metrics = {**describe_metrics(None), "metrics": {"map": 0.5, "map50": 0.75}, "thresholds": thresholds}
    run = describe_run(model, {"data": data}, {}, 96, "c0ffee")
    save_checkpoint(path, {**run, **metrics, "ema": model.state_dict(), "epoch": 3})
    return path


def dataset(folder: Path, *, train: int = 2, val: int = 6, size: int = 120) -> Path:
    """The YAML of a few drawn images of the checkpoint's classes."""
    data = make_data(folder, train=train, val=val, size=size)
    for labels in folder.rglob("*.txt"):
        labels.write_text(re.sub(r"(?m)^\d+", lambda number: str(int(number[0]) % len(NAMES)), labels.read_text()))
    data.write_text(yaml.safe_dump({**yaml.safe_load(data.read_text()), "names": list(NAMES)}))
    return data


def found_rows(*rows: tuple[float, float, float, float, float, int]) -> Detections:
    table = torch.tensor(rows, dtype=torch.float64).reshape(-1, 6)
    return Detections(table[:, :4].float(), table[:, 4].float(), table[:, 5].long())


def made_image(height: int, width: int, seed: int = 0, *, gray: bool = False) -> NDArray[np.uint8]:
    """Smooth blobs under a little noise, uint8 (height, width, 3)."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (rng.integers(2, 9), rng.integers(2, 9), 3), dtype=np.uint8)
    image = cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC).reshape(height, width, 3)
    image = np.clip(image + rng.normal(0, 8, image.shape), 0, 255).astype(np.uint8)
    return np.repeat(image[..., :1], 3, 2) if gray else image


def pipeline(model: DetectionModel, image: NDArray[np.uint8], imgsz: int, rules: NmsSettings) -> Detections:
    canvas, placement = letterbox_image(image, imgsz, model.stride)
    with torch.no_grad():
        decoded = model(torch.from_numpy(canvas)[None].permute(0, 3, 1, 2).float().div_(255))[0]
    (found,) = non_max_suppression(decoded, rules)
    return undo_letterbox(found, torch.tensor(placement, dtype=torch.float64), (image.shape[0], image.shape[1]))


def thresholds(conf: float, iou: float = 0.45, max_det: int = 300) -> dict[str, NDArray[Any]]:
    """As inputs of a whole file."""
    return {
        "conf": np.array([conf], np.float32),
        "iou": np.array([iou], np.float32),
        "max_det": np.array([max_det], np.int64),
    }


def unmatched(
    expected: Detections, found: Mapping[str, NDArray[Any]], *, px: float = 0.05, score: float = 1e-3
) -> list[int]:
    """Detections of `expected` without their equal in `found`, which each is of one."""
    boxes, scores, classes = (part.numpy() for part in (expected.boxes_xyxy, expected.scores, expected.classes))
    equal = (
        (classes[:, None] == found["classes"])
        & (np.abs(scores[:, None] - found["scores"]) <= score)
        & (np.abs(boxes[:, None] - found["boxes"]).max(2, initial=0) <= px)
    )
    missing = []
    for row, partners in enumerate(equal):
        if partners.any():
            equal[:, partners.argmax()] = False
        else:
            missing.append(row)
    return missing


def differing(
    expected: Detections, found: Mapping[str, NDArray[Any]], conf: float, margin: float = 0.01, **within: float
) -> int:
    """How many detections of either side, `margin` above the threshold at least, the other has not."""
    back = Detections(*(torch.from_numpy(np.array(found[name])) for name in ("boxes", "scores", "classes")))
    parts = (expected.boxes_xyxy, expected.scores, expected.classes)
    there = {name: part.numpy() for name, part in zip(("boxes", "scores", "classes"), parts, strict=True)}
    pairs = (expected, found), (back, there)
    return sum(len(unmatched(_above(one, conf + margin), other, **within)) for one, other in pairs)


def _above(detections: Detections, conf: float) -> Detections:
    keep = detections.scores > conf
    return Detections(detections.boxes_xyxy[keep], detections.scores[keep], detections.classes[keep])
