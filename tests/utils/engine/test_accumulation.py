"""What a step over several batches is: each batch keeps a mean of its own, and counts as its images.

With equally many positives in each, 4 × 16 images are 1 × 64 to the last digits. With fewer in one batch than in
another, an object of the former weighs more: the rule of the original, which makes a batch's gradient independent of
its neighbours in the window.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from tessera.models.heads.criterion import LossSettings
from tessera.utils.engine.step import TrainStep
from tessera.utils.types import Batch
from tests.utils.engine.trainer import SIZE, Trainer, made_batch

BATCH, WINDOW = 16, 4


def batches(seed: int, objects: tuple[int, ...]) -> list[Batch]:
    """Batches of 16 noisy images; in batch k the first images, `objects[k]` of them, hold one object each."""
    rows = [[[i, i % 2, 4.0 + i, 8, 40 + i, 50] for i in range(count)] for count in objects]
    targets = [torch.tensor(found).reshape(-1, 6) for found in rows]
    seeds = range(WINDOW * seed, WINDOW * (seed + 1))
    return [dataclasses.replace(made_batch(k, BATCH), targets=t) for k, t in zip(seeds, targets, strict=True)]


def joined(parts: list[Batch]) -> Batch:
    """The same images and objects as one batch."""
    targets = [part.targets + torch.tensor([k * BATCH, 0, 0, 0, 0, 0]) for k, part in enumerate(parts)]
    names = [field.name for field in dataclasses.fields(Batch) if isinstance(getattr(parts[0], field.name), Tensor)]
    columns = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
    return Batch(**{**columns, "targets": torch.cat(targets)})


def gradient_of_a_step(parts: list[Batch]) -> list[Tensor]:
    """What the optimizer would step along, before it is clipped; BatchNorm does not tell batches apart."""
    trainer = Trainer()
    config = dataclasses.replace(trainer.context.config, batch_size=len(parts[0]))
    context = dataclasses.replace(trainer.context, config=config)
    criterion = trainer.model.head.criterion(LossSettings.of(context.hyp, imgsz=SIZE))
    for module in trainer.model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    seen: dict[int, Tensor] = {}
    parameters = list(trainer.model.parameters())
    for number, parameter in enumerate(parameters):

        def keep(parameter: Tensor, number: int = number) -> None:
            assert parameter.grad is not None
            seen[number] = parameter.grad.clone()

        parameter.register_post_accumulate_grad_hook(keep)
    TrainStep(trainer.model, trainer.state, criterion, context)(parts, len(parts))
    return [seen[number] for number in range(len(parameters))]


def apart(a: list[Tensor], b: list[Tensor]) -> float:
    """Largest difference of two gradients, as a fraction of the largest value."""
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True)) / max(float(x.abs().max()) for x in a)


def test_four_batches_with_equal_counts_have_the_gradient_of_one_of_64() -> None:
    parts = batches(0, (10,) * WINDOW)
    assert apart(gradient_of_a_step(parts), gradient_of_a_step([joined(parts)])) < 1e-5


@pytest.mark.parametrize("objects", [(2, 16, 6, 0), (16, 16, 16, 1)])
def test_otherwise_each_batch_keeps_its_own_mean(objects: tuple[int, ...]) -> None:
    parts = batches(1, objects)
    window = gradient_of_a_step(parts)
    alone = [gradient_of_a_step([part]) for part in parts]
    assert apart(window, [torch.stack(each).sum(0) for each in zip(*alone, strict=True)]) < 1e-5
    assert apart(window, gradient_of_a_step([joined(parts)])) > 1e-3
