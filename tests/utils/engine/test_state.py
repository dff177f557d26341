"""Progress counts the steps and losses of an epoch."""

from __future__ import annotations

import torch

from utils.engine.state import Progress


def test_progress_counts_and_starts_over_each_epoch() -> None:
    progress = Progress(torch.zeros(3))
    progress.advance(4, torch.tensor([1.0, 2.0, 3.0]))
    progress.advance(2, torch.tensor([1.0, 0.0, 1.0]))
    assert (progress.epoch, progress.step, progress.step_in_epoch) == (0, 2, 6)
    assert progress.losses.tolist() == [2, 2, 4]
    progress.finish_epoch()
    assert (progress.epoch, progress.step, progress.step_in_epoch) == (1, 2, 0)
    assert progress.losses.tolist() == [0, 0, 0]
