"""Batch sizes of `--multi-scale`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tessera.utils.config import load_hyp
from tessera.utils.engine.step import check_statistics, largest_size, resized, scaled_size, smallest_size
from tessera.utils.errors import ConfigError
from tessera.utils.ranks.world import World
from tests.data.made_run import made_run


@pytest.mark.parametrize("imgsz", [32, 64, 96, 640])
def test_multi_scale_sizes(imgsz: int) -> None:
    sizes = {scaled_size(0, epoch, batch, imgsz, 32) for epoch in range(10) for batch in range(50)}
    assert sizes == set(range(max(imgsz // 64 * 32, 32), imgsz * 3 // 2, 32))  # [0.5, 1.5) · imgsz
    assert (min(sizes), max(sizes)) == (smallest_size(imgsz, 32), largest_size(imgsz, 32))


def test_images_and_boxes_take_the_size_of_their_batch() -> None:
    run = made_run(load_hyp("hyp.scratch-low.yaml"), World(), imgsz=64, batch_size=2, multi_scale=True)
    boxes = torch.tensor([[0, 1, 8, 16, 24, 32.0]])
    sizes = set()
    for batch in range(8):
        images, targets = resized(run, torch.rand(2, 3, 64, 64), boxes, 0, batch)
        size = scaled_size(run.config.seed, 0, batch, 64, run.stride)
        assert images.shape == (2, 3, size, size)
        assert torch.equal(targets[:, :2], boxes[:, :2]) and torch.allclose(targets[:, 2:], boxes[:, 2:] * size / 64)
        sizes.add(size)
    assert len(sizes) > 1


@pytest.mark.parametrize(
    ("ranks", "batch_size", "imgsz", "flags", "remedy"),
    [
        (1, 1, 32, {}, "Give --batch-size 2 or more, or --imgsz 64 or more."),
        (1, 1, 32, {"sync_bn": True}, "Give --batch-size 2 or more, or --imgsz 64 or more."),
        (2, 2, 32, {}, "one value per channel on each rank, .* Give --batch-size 4 or more, --sync-bn, or --imgsz 64"),
        (1, 1, 96, {"multi_scale": True}, "--multi-scale, down to 32 px: .* or --imgsz 128 or more."),
        (2, 2, 32, {"sync_bn": True}, ""),
        (1, 2, 32, {}, ""),
        (1, 1, 64, {}, ""),
        (1, 1, 128, {"multi_scale": True}, ""),
    ],
)
def test_a_batch_of_one_value_a_channel_is_refused(
    ranks: int, batch_size: int, imgsz: int, flags: dict[str, Any], remedy: str
) -> None:
    """Its variance is not defined: torch's normalisation raises, and statistics over the ranks would become NaN."""
    world = World()
    world.size = ranks
    run = made_run(load_hyp("hyp.scratch-low.yaml"), world, imgsz=imgsz, batch_size=batch_size, **flags)
    if not remedy:
        check_statistics(run)
        return
    with pytest.raises(ConfigError, match=rf"^--batch-size {batch_size} --imgsz {imgsz}.*{remedy}") as raised:
        check_statistics(run)
    assert "no variance to normalise by" in str(raised.value)
