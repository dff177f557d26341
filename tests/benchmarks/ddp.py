"""Overhead of ranks with gloo: time of a step outside computation, control messages, and weak scaling.

    uv run torchrun --standalone --nproc-per-node 2 -m tests.benchmarks.ddp --data coco128.yaml

Every rank alternates steps with and without the others, all at the same time, so that the cores are shared alike in
both. The difference is the time of communication and waiting. Give each rank its part of the cores with
OMP_NUM_THREADS; torchrun gives it one.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch

from tessera.models.detector import DetectionModel
from tessera.utils.config import TrainConfig, load_hyp
from tessera.utils.engine.context import RunContext
from tessera.utils.engine.optimizer import build_optimizer
from tessera.utils.engine.precision import Precision
from tessera.utils.engine.state import EarlyStopping, ModelEMA, Progress, TrainState
from tessera.utils.engine.step import TrainStep
from tessera.utils.ranks.ddp import smart_DDP
from tessera.utils.ranks.launch import open_world
from tessera.utils.ranks.world import World
from tests.benchmarks.harness import indexed, machine, parser
from tests.benchmarks.step import made_batch


def main() -> None:
    given = parser(
        __doc__,
        data="shapes.yaml",
        rounds=7,
        cfg="yolov5n.yaml",
        imgsz=320,
        batch=(8, "images of a rank"),
        sync_bn=False,
    ).parse_args()
    with open_world("cpu") as world:
        index = world.run_on_main(lambda: indexed(given.data))
        hyp = load_hyp("hyp.scratch-low.yaml")
        batch = made_batch(index, given.batch, given.imgsz)

        def trainer(together: bool) -> TrainStep:
            torch.manual_seed(0)
            model = DetectionModel(given.cfg, names=index.names).to(memory_format=torch.channels_last).train()
            optimizer = build_optimizer(model, "SGD", hyp, given.batch * world.size)
            wrapped = smart_DDP(model, sync_bn=given.sync_bn) if together else model
            precision, progress = (
                Precision(world.accelerator, torch.float32),
                Progress(torch.zeros(3, device=world.device)),
            )
            state = TrainState(model, ModelEMA(model), optimizer, precision, EarlyStopping(0), progress)
            ranks, batch_size = world if together else World(), given.batch * world.size
            context = RunContext(TrainConfig(weights="", batch_size=batch_size), hyp, ranks, given.imgsz, 32, Path())
            return TrainStep(wrapped, state, model.head.criterion(hyp, imgsz=given.imgsz), context)

        rivals = {"together": trainer(True), "alone": trainer(False)}
        seconds: dict[str, list[float]] = {name: [] for name in rivals}
        assert world._heartbeat is not None
        messages = world._heartbeat.messages
        for round_ in range(given.rounds + 2):
            for name, step in rivals.items():
                world.barrier()
                started = time.perf_counter()
                for _ in range(5):
                    step([batch], 1)
                if round_ >= 2:
                    seconds[name].append((time.perf_counter() - started) / 5)
        messages = world._heartbeat.messages - messages - 2 * (given.rounds + 2)
        shares = world.all_gather({name: statistics.median(found) for name, found in seconds.items()})
        if world.is_main:
            print(machine())
            for rank, share in enumerate(shares):
                outside = share["together"] - share["alone"]
                print(
                    f"  rank {rank}: a step of {given.batch} images takes {1000 * share['together']:.1f} ms, alone "
                    f"{1000 * share['alone']:.1f} ms: {1000 * outside:.1f} ms ({outside / share['together']:.1%}) "
                    "outside computation"
                )
            print(f"  control messages in {5 * (given.rounds + 2)} steps: {messages}")
            together = max(share["together"] for share in shares)
            print(f"  {world.size} ranks: {world.size * given.batch / together:.1f} images/s")


if __name__ == "__main__":
    main()
