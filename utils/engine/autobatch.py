"""AutoBatch: the largest batch that fits, from measured steps."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from utils.errors import UserError
from utils.machine.accelerator import Accelerator
from utils.ranks.world import World

log = logging.getLogger(__name__)

TRIAL_SIZES = (1, 2, 4, 8, 16)
CPU_BATCH = 16
SHARE = 0.8  # of the memory that is free before the first step


def auto_batch_size(step: Callable[[int], None], most: int, world: World) -> int:
    """Images a global batch for `--batch-size -1`, the same on every rank.

    Memory is measured in real steps of 1 to 16 images and taken to grow linearly; each rank fills 80 % of what is free,
    the rank with the least decides. Without CUDA, where memory is not the limit, 16 images in all.

    Args:
        step: runs forward, loss, backward on so many made-up images, and leaves the model's weights as they were.
        most: images of the dataset, which a batch need not exceed.
        world: the ranks.

    Raises:
        UserError: one image does not fit.
    """
    accelerator = world.accelerator
    if not accelerator.measures_memory:
        batch = max(CPU_BATCH // world.size, 1) * world.size
        log.info(f"AutoBatch: memory is measured on CUDA only; using {batch} images a batch on {accelerator.kind}.")
        return batch
    largest = min(world.all_gather(_largest_batch(step, accelerator)))
    if largest < 1:
        raise UserError(
            "AutoBatch: one image does not fit into the memory of a GPU. Use a smaller --imgsz or a smaller model, "
            "or free memory that other processes hold."
        )
    log.info(f"AutoBatch: {largest} images a rank fill {SHARE:.0%} of the free memory, {largest * world.size} in all.")
    return min(largest, -(-most // world.size)) * world.size


def _largest_batch(step: Callable[[int], None], accelerator: Accelerator) -> int:
    """Images that fit on this rank; 0 where not even one does."""
    accelerator.reset_peak_memory()
    held, free = accelerator.allocated_memory(), accelerator.free_memory()
    sizes: list[int] = []
    peaks: list[int] = []
    for size in TRIAL_SIZES:
        try:
            step(size)
        except Exception as error:
            if not accelerator.is_out_of_memory(error):
                raise
            break
        sizes.append(size)
        peaks.append(accelerator.peak_memory() - held)
        accelerator.reset_peak_memory()
    return fit_batch(sizes, peaks, SHARE * free)


def fit_batch(sizes: list[int], peaks: list[int], room: float) -> int:
    """Largest batch whose memory, on the line through the measurements (sizes, peaks in bytes), stays within `room`.

    Never more than measured sizes allow to trust: with a single measurement it is that size. 0 without any.
    """
    if len(sizes) < 2:
        return sizes[0] if sizes and peaks[0] <= room else 0
    slope, offset = np.polyfit(sizes, peaks, 1)
    if slope <= 0:  # all sizes cost the same: nothing to extrapolate from
        return sizes[-1]
    return max(int((room - offset) // slope), 0)
