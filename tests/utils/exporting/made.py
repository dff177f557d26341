"""Small checkpoints, the pipeline that exports must equal, and how detections are compared."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from numpy.typing import NDArray

from tessera.data.augment.scene import letterbox
from tessera.data.feed.shapes import loaded_sizes, validation_shapes
from tessera.models.detector import DetectionModel
from tessera.models.suppression import Suppression, non_max_suppression, undo_letterbox
from tessera.utils.checkpoints.format import save_checkpoint
from tessera.utils.checkpoints.provenance import describe_metrics, describe_run
from tessera.utils.machine.opencv import cv2
from tessera.utils.types import Detections, Sample
from tests.system.tiny import make_data

BODY = [[-1, 1, "Conv", [8, 6, 2, 2]], [-1, 1, "Conv", [16, 3, 2]], [-1, 1, "C3", [16]], [-1, 1, "Conv", [32, 3, 2]]]
ANCHORED = {
    "nc": 3,
    "depth_multiple": 1.0,
    "width_multiple": 1.0,
    "anchors": [[8, 9, 20, 14], [30, 40, 60, 50]],
    "backbone": [*BODY, [-1, 1, "Conv", [32, 3, 2]]],
    "head": [[[3, 4], 1, "Detect", ["nc", "anchors"]]],
}
FREE = {
    "nc": 3,
    "depth_multiple": 1.0,
    "width_multiple": 1.0,
    "backbone": [*BODY, [-1, 1, "Conv", [32, 3, 2]]],
    "head": [[[3, 4], 1, "DetectFree", ["nc", 8, 1, True]]],
}
NAMES = ("circle", "square", "star")


def lively(model: DetectionModel, seed: int = 0) -> DetectionModel:
    """Features of unit variance, and scores from near 0 to near 1: those of a fresh model are all alike."""
    generator = torch.Generator().manual_seed(seed)
    norms = [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    with torch.no_grad():
        for norm in norms:
            norm.momentum = 1.0
        model.train()(torch.from_numpy(picture(128, 128, seed))[None].permute(0, 3, 1, 2) / 255)
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
    """The YAML of a few drawn pictures of the checkpoint's classes."""
    data = make_data(folder, train=train, val=val, size=size)
    for labels in folder.rglob("*.txt"):
        labels.write_text(re.sub(r"(?m)^\d+", lambda number: str(int(number[0]) % len(NAMES)), labels.read_text()))
    data.write_text(yaml.safe_dump({**yaml.safe_load(data.read_text()), "names": list(NAMES)}))
    return data


def found_rows(*rows: tuple[float, float, float, float, float, int]) -> Detections:
    """Detections of x1, y1, x2, y2, score, class."""
    table = torch.tensor(rows, dtype=torch.float64).reshape(-1, 6)
    return Detections(table[:, :4].float(), table[:, 4].float(), table[:, 5].long())


def picture(height: int, width: int, seed: int = 0, *, gray: bool = False) -> NDArray[np.uint8]:
    """Smooth blobs under a little noise, uint8 (height, width, 3)."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (rng.integers(2, 9), rng.integers(2, 9), 3), dtype=np.uint8)
    image = cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC).reshape(height, width, 3)
    image = np.clip(image + rng.normal(0, 8, image.shape), 0, 255).astype(np.uint8)
    return np.repeat(image[..., :1], 3, 2) if gray else image


def placed(image: NDArray[np.uint8], imgsz: int, stride: int) -> tuple[NDArray[np.uint8], torch.Tensor]:
    """What a validation makes of a picture, uint8 (H', W', 3), and its placement."""
    size_hw = np.array([image.shape[:2]], np.int32)
    (height, width), (padded_h, padded_w) = (
        loaded_sizes(size_hw, imgsz)[0].tolist(),
        validation_shapes(size_hw, imgsz, stride)[0].tolist(),
    )
    if (height, width) != image.shape[:2]:
        how = cv2.INTER_AREA if max(image.shape[:2]) > imgsz else cv2.INTER_LINEAR
        resized = np.asarray(cv2.resize(image, (width, height), interpolation=how), np.uint8)
    else:
        resized = image
    sample = Sample(resized, np.zeros((0, 4), np.float32), np.zeros(0, np.int32))
    sample, (scale_x, scale_y, left, top) = letterbox(sample, (padded_h, padded_w))
    scales = scale_x * width / image.shape[1], scale_y * height / image.shape[0]
    return sample.image, torch.tensor((*scales, left, top), dtype=torch.float64)


def pipeline(model: DetectionModel, image: NDArray[np.uint8], imgsz: int, rules: Suppression) -> Detections:
    """Detections of a picture by the functions of a validation."""
    letterboxed, placement = placed(image, imgsz, model.stride)
    with torch.no_grad():
        decoded = model(torch.from_numpy(letterboxed)[None].permute(0, 3, 1, 2).float().div_(255))[0]
    (found,) = non_max_suppression(decoded, rules)
    return undo_letterbox(found, placement, (image.shape[0], image.shape[1]))


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
    left = list(range(len(found["scores"])))
    missing = []
    for i in range(len(expected.scores)):
        equal = [
            j
            for j in left
            if found["classes"][j] == expected.classes[i]
            and abs(found["scores"][j] - expected.scores[i].item()) <= score
            and np.abs(found["boxes"][j] - expected.boxes_xyxy[i].numpy()).max() <= px
        ]
        if equal:
            left.remove(equal[0])
        else:
            missing.append(i)
    return missing


def differing(expected: Detections, found: Mapping[str, NDArray[Any]], conf: float, margin: float = 0.01) -> int:
    """How many detections of either side, `margin` above the threshold at least, the other has not."""
    back = Detections(*(torch.from_numpy(np.array(found[name])) for name in ("boxes", "scores", "classes")))
    there = {
        "boxes": expected.boxes_xyxy.numpy(),
        "scores": expected.scores.numpy(),
        "classes": expected.classes.numpy(),
    }
    return len(unmatched(_above(expected, conf + margin), found)) + len(unmatched(_above(back, conf + margin), there))


def _above(detections: Detections, conf: float) -> Detections:
    keep = detections.scores > conf
    return Detections(detections.boxes_xyxy[keep], detections.scores[keep], detections.classes[keep])
