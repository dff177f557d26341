"""Hostile checkpoints: truncated, flipped, repacked, or with other values."""

from __future__ import annotations

import copy
import functools
import io
import random
import zipfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from tessera.models.detector import DetectionModel
from tessera.utils.checkpoints.format import WEIGHTS_KEYS, load_any_checkpoint
from tessera.utils.checkpoints.provenance import describe_metrics, describe_run
from tessera.utils.checkpoints.training_state import dump_state
from tessera.utils.checkpoints.weights import load_weights, model_of_weights
from tessera.utils.config import TrainConfig, load_hyp
from tessera.utils.engine.optimizer import build_optimizer
from tessera.utils.engine.precision import Precision
from tessera.utils.engine.state import EarlyStopping, ModelEMA, Progress, TrainState
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.ranks.world import World
from tessera.utils.training.resume_target import resume_target
from tests.hostile.damages import cut, flipped, left_out, named, pickle_changed, repacked
from tests.hostile.expect import Message, message_or_result
from tests.utils.checkpoints.made_state import assert_equal

CASES, FAST_CASES = 3000, 30

NAMES = ("circle", "square")
ARCHITECTURE = {
    "nc": 2,
    "anchors": [[10, 13, 16, 30]],
    "backbone": [[-1, 1, "Conv", [8, 3, 8]]],
    "head": [[[0], 1, "Detect", ["nc", "anchors"]]],
}
HYP = "hyp.scratch-low.yaml"


def prepare() -> None:
    whole()


def trial(rng: random.Random, folder: Path) -> str:
    damage = rng.choice([*_OF_BYTES, *_MADE])
    path = folder / "weights" / "last.pt"
    path.parent.mkdir()
    path.write_bytes(_OF_BYTES[damage](rng, whole()) if damage in _OF_BYTES else _MADE[damage](rng))
    used = message_or_result(lambda: take_weights(path)), message_or_result(lambda: continue_run(path))
    assert damage != "weights alone" or isinstance(used[1], Message), "a run resumed without a state"
    if damage in _ALWAYS_FOUND:
        assert all(isinstance(result, Message) for result in used), f"{damage}: loaded, and nothing was reported"
    if damage == "flipped" and not isinstance(used[0], Message):  # in a name's padding or a date, which nobody reads
        assert_equal(content(), load_any_checkpoint(path))
    return damage


def take_weights(path: Path) -> str:
    weights = load_weights(path)
    model_of_weights(weights, str(path))
    return weights.source


def continue_run(path: Path) -> int:
    with ExitStack() as stack:
        begun = resume_target({"resume": str(path)}, World(), stack)
    assert begun and begun.hyp and begun.resumed
    config, hyp, resumed = begun.config, begun.hyp, begun.resumed
    resumed.check_classes(NAMES, config)
    state = made_state(DetectionModel(resumed.checkpoint["model_yaml"], names=NAMES), config, hyp)
    resumed.restore(state, config, 40, "hash", World())
    return state.progress.step


def made_state(model: DetectionModel, config: TrainConfig, hyp: Any) -> TrainState[DetectionModel]:
    optimizer = build_optimizer(model, config.optimizer or hyp.optimizer, hyp, config.batch_size)
    precision, progress = Precision(Accelerator(), torch.float32), Progress(torch.zeros(3))
    return TrainState(model, ModelEMA(model), optimizer, precision, EarlyStopping(config.patience), progress)


@functools.cache
def content() -> dict[str, Any]:
    torch.manual_seed(0)
    config, hyp = TrainConfig(epochs=3), load_hyp(HYP)
    state = made_state(DetectionModel(ARCHITECTURE, names=NAMES), config, hyp)
    for parameter in state.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state.optimizer.step()
    state.progress.advance(1, torch.ones(3))
    state.progress.class_maps = (0.5, 0.25)
    described = describe_run(state.model, config.as_dict(), hyp.as_dict(), 64, "hash")
    return {**dump_state(state), **describe_metrics(None), **described}


@functools.cache
def whole() -> bytes:
    return file_of(content())


def file_of(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def _compressed(rng: random.Random) -> bytes:
    packing = rng.choice([zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
    with zipfile.ZipFile(io.BytesIO(whole())) as source:
        names = source.namelist()
    packed = rng.sample(names, rng.randint(1, len(names)))
    return repacked(whole(), lambda _, content: content, lambda name: packing if name in packed else zipfile.ZIP_STORED)


def _directory_changed(rng: random.Random) -> bytes:
    archive = bytearray(repacked(whole(), lambda _, content: content))
    start = archive.index(b"PK\x01\x02")
    for _ in range(rng.randint(1, 6)):
        archive[rng.randrange(start, len(archive))] = rng.choice([0, 1, 255, rng.randrange(256)])
    return bytes(archive)


def _bomb(rng: random.Random) -> bytes:
    """Values that nest without end, unfold to more than all memory, or ask for storages of any size."""
    deep, doubling = b"N" + b"\x85" * 200_000, b"]q\x000" + b"](h\x00h\x00eq\x000" * 60 + b"h\x00"
    numel = rng.choice([10**12, 2**31, 2**62, 5])
    tensor = (
        b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpu"
        + b"L%dL\ntQK\0(L%dL\nt(K\x01t\x89ccollections\nOrderedDict\n)RtR" % (numel, numel)
    )
    key = b"X\x05\0\0\0epoch"
    hostile = rng.choice(
        [b"}" + deep + b"Ns.", b"}" + key + deep + b"s.", b"}" + key + doubling + b"s.", b"}" + key + tensor + b"s."]
    )
    return repacked(whole(), lambda name, content: b"\x80\x02" + hostile if name.endswith("data.pkl") else content)


def _newer_version(rng: random.Random) -> bytes:
    state = copy.deepcopy(content())
    state["config"][rng.choice(["sharpness", "x\x1b[31m", "y" * 5000])] = rng.choice(_OTHERS)()
    state["version"] += rng.randint(0, 1)
    return file_of(state)


_OTHERS: tuple[Callable[[], Any], ...] = (
    *(lambda: None, lambda: True, lambda: -1, lambda: 0, lambda: 10**30, lambda: 10**6, lambda: -0.5),
    lambda: float("nan"),
    *(lambda: "", lambda: "text\x1b[31m", list, lambda: [[1], "a"], dict, lambda: {"a": 1}, lambda: ()),
    *(lambda: torch.zeros(3), lambda: torch.zeros(0), lambda: torch.tensor(5)),
    lambda: torch.zeros(2, 2, dtype=torch.bool),
)


def _weights_alone(rng: random.Random) -> bytes:
    """A best.pt under the name of a whole checkpoint, with another value here and there."""
    weights = {key: content()[key] for key in WEIGHTS_KEYS}
    return file_of(_confuse(rng, weights) if rng.random() < 0.5 else weights)


def _confuse(rng: random.Random, original: Any) -> Any:
    state = copy.deepcopy(original)
    holder: Any = state
    key: Any = rng.choice([*state])
    while isinstance(holder[key], (dict, list)) and holder[key] and rng.random() < 0.8:
        holder = holder[key]
        key = rng.choice([*holder]) if isinstance(holder, dict) else rng.randrange(len(holder))
    holder[key] = rng.choice(_OTHERS)()
    return state


_OF_BYTES = named(flipped, cut, left_out, pickle_changed)
_MADE = {
    **named(_compressed, _directory_changed, _bomb, _weights_alone, _newer_version),
    "confused value": lambda rng: file_of(_confuse(rng, content())),
}
_ALWAYS_FOUND = frozenset({"cut", "left out", "compressed", "bomb"})
