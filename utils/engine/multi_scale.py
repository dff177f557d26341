"""Random image size of each batch for `--multi-scale`; check that batches are large enough for BatchNorm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.utils.engine.context import RunContext
from tessera.utils.errors import ConfigError
from tessera.utils.seeding import sample_rng


def scaled_size(seed: int, epoch: int, batch: int, imgsz: int, stride: int) -> int:
    """Return the image size of a global batch: uniform in [0.5, 1.5) · imgsz, rounded down to the stride."""
    return _floored(int(sample_rng(seed, epoch, batch, "size").integers(imgsz // 2, imgsz * 3 // 2)), stride)


def smallest_size(imgsz: int, stride: int) -> int:
    """Return the smallest value of `scaled_size`."""
    return _floored(imgsz // 2, stride)


def largest_size(imgsz: int, stride: int) -> int:
    """Return the largest value of `scaled_size`."""
    return _floored(imgsz * 3 // 2 - 1, stride)


def _floored(size: int, stride: int) -> int:
    return max(size // stride, 1) * stride


def min_images(size: int, stride: int) -> int:
    """Return how many images of `size` pixels a normalisation needs: a single value has no variance."""
    return 2 if size <= stride else 1


def check_statistics(context: RunContext) -> None:
    """Raise ConfigError if a batch leaves a normalisation a single value per channel."""
    config, imgsz, stride, ranks = context.config, context.imgsz, context.stride, context.world.size
    size = smallest_size(imgsz, stride) if config.multi_scale else imgsz
    images = context.batch_size if config.sync_bn else context.rank_batch_size
    if images >= min_images(size, stride):
        return
    scaled, enough = (f" --multi-scale, down to {size} px", 4 * stride) if config.multi_scale else ("", 2 * stride)
    each, shared = (" on each rank", ", --sync-bn") if ranks > 1 else ("", "")
    raise ConfigError(
        f"--batch-size {context.batch_size} --imgsz {imgsz}{scaled}: the deepest layers get one value per channel"
        f"{each}, which has no variance to normalise by. Give --batch-size {2 * ranks} or more{shared}, or --imgsz "
        f"{enough} or more."
    )


def resized(context: RunContext, images: Tensor, targets: Tensor, epoch: int, batch: int) -> tuple[Tensor, Tensor]:
    """Return images (B, 3, H, W) and targets (T, 6) at the size of global batch `batch`, with `--multi-scale`."""
    config, stride = context.config, context.stride
    if not config.multi_scale:
        return images, targets
    factor = scaled_size(config.seed, epoch, batch, context.imgsz, stride) / max(images.shape[2:])
    height, width = (max(round(side * factor / stride), 1) * stride for side in images.shape[2:])
    scale_y, scale_x = height / images.shape[2], width / images.shape[3]
    scaled = F.interpolate(images, (height, width), mode="bilinear", align_corners=False)
    return scaled, targets * torch.tensor((1, 1, scale_x, scale_y, scale_x, scale_y))
