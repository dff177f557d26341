"""Training step: accumulation, skipped steps, image sizes of `--multi-scale`."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tessera.models.heads.criterion import LossSettings
from tessera.utils.config import load_hyp
from tessera.utils.engine.step import StepFlags, TrainStep, largest_size, scaled_batch, scaled_size, smallest_size
from tessera.utils.errors import ConfigError
from tessera.utils.image_size import ImageSize, SizeHw, size_hw_of
from tessera.utils.ranks.world import World
from tessera.utils.training.setup import check_statistics
from tessera.utils.types import Batch
from tests.data.made_run import made_run
from tests.utils.engine.trainer import SIZE, TINY, Trainer, made_batch, spoiled


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "Muon"])
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


def test_counts_of_the_teacher_are_in_the_sum_of_all_ranks() -> None:
    """Of box and class loss, which are means over positives; objectness has all predictions."""

    def teach(assignment: Any, batch: Batch, images: Tensor) -> Any:
        positives = torch.tensor([2.0, 1.0])
        return dataclasses.replace(assignment, counts=assignment.counts * positives)

    alone, taught = Trainer(cfg=TINY), Trainer(cfg=TINY)
    step = TrainStep(taught.model, taught.state, taught.criterion, taught.context, teach=teach)
    expected, found = (one([made_batch(0)], 1).losses for one in (alone.step, step))
    torch.testing.assert_close(found, expected * torch.tensor([0.5, 1, 0.5]))


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


@pytest.mark.parametrize("imgsz", [32, 64, 96, 640])
def test_multi_scale_sizes(imgsz: int) -> None:
    sizes = {scaled_size(0, epoch, batch, imgsz, 32) for epoch in range(10) for batch in range(50)}
    assert sizes == set(range(max(imgsz // 64 * 32, 32), imgsz * 3 // 2, 32))  # [0.5, 1.5) · imgsz
    assert (min(sizes), max(sizes)) == (smallest_size(imgsz, 32), largest_size(imgsz, 32))


@pytest.mark.parametrize("imgsz", [64, SizeHw(64, 128)])
def test_images_and_boxes_take_the_size_of_their_batch(imgsz: ImageSize) -> None:
    run = made_run(load_hyp("hyp.scratch-low.yaml"), World(), imgsz=imgsz, batch_size=2, multi_scale=True)
    boxes = torch.tensor([[0, 1, 8, 16, 24, 32.0, 0.5]])
    sizes = set()
    for batch in range(8):
        columns, images = 6 + batch % 2, torch.rand(2, 3, *size_hw_of(imgsz))  # with label weights 7
        images, targets = scaled_batch(run, images, boxes[:, :columns], 0, batch)
        width = scaled_size(run.config.seed, 0, batch, run.longer_side, run.stride)
        height = width if imgsz == 64 else max(round(width / 64), 1) * 32  # the nearest to half
        assert images.shape == (2, 3, height, width)
        scale = torch.tensor([1, 1, *[width / run.longer_side, height / 64] * 2, 1])
        assert torch.allclose(targets, (boxes * scale)[:, :columns])
        sizes.add(width)
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
