"""Progress of an epoch in batches of another size."""

from __future__ import annotations

import pytest
import torch

from tessera.utils.engine.state import Progress


@pytest.mark.parametrize(
    ("before", "after", "images", "done", "skipped"),
    [
        (8, 8, 100, (6, 2), 2),
        (8, 4, 100, (12, 4), 2),
        (8, 16, 100, (3, 1), 2),
        (8, 24, 100, (2, 0), 2),
        (8, 64, 100, (0, 0), 2),
        (8, 4, 100, (12, 12), 6),
        (8, 4, 45, (12, 4), 2),  # the epoch was done, and stays so
        (8, 32, 45, (2, 0), 2),
        (8, 8, 20, (3, 2), 5),  # of fewer images than before
    ],
)
def test_losses_keep_their_mean_in_batches_of_another_size(
    before: int, after: int, images: int, done: tuple[int, int], skipped: int
) -> None:
    """The sums over 6 batches of 8 images, divided by 12 batches of 4, would be half of the mean."""
    progress = Progress(torch.zeros(2))
    for _ in range(6):
        progress.advance(1, torch.tensor([3.0, 5.0]) * (skipped < 6))
    for _ in range(skipped):
        progress.skip(1)
    mean = progress.mean_losses()
    if skipped < 6:
        assert mean.tolist() == pytest.approx([18 / (6 - skipped), 30 / (6 - skipped)])
    progress.convert_batches(before, after, images)
    assert (progress.batch_in_epoch, progress.skipped_batches) == done
    assert progress.step == 6  # optimizer steps are no batches
    if progress.epoch_counted:
        assert torch.allclose(progress.mean_losses(), mean, rtol=1e-6, atol=0)
    else:
        assert progress.losses.tolist() == [0, 0]
