"""Checkpoints that are cut."""

from __future__ import annotations

import functools
import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from models.detector import DetectionModel
from tests.hostile.expect import Message, message_or_result
from utils.checkpoints.description import describe_run
from utils.checkpoints.resume import resume
from utils.checkpoints.state import dump_state
from utils.checkpoints.weights import load_weights
from utils.config import TrainConfig, load_hyp
from utils.engine.ema import ModelEMA
from utils.engine.optimizer import build_optimizer
from utils.engine.precision import Precision
from utils.engine.state import Progress, TrainState
from utils.engine.stopping import EarlyStopping
from utils.machine.accelerator import Accelerator
from utils.ranks.world import World

CASES, FAST_CASES = 4000, 60

NAMES = ("circle", "square")
ARCHITECTURE = {
    "nc": 2,
    "anchors": [[10, 13, 16, 30]],
    "backbone": [[-1, 1, "Conv", [8, 3, 8]]],
    "head": [[[0], 1, "Detect", ["nc", "anchors"]]],
}
HYP = "hyp.scratch-low.yaml"


def prepare() -> None:
    """Make the whole checkpoint once, before the first case is forked."""
    whole()


def trial(rng: random.Random, folder: Path) -> str:
    """Damage a checkpoint in one way, then resume from it and take its weights."""
    damage = rng.choice([*_DAMAGES])
    path = folder / "weights" / "last.pt"
    path.parent.mkdir()
    path.write_bytes(_DAMAGES[damage](rng))
    used = message_or_result(lambda: take_weights(path)), message_or_result(lambda: continue_run(path))
    if damage in _ALWAYS_FOUND:
        assert all(isinstance(result, Message) for result in used), f"{damage}: loaded without a word"
    return damage


def take_weights(path: Path) -> str:
    """What val.py does with a checkpoint."""
    weights = load_weights(path)
    model = DetectionModel(weights.model_yaml, names=weights.names or None)
    model.load_state_dict(weights.state_dict)
    return weights.source


def continue_run(path: Path) -> int:
    """What train.py --resume does with a checkpoint, up to the first step."""
    config, hyp, resumed = resume({"resume": str(path)}, World())
    resumed.check_classes(NAMES, config)
    state = made_state(DetectionModel(resumed.checkpoint["model_yaml"], names=NAMES), config, hyp)
    resumed.restore(state, config, "hash", World())
    return state.progress.step


def made_state(model: DetectionModel, config: TrainConfig, hyp: Any) -> TrainState[DetectionModel]:
    """A run that has taken no step."""
    optimizer = build_optimizer(model, config.optimizer, hyp, config.batch_size)
    precision, progress = Precision(Accelerator(), torch.float32), Progress(torch.zeros(3))
    return TrainState(model, ModelEMA(model), optimizer, precision, EarlyStopping(config.patience), progress)


@functools.cache
def content() -> dict[str, Any]:
    """A checkpoint of a small detector after a step."""
    torch.manual_seed(0)
    config, hyp = TrainConfig(epochs=3), load_hyp(HYP)
    state = made_state(DetectionModel(ARCHITECTURE, names=NAMES), config, hyp)
    for parameter in state.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state.optimizer.step()
    state.progress.advance(1, torch.ones(3))
    state.progress.class_maps = (0.5, 0.25)
    return {**dump_state(state), **describe_run(state.model, config.as_dict(), hyp.as_dict(), "hash")}


@functools.cache
def whole() -> bytes:
    """The same as a file's bytes."""
    file = io.BytesIO()
    torch.save(content(), file)
    return file.getvalue()


def _cut(rng: random.Random) -> bytes:
    return whole()[: rng.randrange(len(whole()))]


_DAMAGES: dict[str, Callable[[random.Random], bytes]] = {
    "cut": _cut,
}
_ALWAYS_FOUND = frozenset({"cut"})
