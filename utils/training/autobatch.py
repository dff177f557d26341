"""AutoBatch: largest batch size that fits into memory, from measured steps and validations."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tessera.data.feed.image_sizes import rect_val_shapes
from tessera.models.detector import DetectionModel
from tessera.models.heads.criterion import Criterion
from tessera.utils.config import Hyp, TrainConfig
from tessera.utils.engine.context import RunContext
from tessera.utils.engine.optimizer import build_optimizer
from tessera.utils.engine.precision import Precision
from tessera.utils.engine.state import EarlyStopping, ModelEMA, Progress, Teach, TrainState, no_teacher
from tessera.utils.engine.step import TrainStep, min_images
from tessera.utils.errors import UserError
from tessera.utils.evaluation.evaluate import Settings, ShardEvaluation
from tessera.utils.evaluation.network import fused_copy, network_of
from tessera.utils.image_size import ImageSize, image_size, size_hw_of
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.ranks.world import World
from tessera.utils.types import Batch, DatasetIndex

log = logging.getLogger(__name__)

TRIAL_SIZES = (1, 2, 4, 8, 16)
MAX_EXTRAPOLATION = 8  # times the largest measured batch
DEFAULT_BATCH = 16
TARGET_FRACTION = 0.8  # of the memory that is free before the first step
MAX_FRACTION = 0.9  # for the measurement of the chosen batch, since the linear fit is not exact

# Peak bytes of a number of images per rank: in training, and in the validation beside it.
Measure = Callable[[int], Sequence[int]]


def auto_batch_size(measure: Measure, most: int, world: World) -> int:
    """Return the global batch size for `--batch-size -1`, the same on every rank.

    Memory is measured for 1 to 16 images and extrapolated linearly, up to 8 times the largest measured batch. Each rank
    fills 80 % of its free memory, and the smallest result counts; `most`, the images of the dataset, bounds it. The
    chosen batch is measured, and reduced until it fits. Without memory statistics the result is 16 images. If one image
    does not fit, UserError is raised.
    """
    accelerator = world.accelerator
    if not accelerator.measures_memory:
        batch = max(DEFAULT_BATCH // world.size, 1) * world.size
        log.info(f"AutoBatch: {accelerator.kind} has no memory statistics; using batch size {batch}.")
        return batch
    accelerator.reset_peak_memory()
    free = accelerator.free_memory()
    most_of_rank = -(-most // world.size)
    largest = min(world.all_gather(_fitting(measure, most_of_rank, free, accelerator)))
    while largest >= 1:
        taken = max(_within_memory(measure, largest, accelerator))
        if all(world.all_gather(taken <= MAX_FRACTION * free)):
            break
        largest = largest * 9 // 10
    if largest < 1:
        raise UserError(
            "AutoBatch: one image does not fit into the memory of a GPU. Use a smaller --imgsz or a smaller model, "
            "or free memory that other processes hold."
        )
    log.info(
        f"AutoBatch: batch size {largest * world.size} ({largest} per rank), {TARGET_FRACTION:.0%} of free memory."
    )
    return largest * world.size


def fit_batch(sizes: Sequence[int], peaks: Sequence[float], limit: float) -> int:
    """Return the largest batch within `limit` bytes by a linear fit of measurements (sizes, peaks in bytes).

    With one measurement, or without growth, this is the largest measured size that fits; 0 if none fits.
    """
    fitting = [size for size, peak in zip(sizes, peaks, strict=True) if peak <= limit]
    if len(fitting) < 2:
        return max(fitting, default=0)
    # Least squares in integers: equal measurements give a slope of exactly 0.
    count, sum_sizes, sum_peaks = len(sizes), sum(sizes), sum(peaks)
    rise = count * sum(size * peak for size, peak in zip(sizes, peaks, strict=True)) - sum_sizes * sum_peaks
    if rise <= 0:
        return max(fitting)
    slope = rise / (count * sum(size * size for size in sizes) - sum_sizes**2)
    offset = (sum_peaks - slope * sum_sizes) / count
    return max(int((limit - offset) // slope), 0)


def _fitting(measure: Measure, most: int, free: int, accelerator: Accelerator) -> int:
    """Return the images that fit into the target fraction of `free` bytes on this rank, at most `most`."""
    sizes: list[int] = []
    peaks: list[Sequence[float]] = []
    pending: Sequence[int] = TRIAL_SIZES
    while True:
        for size in pending:
            measured = _within_memory(measure, size, accelerator)
            if math.inf in measured:
                most = min(most, size - 1)
                break
            sizes.append(size)
            peaks.append(measured)
        limit = TARGET_FRACTION * free
        fitting = min((fit_batch(sizes, column, limit) for column in zip(*peaks, strict=True)), default=0)
        fitting = min(fitting, most)
        if fitting <= MAX_EXTRAPOLATION * max(sizes, default=1):
            return fitting
        pending = [MAX_EXTRAPOLATION * sizes[-1]]


def _within_memory(measure: Measure, images: int, accelerator: Accelerator) -> Sequence[float]:
    """Return the peaks of a batch of `images`; infinite if memory is exhausted."""
    try:
        return measure(images)
    except Exception as error:
        if not accelerator.is_out_of_memory(error):
            raise
        return (math.inf,)


@dataclass(frozen=True)
class Trial:
    """Measurement of this rank's memory in real steps and a real validation on synthetic images.

    It includes optimizer state, EMA, gradient buckets, the prefetched batch, and a validation with twice the
    batch. The raw model, on the device, is left unchanged.
    """

    config: TrainConfig
    hyp: Hyp
    world: World
    imgsz: ImageSize
    largest: ImageSize  # of the images of the training
    model: DetectionModel
    criterion: Criterion[Any]
    precision: Precision
    teach: Teach = no_teacher

    def __call__(self, images: int) -> tuple[int, int]:
        """Return the peak bytes of training on `images`, and of the validation of twice as many."""
        model, accelerator = self.model, self.world.accelerator
        before = {name: tensor.to("cpu", copy=True) for name, tensor in model.state_dict().items()}
        training = model.training
        accelerator.reset_peak_memory()
        held = accelerator.allocated_memory()
        try:
            return self._peaks(max(images, min_images(max(size_hw_of(self.largest)), model.stride)), held)
        finally:
            model.zero_grad(set_to_none=True)
            model.load_state_dict(before)
            model.train(training)
            accelerator.reset_peak_memory()

    def _peaks(self, images: int, held: int) -> tuple[int, int]:
        model, accelerator, ranks = self.model, self.world.accelerator, self.world.size
        config = dataclasses.replace(self.config, batch_size=images, multi_scale=False)
        own_world = World(accelerator=accelerator)  # only some ranks may run out of memory
        context = RunContext(config, self.hyp, own_world, self.imgsz, model.stride, Path())
        buckets = [torch.empty_like(p) for p in model.parameters() if p.requires_grad and ranks > 1]
        optimizer = build_optimizer(
            model, context.optimizer, self.hyp, images * ranks, fused=accelerator.fused_optimizers
        )
        precision = Precision(accelerator, self.precision.dtype)
        progress = Progress(torch.zeros(len(self.criterion.names), device=accelerator.device))
        state = TrainState(model, ModelEMA(model), optimizer, precision, EarlyStopping(0), progress)
        step = TrainStep(model, state, self.criterion, context, teach=self.teach)
        model.train()
        taught = 0 if self.teach is no_teacher else model.nc
        batches = accelerator.prefetch(synthetic_batch(images, self.largest, taught) for _ in range(3))
        step([next(batches)], 1)
        accelerator.reset_peak_memory()  # the first step also tried cuDNN kernels that need more memory
        step([next(batches)], 1)
        step.flush()
        accelerator.synchronize()
        in_training = accelerator.peak_memory() - held
        del batches
        accelerator.reset_peak_memory()
        self._validate(state, 2 * images, own_world)
        del buckets
        return in_training, accelerator.peak_memory() - held

    def _validate(self, state: TrainState[DetectionModel], images: int, world: World) -> None:
        """Validate two batches: the second is computed while the first is matched."""
        imgsz, accelerator = self.imgsz, world.accelerator
        padded = image_size(rect_val_shapes(np.array([size_hw_of(imgsz)]), imgsz, self.model.stride)[0].tolist())
        network = network_of(fused_copy(state.ema.model, accelerator), imgsz, accelerator)
        index = synthetic_index(images, imgsz, self.model.names)
        evaluation = ShardEvaluation(network, index, world, Settings(), self.criterion)
        with accelerator.without_kernel_benchmark():
            evaluation.add(accelerator.prefetch(synthetic_batch(images, padded) for _ in range(2)))
        accelerator.synchronize()


def synthetic_batch(images: int, imgsz: ImageSize, taught: int = 0) -> Batch:
    """Return noise images with one object each; none of them labels any of `taught` classes."""
    height, width = size_hw_of(imgsz)
    pixels = torch.randint(0, 256, (images, height, width, 3), dtype=torch.uint8, generator=torch.Generator())
    targets: Tensor = torch.tensor([[i, 0, 0, 0, width / 2, height / 2] for i in range(images)])
    sizes_hw = torch.tensor([[height, width]]).expand(images, 2)
    placements = torch.tensor([[1.0, 1, 0, 0]], dtype=torch.float64).expand(images, 4)
    batch = Batch(pixels, targets, torch.arange(images), sizes_hw, placements)
    if not taught:
        return batch
    regions = torch.tensor([[i, -2, 0, 0, width, height] for i in range(images)])
    return dataclasses.replace(batch, targets=torch.cat((targets, regions)), unlabelled=torch.ones(1, taught).bool())


def synthetic_index(images: int, imgsz: ImageSize, names: Sequence[str]) -> DatasetIndex:
    """Return an index of `images` images with one object each."""
    height, width = size_hw_of(imgsz)
    return DatasetIndex(
        split="val",
        names=tuple(names),
        path_bytes=np.zeros(0, np.uint8),
        path_offsets=np.zeros(images + 1, np.int64),
        sizes_hw=np.full((images, 2), (height, width), np.int32),
        box_offsets=np.arange(images + 1),
        classes=np.zeros(images, np.int32),
        boxes_xyxy=np.tile(np.array([[0, 0, width / 2, height / 2]], np.float32), (images, 1)),
        segment_offsets=np.zeros(0, np.int64),
        segment_points=np.zeros((0, 2), np.float32),
        digest="",
    )
