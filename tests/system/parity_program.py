"""A few optimizer steps as train.py makes them: `parity_program.py DATA OUT [FLAGS]`, on any number of ranks.

Rank 0 writes what the model became after each step; every rank writes the images and labels that it saw.
"""

from __future__ import annotations

import itertools
import sys
from contextlib import ExitStack
from pathlib import Path

import torch

import train
from data.index import build_index
from data.spec import load_spec
from models.loss import build_criterion
from utils.checkpoint import Progress
from utils.config import TrainConfig, load_hyp
from utils.distributed import open_world, run_rank, smart_DDP
from utils.ema import ModelEMA
from utils.optim import Schedule, build_optimizer
from utils.precision import Precision
from utils.step import Resize, TrainStep

STEPS = 3


def main() -> None:
    data, out, *flags = sys.argv[1:]
    config = TrainConfig(**TrainConfig.from_args([*flags, "--data", data]))
    hyp = load_hyp(config.hyp)
    with open_world("cpu", batch_size=config.batch_size) as world, ExitStack() as stack:
        index = build_index(load_spec(config.data), "train")
        model = train.build_model(config, index.names, world).to(memory_format=torch.channels_last)
        loader = train.open_train_loader(stack, index, config, hyp, world, config.imgsz, 32, config.batch_size)
        optimizer = build_optimizer(model, config.optimizer, hyp, config.batch_size)
        schedule = Schedule(hyp, 100, loader.batches_per_epoch, config.batch_size)
        ema = ModelEMA(model)
        step = TrainStep(
            *(smart_DDP(model, sync_bn=config.sync_bn), model, build_criterion(model, hyp, imgsz=config.imgsz)),
            *(optimizer, Precision(world.device, torch.float32), ema, world, config.batch_size),
            Resize(train.size_of_batch(config, config.imgsz, 32), 32),
            asked_to_stop=lambda: False,
        )
        model.train()
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        losses = []
        states = []
        done = 0
        # From where the warm-up is over: accumulation is whole and no rate is 0.
        iteration = schedule.warmup_iterations
        for epoch in itertools.count():
            train.reweight(loader, index, Progress(class_maps=(0.3,) * len(index.names)), config)
            batches = loader.batches(epoch)
            for first in range(0, loader.batches_per_epoch, window := schedule.window(iteration)):
                window = min(window, loader.batches_per_epoch - first)
                drawn = list(itertools.islice(batches, window))
                seen += [(batch.images.clone(), batch.indices.clone()) for batch in drawn]
                schedule.apply(optimizer, iteration)
                result = step(drawn, window, epoch, first)
                losses.append(world.sum(result.losses.clone()))
                states.append({k: v.clone() for k, v in model.state_dict().items()})
                done += 1
                if done == STEPS:
                    break
            if done == STEPS:
                break
        shares = world.all_gather(seen)
        if world.is_main:
            joined = [
                (torch.cat([share[k][0] for share in shares]), torch.cat([share[k][1] for share in shares]))
                for k in range(len(seen))
            ]
            torch.save({"states": states, "ema": ema.model.state_dict(), "losses": losses, "seen": joined}, Path(out))


if __name__ == "__main__":
    sys.exit(run_rank(main)[0])
