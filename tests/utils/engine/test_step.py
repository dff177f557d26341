"""One optimizer step: what a skipped one leaves behind, and that a device never waits for the host in it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from models.detector import DetectionModel
from utils.config import load_hyp
from utils.engine.ema import ModelEMA
from utils.engine.optimizer import build_optimizer
from utils.engine.precision import Precision
from utils.engine.step import Resize, SkippedSteps, Told, TrainStep
from utils.machine.accelerator import Accelerator
from utils.machine.cuda import Cuda
from utils.ranks.world import World
from utils.types import Batch

SIZE = 64


def made_batch(seed: int, images: int = 2) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (images, SIZE, SIZE, 3), dtype=torch.uint8, generator=generator)
    targets = torch.tensor([[i, i, 8.0, 8, 40, 50] for i in range(images)])
    nothing = torch.zeros(images, 2, dtype=torch.int64)
    return Batch(pixels, targets, torch.arange(images), nothing, torch.zeros(images, 4, dtype=torch.float64))


class Trainer:
    """A small model with all that a step needs."""

    def __init__(self, device: str = "cpu", dtype: torch.dtype = torch.float32, optimizer: str = "SGD") -> None:
        torch.manual_seed(0)
        world = World(accelerator={"cpu": Accelerator, "cuda": Cuda}[device]())
        hyp = load_hyp("hyp.scratch-low.yaml")
        self.model = DetectionModel("yolov5n.yaml", names=("a", "b")).to(device, memory_format=torch.channels_last)
        self.optimizer = build_optimizer(self.model, optimizer, hyp, 2)
        self.ema = ModelEMA(self.model)
        self.model.train()
        criterion = self.model.head.criterion(hyp, imgsz=SIZE)
        self.step = TrainStep(
            *(
                self.model,
                self.model,
                criterion,
                self.optimizer,
                Precision(world.accelerator, dtype),
                self.ema,
                world,
                2,
            ),
            Resize(None, 32),
            asked_to_stop=lambda: False,
        )

    def state(self) -> list[Tensor]:
        """All that a step changes, as copies."""
        slots = [v for s in self.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
        return copy.deepcopy([*self.model.state_dict().values(), *self.ema.model.state_dict().values(), *slots])


@contextmanager
def spoiled(model: DetectionModel) -> Iterator[None]:
    """Inside, what the first layer gives is not a number, and spoils BatchNorm's statistics as well."""
    hook = model.model[0].register_forward_hook(lambda module, args, out: out * float("nan"))
    yield
    hook.remove()


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("first_is_bad", [False, True])
def test_a_step_that_is_not_finite_leaves_no_trace(optimizer: str, first_is_bad: bool) -> None:
    trainer = Trainer(optimizer=optimizer)
    if not first_is_bad:
        assert not trainer.step([made_batch(0)], 1, 0, 0).told.skipped
    before, updates = trainer.state(), trainer.ema.updates
    with spoiled(trainer.model):
        result = trainer.step([made_batch(1)], 1, 0, 1)
    assert result.told == Told(1, (0, 1), stop=False) and result.losses.tolist() == [0, 0, 0]
    assert trainer.ema.updates == updates
    for old, new in zip(before, trainer.state()[: len(before)], strict=True):
        assert torch.equal(old, new)
    result = trainer.step([made_batch(2)], 1, 0, 2)
    assert not result.told.skipped and result.losses.min() > 0
    clean = Trainer(optimizer=optimizer)
    for seed in (2,) if first_is_bad else (0, 2):
        clean.step([made_batch(seed)], 1, 0, 0)
    for expected, found in zip(clean.state(), trainer.state(), strict=True):
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
    trainer = Trainer("cuda", dtype, optimizer)
    trainer.step([replace(made_batch(0).pin_memory(), targets=torch.zeros(0, 6))], 1, 0, 0)
    for seed in range(3):
        trainer.step([made_batch(seed).pin_memory()], 1, 0, seed)
    request.getfixturevalue("no_waiting")
    batches = Cuda().in_advance(made_batch(seed).pin_memory() for seed in range(4))
    for number, batch in enumerate(batches):
        trainer.step([batch], 1, 0, number)


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
def test_a_gpu_skips_without_a_trace_and_tells_a_step_later(dtype: torch.dtype) -> None:
    trainer = Trainer("cuda", dtype)
    trainer.step([made_batch(0).pin_memory()], 1, 0, 0)
    assert not trainer.step.settle().skipped
    before, updates, scale = trainer.state(), trainer.ema.updates, trainer.step.loss_scale
    with spoiled(trainer.model):
        assert trainer.step([made_batch(1).pin_memory()], 1, 0, 1).told == Told()
    assert trainer.step.settle().skipped == 1
    assert trainer.ema.updates == updates and trainer.step.loss_scale == (scale if scale == 1 else scale / 2)
    for old, new in zip(before, trainer.state(), strict=True):
        assert torch.equal(old, new)


def test_ten_skipped_steps_in_a_row_are_too_many_once_the_scale_is_found() -> None:
    skips, scales = SkippedSteps(), iter([8.0, 4.0, 2.0])
    assert not any(skips.note(True, lambda: next(scales)) for _ in range(3))
    assert not any(skips.note(True, lambda: 1.0) for _ in range(9))
    assert not skips.note(False, lambda: 1.0)
    assert [skips.note(True, lambda: 1.0) for _ in range(10)] == [False] * 9 + [True]
