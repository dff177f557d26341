"""Test-time augmentation: combined predictions of rescaled and mirrored images."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tessera.models.detector import DetectionModel
from tessera.utils.types import FILL

# (scale, whether flipped left to right), as of YOLOv5's --augment
VIEWS = ((1.0, False), (0.83, True), (0.67, False))


@torch.no_grad()
def predict_augmented(model: DetectionModel, images: Tensor) -> Tensor:
    """Predict on the images, on flipped ones at 0.83 and on ones at 0.67 of their size, in pixels of the original.

    `images` are float (B, ch, H, W) in 0 … 1, sides multiples of the model's stride. The result is float32 (B, rows,
    columns) like the model's predictions, view after view, ready for NMS. The first view omits the level of the largest
    stride, the last view that of the smallest: these add little to the other views, and cost NMS a quarter more
    candidates.
    """
    assert not model.training
    predictions = []
    for view, (scale, mirrored) in enumerate(VIEWS):
        image, (ratio_x, ratio_y) = _resize(images.flip(-1) if mirrored else images, scale, model.stride)
        decoded, _ = model(image)
        rows = model.head.rows_per_level(image.shape[-2:])
        if len(rows) > 1 and view == 0:
            decoded = decoded[:, : -rows[-1]]
        elif len(rows) > 1 and view == len(VIEWS) - 1:
            decoded = decoded[:, rows[0] :]
        x, y, w, h, scores = decoded.split((1, 1, 1, 1, decoded.shape[-1] - 4), -1)
        # Python numbers: a tensor would be copied to the device, and synchronise.
        x, y, w, h = x / ratio_x, y / ratio_y, w / ratio_x, h / ratio_y
        if mirrored:
            x = images.shape[-1] - x
        predictions.append(torch.cat((x, y, w, h, scores), -1))
    return torch.cat(predictions, 1)


def _resize(images: Tensor, scale: float, stride: int) -> tuple[Tensor, tuple[float, float]]:
    """Scale images, pad them right and bottom to multiples of the stride; also return the scales of x and y."""
    if scale == 1:
        return images, (1.0, 1.0)
    height, width = images.shape[-2:]
    new_height, new_width = round(height * scale), round(width * scale)
    resized = F.interpolate(images, (new_height, new_width), mode="bilinear", align_corners=False)
    padded = F.pad(resized, (0, -new_width % stride, 0, -new_height % stride), value=FILL / 255)
    return padded, (new_width / width, new_height / height)
