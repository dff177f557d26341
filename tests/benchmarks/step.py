"""Training steps: Tessera's against eager NCHW fp32 ones.

uv run python -m tests.benchmarks.step                                          # CPU: yolov5n, 320 px, batch 16
uv run python -m tests.benchmarks.step --cfg yolov5s.yaml --imgsz 640 --batch 64 --device cuda
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from tessera.data.feed.image_store import ImageStore
from tessera.data.feed.loader import build_train_loader
from tessera.models.detector import DetectionModel
from tessera.models.heads.criterion import LossSettings
from tessera.utils.checkpoints.weights import Weights
from tessera.utils.config import Hyp, TrainConfig, load_hyp
from tessera.utils.engine.context import RunContext
from tessera.utils.engine.optimizer import build_optimizer
from tessera.utils.engine.precision import Precision
from tessera.utils.engine.profile import NoProfile
from tessera.utils.engine.state import EarlyStopping, ModelEMA, Progress, Teach, TrainState, no_teacher
from tessera.utils.engine.step import TrainStep
from tessera.utils.environment import Launch
from tessera.utils.evaluation.network import network_of_weights
from tessera.utils.machine.accelerator import Accelerator, choose_accelerator
from tessera.utils.ranks.ddp import smart_DDP
from tessera.utils.ranks.world import World
from tessera.utils.training.teacher import Teacher
from tessera.utils.types import Batch, DatasetIndex
from tests.benchmarks.harness import OwnProcess, indexed, parser, rounds, show
from tests.data.made_run import made_run

WARM_UP = 40  # steps in which the loss scale of float16, 65536 at first, may be halved until gradients are finite


def made_batch(index: DatasetIndex, batch: int, imgsz: int) -> Batch:
    run = made_run(load_hyp("hyp.scratch-low.yaml"), imgsz=imgsz, batch_size=batch, epochs=1, workers=0)
    return next(iter(build_train_loader(run, ImageStore(index, imgsz, "linear")).batches(0)))


@dataclass(frozen=True)
class Case:
    """What rivals train; the device is waited for after a round's last step."""

    model: DetectionModel
    batch: Batch
    imgsz: int
    accelerator: Accelerator
    steps: int = 1
    hyp: Hyp = field(default_factory=lambda: load_hyp("hyp.scratch-low.yaml"))


def plain_step(
    case: Case, dtype: torch.dtype, layout: torch.memory_format = torch.contiguous_format
) -> Callable[[], int]:
    """Forward, backward, clip, SGD and average, each in the obvious way; channels first, or in another layout."""
    accelerator, batch, size_hw = case.accelerator, case.batch, (case.imgsz, case.imgsz)
    device = accelerator.device
    model = copy.deepcopy(case.model).to(device, memory_format=layout).train()  # type: ignore[call-overload]
    average = copy.deepcopy(model).eval()
    criterion = model.head.criterion(LossSettings.of(case.hyp, imgsz=case.imgsz))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, nesterov=True, foreach=False)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    chw = batch.images.permute(0, 3, 1, 2).contiguous(memory_format=layout)

    def step() -> None:
        images = chw.to(device).float() / 255
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            predictions = model(images)
        assignment = accelerator.send(criterion.assign(batch.targets, len(batch), size_hw))
        loss, _ = criterion(predictions, assignment)
        scaler.scale(loss * len(batch)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 10.0, foreach=False)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        with torch.no_grad():
            state = model.state_dict()
            for key, value in average.state_dict().items():
                if value.is_floating_point():
                    value.mul_(0.9999).add_(state[key], alpha=0.0001)

    def run() -> int:
        for _ in range(case.steps):
            step()
        accelerator.synchronize()
        return case.steps * len(batch)

    return run


def train_step(
    model: DetectionModel,
    case: Case,
    dtype: torch.dtype,
    stages: NoProfile | None = None,
    world: World | None = None,
    teach: Teach = no_teacher,
    **options: bool,
) -> TrainStep:
    """The step of train.py for a copy of the case's model on its device; `options` are those of `smart_DDP`."""
    world = world or World(accelerator=case.accelerator)
    accelerator, images = case.accelerator, len(case.batch) * world.size
    criterion = case.model.head.criterion(LossSettings.of(case.hyp, imgsz=case.imgsz))
    state = TrainState(
        model,
        ModelEMA(model),
        build_optimizer(model, "SGD", case.hyp, images, fused=accelerator.fused_optimizers),
        Precision(accelerator, dtype),
        EarlyStopping(0),
        Progress(torch.zeros(len(criterion.names), device=accelerator.device)),
    )
    context = RunContext(TrainConfig(weights="", batch_size=images), case.hyp, world, case.imgsz, model.stride, Path())
    return TrainStep(smart_DDP(model, world=world, **options), state, criterion, context, profile=stages, teach=teach)


def our_step(
    case: Case, dtype: torch.dtype, stages: NoProfile | None = None, compile: bool = False, teach: Teach = no_teacher
) -> Callable[[], int]:
    """utils/engine/step.py as train.py sets it up and feeds it; the loss scale of float16 is found before it returns.

    Raises:
        RuntimeError: no step of the first ones has a finite gradient.
    """
    accelerator, batch = case.accelerator, case.batch
    accelerator.activate()
    model = copy.deepcopy(case.model)
    model.to(accelerator.device, memory_format=accelerator.memory_format).train()  # type: ignore[call-overload]
    step = train_step(model, case, dtype, stages, teach=teach, compile=compile)
    source = batch.pin_memory() if accelerator.pins_memory else batch
    for _ in range(WARM_UP):
        step([dataclasses.replace(source, images=accelerator.send(source.images))], 1)
        if not step.flush().skipped:
            break
    else:
        raise RuntimeError(f"none of {WARM_UP} steps in {dtype} has a finite gradient")

    def run() -> int:
        for arrived in accelerator.prefetch(itertools.repeat(source, case.steps)):
            step([arrived], 1)
        accelerator.synchronize()
        return case.steps * len(batch)

    return run


def taught_step(case: Case, dtype: torch.dtype) -> Callable[[], int]:
    """The step where all images label the first class alone, and a copy of the model teaches the others."""
    precision, names = Precision(case.accelerator, dtype), case.model.names
    network = network_of_weights(case.model, Weights({}, {}, names, ""), case.accelerator, precision=precision)
    teacher = Teacher(network, names, case.model.head)
    images = torch.arange(len(case.batch))[:, None].float()
    regions = torch.cat((images, torch.tensor([[-2.0, 0, 0, case.imgsz, case.imgsz]]).expand(len(images), 5)), 1)
    targets = torch.cat((case.batch.targets[case.batch.targets[:, 1] == 0], regions))
    unlabelled = torch.tensor([[number > 0 for number in range(len(names))]])
    partly = dataclasses.replace(case.batch, targets=targets, unlabelled=unlabelled)
    return our_step(dataclasses.replace(case, batch=partly), dtype, teach=teacher)


def main() -> None:
    given = parser(
        __doc__,
        data="shapes.yaml",
        rounds=7,
        cfg="yolov5n.yaml",
        imgsz=320,
        batch=16,
        device="cpu",
        steps=1,
        compile=(False, "time torch.compile too"),
    ).parse_args()
    torch.manual_seed(0)
    accelerator = choose_accelerator(given.device, Launch())
    index = indexed(given.data)
    model = DetectionModel(given.cfg, names=index.names)
    case = Case(model, made_batch(index, given.batch, given.imgsz), given.imgsz, accelerator, given.steps)
    rival = OwnProcess if accelerator.kind == "cpu" else lambda make, *arguments: make(*arguments)
    half = torch.float16 if accelerator.computes_fp16 else torch.bfloat16
    rivals = {
        "plain: eager, NCHW, fp32": rival(plain_step, case, torch.float32),
        f"plain: eager, NCHW, {half}": rival(plain_step, case, half),
        "Tessera, fp32": rival(our_step, case, torch.float32),
        "Tessera, bf16": rival(our_step, case, torch.bfloat16),
    }
    rivals["Tessera, bf16, with teacher"] = rival(taught_step, case, torch.bfloat16)
    if given.compile:
        rivals["Tessera, bf16, --compile"] = our_step(case, torch.bfloat16, compile=True)
    show(rounds(rivals, given.rounds), "plain: eager, NCHW, fp32")


if __name__ == "__main__":
    main()
