"""Training states, checkpoints and savers of a small model."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tessera.utils.checkpoints.format import describe_metrics, describe_run
from tessera.utils.checkpoints.resume import dump_state
from tessera.utils.checkpoints.saver import Saver
from tessera.utils.config import TrainConfig, load_hyp
from tessera.utils.engine.context import RunContext
from tessera.utils.engine.muon import Muon
from tessera.utils.engine.precision import Precision
from tessera.utils.engine.state import EarlyStopping, ModelEMA, Progress, TrainState
from tessera.utils.engine.step import StepFlags
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.ranks.failures import StopSignals
from tessera.utils.ranks.world import World
from tessera.utils.types import Metrics

METRICS = Metrics(
    precision=0.5,
    recall=0.6,
    map50=0.8,
    map=0.7,
    class_ids=np.arange(2),
    per_class=np.full((2, 4), 0.5),
    images_per_class=np.array([3, 4]),
    objects_per_class=np.array([5, 6]),
    images=7,
    objects=11,
    confidence=0.3,
    class_confidences=np.array([0.25, 0.3]),
)


class Net(nn.Module):
    """A small model with what a checkpoint needs of a detector."""

    def __init__(self, nc: int = 2, width: int = 4) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.Conv2d(width, nc, 1))
        self.register_buffer("anchors", torch.rand(2, 3, 2))
        self.yaml = {"nc": nc, "backbone": [[-1, 1, "Conv", [width, 3]]]}
        self.names = tuple(f"class{i}" for i in range(nc))

    @property
    def head(self) -> Any:
        return SimpleNamespace(strides=(8.0, 16.0), priors=self.anchors)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


class Mixed(torch.optim.Optimizer):
    """An optimizer of the user's own whose groups are of two kinds: momentum for weights, signs for the rest."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta = group["momentum"] if "momentum" in group else group["betas"][0]
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 1 - beta)
                p.sub_(mean if "momentum" in group else mean.sign(), alpha=0.01)


def make_state(seed: int = 0, optimizer: str = "SGD", **net: int) -> TrainState[Any]:
    torch.manual_seed(seed)
    model = Net(**({"width": 16} if optimizer == "Muon" else {}), **net)
    built: torch.optim.Optimizer
    if optimizer == "mixed":
        kinds: list[dict[str, Any]] = [{"momentum": 0.9}, {"betas": (0.9, 0.99)}]
        built = Mixed([{"params": [p], **kinds[p.ndim == 1]} for p in model.parameters()])
    elif optimizer == "SGD":
        built = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True)
    else:
        adamw = Muon if optimizer == "Muon" else torch.optim.AdamW
        built = adamw([{"params": [p]} for p in model.parameters()], 0.01)
    precision = Precision(Accelerator(), torch.float32)
    return TrainState(model, ModelEMA(model), built, precision, EarlyStopping(10), Progress(torch.zeros(3)))


def train(state: TrainState[Any], steps: int) -> None:
    """Steps whose data come from the process-level generators, so that their state matters too."""
    for _ in range(steps):
        x = torch.rand(2, 3, 8, 8) * random.random() + float(np.random.rand())  # noqa: NPY002
        state.optimizer.zero_grad()
        state.model(x).square().mean().backward()
        state.optimizer.step()
        state.ema.update(state.model)
        state.progress.advance(1, torch.rand(3))
    state.stopper.update(state.progress.epoch, state.progress.step / 100)
    state.progress.class_maps = (random.random(), 0.5)


def full(state: TrainState[Any], **facts: Any) -> dict[str, Any]:
    return {
        **dump_state(state),
        **describe_metrics(None),
        **describe_run(state.model, {"epochs": 3, "freeze": [0]}, {"lr0": 0.01}, 64, "abc"),
        **facts,
    }


def assert_equal(a: Any, b: Any, where: str = "") -> None:
    if isinstance(a, Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b), where
    elif isinstance(a, dict):
        assert list(a) == list(b), where
        for key in a:
            assert_equal(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, (list, tuple)):
        assert type(a) is type(b) and len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_equal(x, y, f"{where}[{i}]")
    else:
        assert type(a) is type(b) and (a == b or a != a), where


def open_saver(folder: Path, state: TrainState[Any], **flags: Any) -> Saver:
    config = TrainConfig(epochs=9, **flags)
    context = RunContext(config, load_hyp("hyp.scratch-low.yaml"), World(), 64, 32, folder)
    return Saver(context, state, "abc", None, StopSignals(), StepFlags)
