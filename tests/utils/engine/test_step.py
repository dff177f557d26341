"""Optimizer step on a CPU: skipped steps and gradient clipping. With a queue: tests/gpu."""

from __future__ import annotations

import pytest
import torch

from tessera.utils.engine.step import StepFlags
from tests.utils.engine.trainer import TINY, Trainer, made_batch, spoiled


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("first_is_bad", [False, True])
def test_a_step_that_is_not_finite_leaves_no_trace(optimizer: str, first_is_bad: bool) -> None:
    trainer = Trainer(optimizer=optimizer)
    progress = trainer.state.progress
    if not first_is_bad:
        assert not trainer.step([made_batch(0)], 1).flags.skipped
    before, updates, steps = trainer.tensors(), trainer.state.ema.updates, progress.step
    with spoiled(trainer.model):
        result = trainer.step([made_batch(1)], 1)
    assert result.flags == StepFlags(steps + 1, 0, steps + 1, skipped=1, indices=(0, 1), stop=False)
    assert result.losses.tolist() == [0, 0, 0]
    assert trainer.state.ema.updates == updates and progress.skipped_steps == progress.skipped_batches == 1
    for old, new in zip(before, trainer.tensors()[: len(before)], strict=True):
        assert torch.equal(old, new)
    result = trainer.step([made_batch(2)], 1)
    assert not result.flags.skipped and result.losses.min() > 0
    clean = Trainer(optimizer=optimizer)
    for seed in (2,) if first_is_bad else (0, 2):
        clean.step([made_batch(seed)], 1)
    for expected, found in zip(clean.tensors(), trainer.tensors(), strict=True):
        assert torch.equal(expected, found)
    counters = {int(n) for name, n in trainer.model.state_dict().items() if name.endswith("num_batches_tracked")}
    assert counters == {1 if first_is_bad else 2}


def test_the_gradient_is_cut_to_the_norm_that_the_hyperparameters_say() -> None:
    """The first gradient is SGD's buffer."""
    norms = []
    for clip in (0.01, 0.02, 1e6):
        trainer = Trainer(cfg=TINY, clip=clip, weight_decay=0.0)
        trainer.step([made_batch(0)], 1)
        buffers = [state["momentum_buffer"] for state in trainer.state.optimizer.state.values()]
        norms.append(torch.cat([buffer.flatten() for buffer in buffers]).norm().item())
    assert norms[:2] == pytest.approx([0.01, 0.02], rel=1e-3) and 0.1 < norms[2] < 1e6
