"""A step on a device with a queue: the host never waits, nothing is lost, and the numbers are the CPU's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tessera.utils.engine.step import StepFlags
from tests.gpu.conftest import HEADS, TOLERANCE, Gate, each_head, made_trainer, pinned
from tests.utils.engine.trainer import Trainer, made_batch, spoiled


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "Muon"])
@each_head
def test_the_host_never_waits_for_the_device(gate: Gate, head: str, dtype: torch.dtype, optimizer: str) -> None:
    trainer = made_trainer(gate, dtype, optimizer, head)
    trainer.step([replace(pinned(gate, made_batch(0)), targets=torch.zeros(0, 6))], 1)
    for seed in range(3):
        trainer.step([pinned(gate, made_batch(seed))], 1)
    batches = gate.accelerator.prefetch(pinned(gate, made_batch(seed)) for seed in range(4))
    with gate.no_waiting():
        for batch in batches:
            trainer.step([batch], 1)


def test_batches_arrive_in_order_and_whole(gate: Gate) -> None:
    batches = [made_batch(seed, images=8) for seed in range(6)]
    arrived = list(gate.accelerator.prefetch(pinned(gate, batch) for batch in batches))
    for sent, got in zip(batches, arrived, strict=True):
        assert got.images.device.type == gate.accelerator.kind
        assert torch.equal(got.images.cpu(), sent.images)


def test_copies_ahead_do_not_pile_up_over_epochs(gate: Gate) -> None:
    held = []
    for _ in range(10):
        for _ in gate.accelerator.prefetch(pinned(gate, made_batch(seed, images=64)) for seed in range(4)):
            pass
        held.append(gate.accelerator.reserved_memory())
    assert held[-1] <= held[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_skipped_step_leaves_no_trace_and_its_flags_are_read_a_step_later(gate: Gate, dtype: torch.dtype) -> None:
    trainer = made_trainer(gate, dtype)
    scaler = trainer.state.precision.scaler
    trainer.step([pinned(gate, made_batch(0))], 1)
    assert not trainer.step.flush().skipped
    before, updates, scale = trainer.tensors(), trainer.state.ema.updates, scaler.get_scale()
    with spoiled(trainer.model):
        assert trainer.step([pinned(gate, made_batch(1))], 1).flags == StepFlags()
    assert trainer.step.flush() == StepFlags(2, 0, 2, skipped=1, indices=(0, 1))
    assert trainer.state.ema.updates == updates and scaler.get_scale() == (scale if scale == 1 else scale / 2)
    for old, new in zip(before, trainer.tensors(), strict=True):
        assert torch.equal(old, new)


@each_head
def test_losses_of_20_steps_are_those_of_the_cpu(gate: Gate, head: str) -> None:
    trainers = [Trainer(accelerator, cfg=HEADS[head][0]) for accelerator in (None, gate.accelerator)]
    for number in range(20):
        losses = []
        for trainer in trainers:
            for group in trainer.state.optimizer.param_groups:
                group["lr"] = 0.002
            losses.append(trainer.step([pinned(gate, made_batch(number % 4, images=8))], 1).losses.cpu())
        print(f"step {number}: CPU {losses[0].tolist()}, device {losses[1].tolist()}")
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-4 if number < 3 else TOLERANCE, atol=1e-5)
