"""One optimizer step: what a skipped one leaves behind, and that a device never waits for the host in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.utils.engine.trainer import Trainer, made_batch, spoiled
from utils.engine.flags import StepFlags
from utils.machine.accelerator import Accelerator
from utils.machine.cuda import Cuda


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
    assert trainer.state.ema.updates == updates and progress.skipped_steps == progress.epoch_skipped == 1
    for old, new in zip(before, trainer.tensors()[: len(before)], strict=True):
        assert torch.equal(old, new)
    result = trainer.step([made_batch(2)], 1)
    assert not result.flags.skipped and result.losses.min() > 0
    clean = Trainer(optimizer=optimizer)
    for seed in (2,) if first_is_bad else (0, 2):
        clean.step([made_batch(seed)], 1)
    for expected, found in zip(clean.tensors(), trainer.tensors(), strict=True):
        assert torch.equal(expected, found)


def test_batches_reach_the_cpu_as_they_are() -> None:
    batches = [made_batch(seed) for seed in range(3)]
    assert list(Accelerator().in_advance(batches)) == batches


@pytest.fixture
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_the_host_never_waits_for_the_device(dtype: torch.dtype, optimizer: str, request: Any) -> None:
    trainer = Trainer(Cuda(), dtype, optimizer)
    trainer.step([replace(made_batch(0).pin_memory(), targets=torch.zeros(0, 6))], 1)
    for seed in range(3):
        trainer.step([made_batch(seed).pin_memory()], 1)
    request.getfixturevalue("no_waiting")
    for batch in Cuda().in_advance(made_batch(seed).pin_memory() for seed in range(4)):
        trainer.step([batch], 1)


@pytest.mark.gpu
def test_batches_reach_the_gpu_in_order_and_whole() -> None:
    batches = [made_batch(seed, images=8) for seed in range(6)]
    arrived = list(Cuda().in_advance(batch.pin_memory() for batch in batches))
    for sent, got in zip(batches, arrived, strict=True):
        assert got.images.is_cuda and torch.equal(got.images.cpu(), sent.images)


@pytest.mark.gpu
def test_copies_ahead_do_not_pile_up_over_epochs() -> None:
    accelerator = Cuda()
    held = []
    for _ in range(40):
        for _ in accelerator.in_advance(made_batch(seed, images=64).pin_memory() for seed in range(4)):
            pass
        held.append(accelerator.reserved_memory())
    assert held[-1] == held[2]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_gpu_skips_without_a_trace_and_its_flags_are_read_a_step_later(dtype: torch.dtype) -> None:
    trainer = Trainer(Cuda(), dtype)
    scaler = trainer.state.precision.scaler
    trainer.step([made_batch(0).pin_memory()], 1)
    assert not trainer.step.settle().skipped
    before, updates, scale = trainer.tensors(), trainer.state.ema.updates, scaler.get_scale()
    with spoiled(trainer.model):
        assert trainer.step([made_batch(1).pin_memory()], 1).flags == StepFlags()
    assert trainer.step.settle().skipped == 1
    assert trainer.state.ema.updates == updates and scaler.get_scale() == (scale if scale == 1 else scale / 2)
    for old, new in zip(before, trainer.tensors(), strict=True):
        assert torch.equal(old, new)
