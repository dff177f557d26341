"""A few optimizer steps as train.py makes them: `parity_program.py DATA OUT [--after-warmup] [--steps N] [FLAGS]`, on
any ranks.

Several of such lists, with `--then` between them, are done one after the other.

They are the first of a run, where a step is one batch and the rates are those of the warm-up. `--after-warmup`: those
that follow it, where a step accumulates batches; give a small lr0 then, because a network that is new and takes whole
steps multiplies a difference in the last digit by a thousand in each.

Rank 0 writes what all ranks saw, batch by batch, which pixels their max-pools chose, and what the model became after
each step.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.nn.functional as F

from tessera.data.feed.cache import ShmBudget
from tessera.data.source.dataset_yaml import load_spec
from tessera.data.source.index import build_index
from tessera.models.heads.criterion import LossSettings
from tessera.utils.checkpoints.initial_model import build_model, read_weights
from tessera.utils.config import TrainConfig, load_hyp
from tessera.utils.engine.context import RunContext
from tessera.utils.engine.optimizer import Schedule, build_optimizer
from tessera.utils.engine.precision import Precision
from tessera.utils.engine.state import EarlyStopping, ModelEMA, Progress, TrainState
from tessera.utils.engine.step import TrainStep, scaled_size
from tessera.utils.ranks.ddp import smart_DDP
from tessera.utils.ranks.failures import run_rank
from tessera.utils.ranks.launch import open_world
from tessera.utils.ranks.world import World
from tessera.utils.training.data import Splits, class_weights, open_train_loader, reweight, training_data
from tessera.utils.types import Batch

AFTER_WARMUP, STEPS = "--after-warmup", "--steps"
MAPS = (0.1, 0.9, 0.5, 0.3, 0.7, 0.2)  # of the classes, for --image-weights


def main() -> None:
    with open_world("cpu") as world:
        words = iter(sys.argv[1:])
        while case := list(itertools.takewhile(lambda word: word != "--then", words)):
            run(case, world)


def run(words: list[str], world: World) -> None:
    data, out, *flags = words
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument(AFTER_WARMUP, action="store_true")
    parser.add_argument(STEPS, type=int, default=3)
    asked, flags = parser.parse_known_args(flags)
    config = TrainConfig(**TrainConfig.from_args([*flags, "--data", data]))
    hyp = load_hyp(*(config.hyp or ["hyp.scratch-low.yaml"]))
    with ExitStack() as stack:
        images = build_index(load_spec(config.data), "train")
        index = training_data(Splits(None, images, images), config, config.imgsz, world).train  # type: ignore[arg-type]
        weights = read_weights(config, None)
        model = build_model(config, hyp, index.names, weights).to(memory_format=torch.channels_last)
        context = RunContext(config, hyp, world, config.imgsz, 32, Path())
        loader = open_train_loader(context, index, ShmBudget(world), stack)
        criterion = model.head.criterion(
            LossSettings.of(hyp, imgsz=context.longer_side, class_weights=class_weights(hyp, index))
        )
        optimizer = build_optimizer(model, context.optimizer, hyp, config.batch_size)
        schedule = Schedule(hyp, 100, loader.batches_per_epoch, config.batch_size)
        ema = ModelEMA(model, hyp.ema_fraction)
        precision, progress = Precision(world.accelerator, torch.float32), Progress(torch.zeros(len(criterion.names)))
        state = TrainState(model, ema, optimizer, precision, EarlyStopping(0), progress)
        step = TrainStep(smart_DDP(model, config.sync_bn, world=world), state, criterion, context)
        model.train()

        def size_of(epoch: int, batch: int) -> int:
            longest = context.longer_side
            return scaled_size(config.seed, epoch, batch, longest, 32) if config.multi_scale else longest

        pooled: list[tuple[torch.Tensor, ...]] = []
        for module in model.modules():
            if isinstance(module, torch.nn.MaxPool2d):
                module.register_forward_pre_hook(lambda pool, inputs: pooled.append(choices(pool, inputs[0].detach())))
        seen: list[list[tuple[torch.Tensor, ...]]] = []
        windows: list[int] = []
        sizes: list[int] = []
        losses: list[torch.Tensor] = []
        states: list[dict[str, torch.Tensor]] = []
        iteration = schedule.warmup_iterations if asked.after_warmup else 0
        for epoch in itertools.count():
            reweight(loader, index, Progress(torch.zeros(3), class_maps=MAPS[: len(index.names)]), config)
            batches, first = loader.batches(epoch), 0
            while first < loader.batches_per_epoch and len(states) < asked.steps:
                window = min(schedule.window(iteration), loader.batches_per_epoch - first)
                drawn = list(itertools.islice(batches, window))
                schedule.apply(optimizer, iteration + window - 1)
                progress.epoch, progress.batch_in_epoch = epoch, first
                result = step(drawn, window)
                assert not result.flags.skipped
                sizes += [size_of(epoch, first + k) for k in range(window)]
                seen.append([(b.images.clone(), b.indices.clone(), *labels_per_image(b)) for b in drawn])
                windows.append(window)
                losses.append(world.sum(result.losses.clone()))
                states.append({k: v.clone() for k, v in model.state_dict().items()})
                iteration, first = iteration + window, first + window
            if len(states) == asked.steps:
                break
        shares = world.all_gather([batch for step_batches in seen for batch in step_batches])
        pools = world.all_gather(pooled)
        if world.is_main:
            joined = [
                tuple(torch.cat(parts) for parts in zip(*[share[k] for share in shares], strict=True))
                for k in range(sum(windows))
            ]
            content = {
                "states": states,
                "ema": ema.model.state_dict(),
                "losses": losses,
                "windows": windows,
                "sizes": sizes,
                "class_weights": criterion.class_weights,
                "pools": [tuple(map(torch.cat, zip(*parts, strict=True))) for parts in zip(*pools, strict=True)],
            }
            torch.save({**content, "seen": joined}, Path(out))


def choices(pool: torch.nn.MaxPool2d, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs of a max-pool, flat per image and channel, and the indices it chooses: both (B, C, H * W)."""
    _, places = F.max_pool2d(images, pool.kernel_size, pool.stride, pool.padding, return_indices=True)
    return images.flatten(2).clone(), places.flatten(2)


def labels_per_image(batch: Batch) -> tuple[torch.Tensor, ...]:
    images, ignored = batch.targets[:, 0].long(), batch.targets[:, 1] < 0
    return tuple(torch.bincount(images[rows], minlength=len(batch)) for rows in (~ignored, ignored))


if __name__ == "__main__":
    sys.exit(run_rank(main)[0])
