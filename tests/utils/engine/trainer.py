"""Small model with all that a step needs, and its batches."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tessera.models.detector import DetectionModel
from tessera.utils.config import TrainConfig, load_hyp
from tessera.utils.engine.context import RunContext, TrainingData
from tessera.utils.engine.optimizer import build_optimizer
from tessera.utils.engine.precision import Precision
from tessera.utils.engine.state import EarlyStopping, ModelEMA, Progress, Training, TrainState
from tessera.utils.engine.step import TrainStep
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.ranks.world import World
from tessera.utils.types import Batch, DatasetIndex

SIZE = 64
TINY: dict[str, Any] = {  # a detector of one level that takes a millisecond
    "nc": 2,
    "depth_multiple": 1.0,
    "width_multiple": 1.0,
    "anchors": [[10, 13, 16, 30, 33, 23]],
    "backbone": [[-1, 1, "Conv", [8, 3, 2]], [-1, 1, "Conv", [16, 3, 2]], [-1, 1, "Conv", [16, 3, 2]]],
    "head": [[[2], 1, "Detect", ["nc", "anchors"]]],
}
FREE: dict[str, Any] = {  # the same body with other heads
    **{key: value for key, value in TINY.items() if key != "anchors"},
    "head": [[[2], 1, "DetectFree", ["nc"]]],
}
YOLOX: dict[str, Any] = {**FREE, "head": [[[2], 1, "DetectYOLOX", ["nc"]]]}
YOLOV9: dict[str, Any] = {  # with the blocks of its own bodies
    **FREE,
    "backbone": [[-1, 1, "Conv", [8, 3, 2]], [-1, 1, "ADown", [8]], [-1, 1, "RepElan", [16]], [-1, 1, "AConv", [16]]],
    "head": [[[3], 1, "DetectYOLOv9", ["nc", 16]]],
}


def made_batch(seed: int, images: int = 2) -> Batch:
    """Noise, with an object in each image."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (images, SIZE, SIZE, 3), dtype=torch.uint8, generator=generator)
    targets = torch.tensor([[i, i % 2, 8.0, 8, 40, 50] for i in range(images)])
    nothing = torch.zeros(images, 2, dtype=torch.int64)
    return Batch(pixels, targets, torch.arange(images), nothing, torch.zeros(images, 4, dtype=torch.float64))


class Trainer:
    """A single rank's training of two classes.

    Attributes:
        model, step, state, context: as in train.py.
    """

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        dtype: torch.dtype = torch.float32,
        optimizer: str = "SGD",
        cfg: Any = "yolov5n.yaml",
        **hyp_values: float,
    ) -> None:
        torch.manual_seed(0)
        world = World(accelerator=accelerator)
        hyp = replace(load_hyp("hyp.scratch-low.yaml"), **hyp_values)  # type: ignore[arg-type]
        self.context = RunContext(TrainConfig(weights="", data="made", batch_size=2), hyp, world, SIZE, 32, Path("run"))
        self.model = DetectionModel(cfg, names=("a", "b"))
        self.model.to(world.device, memory_format=torch.channels_last).train()  # type: ignore[call-overload]
        criterion = self.criterion = self.model.head.criterion(hyp, imgsz=SIZE)
        self.state = TrainState(
            self.model,
            ModelEMA(self.model),
            build_optimizer(self.model, optimizer, hyp, 2, fused=world.accelerator.fused_optimizers),
            Precision(world.accelerator, dtype),
            EarlyStopping(0),
            Progress(torch.zeros(len(criterion.names), device=world.device)),
        )
        self.step = TrainStep(self.model, self.state, criterion, self.context)

    def training(self, index: DatasetIndex, **context: Any) -> Training:
        """The run, with an index as both splits."""
        data = TrainingData(None, index, index, index, len(index), "")  # type: ignore[arg-type]
        return Training(replace(self.context, **context), data, self.state, self.criterion)

    def tensors(self) -> list[Tensor]:
        """All that a step changes, as copies."""
        slots = [v for s in self.state.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
        return copy.deepcopy([*self.model.state_dict().values(), *self.state.ema.model.state_dict().values(), *slots])


@contextmanager
def spoiled(model: DetectionModel) -> Iterator[None]:
    """Inside, what the first layer gives is not a number, and spoils BatchNorm's statistics as well."""
    hook = model.model[0].register_forward_hook(lambda module, args, out: out * float("nan"))
    yield
    hook.remove()
