"""Impossible values in weights or their description: one message for every command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tessera.utils.checkpoints import format
from tessera.utils.checkpoints.format import load_any_checkpoint, save_checkpoint
from tessera.utils.checkpoints.weights import Weights, load_weights, save_safetensors
from tessera.utils.errors import UserError
from tessera.utils.ranks.world import World
from tessera.utils.runtime.open_model import open_exported, open_model
from tests.utils.exporting.made import ANCHORED, NAMES, checkpoint
from tests.utils.machine.stand_in import StandIn
from tests.utils.runtime.made_files import write_torchscript

NAN = float("nan")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("good") / "best.pt", ANCHORED)


def with_number(good: Path, path: Path, number: float) -> tuple[Path, str]:
    """The same with a number in a tensor, which is named too."""
    state = load_any_checkpoint(good)
    ema = {name: tensor.clone() for name, tensor in state["ema"].items()}
    name = [name for name, tensor in ema.items() if tensor.is_floating_point()][5]
    ema[name].view(-1)[-1] = number
    if path.suffix == ".pt":
        save_checkpoint(path, {**state, "ema": ema})
    else:
        save_safetensors(path, Weights(ema, state["model_yaml"], tuple(state["names"]), "best.pt"), {})
    return path, name


@pytest.mark.parametrize("number", [NAN, float("inf"), -float("inf")])
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_the_first_tensor_that_is_not_finite_is_named(good: Path, tmp_path: Path, suffix: str, number: float) -> None:
    if suffix == ".safetensors":
        pytest.importorskip("safetensors")
    path, name = with_number(good, tmp_path / f"bad{suffix}", number)
    with pytest.raises(UserError, match=rf"bad\{suffix}: damaged: '{name}' has values that are not finite"):
        load_weights(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"imgsz": 10**9}, "its size is 1000000000 pixels, expected 32 to 8192"),
        ({"imgsz": 0}, "its size is 0 pixels"),
        ({"names": ["x" * 300, "b", "c"]}, "names a class 'x.*, expected text of at most 200 letters"),
        ({"thresholds": {"confidence": NAN, "class_confidences": []}}, "its confidence is nan, expected 0 to 1"),
        ({"thresholds": {"confidence": 0.5, "class_confidences": [0.5, 7.0, 0.5]}}, "its confidence is 7, expected 0"),
        ({"thresholds": {"confidence": 0.5, "class_confidences": [0.5]}}, "1 confidence for 3 classes"),
    ],
    ids=str,
)
def test_impossible_descriptions(good: Path, tmp_path: Path, change: dict[str, Any], said: str) -> None:
    save_checkpoint(tmp_path / "bad.pt", {**load_any_checkpoint(good), **change})
    with pytest.raises(UserError, match=rf"bad\.pt: damaged: .*{said}"):
        load_weights(tmp_path / "bad.pt")


@pytest.mark.parametrize("key", ["format", "trained_imgsz", "names"])
def test_a_header_of_any_length_is_a_short_message(good: Path, tmp_path: Path, key: str) -> None:
    module = pytest.importorskip("safetensors.torch")
    save_safetensors(tmp_path / "good.safetensors", load_weights(good), {})
    with module.safe_open(tmp_path / "good.safetensors", "pt") as file:
        described = {**file.metadata(), key: f'"{"x" * 100_000}"'}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    module.save_file(tensors, tmp_path / "bad.safetensors", described)
    with pytest.raises(UserError, match=r"bad\.safetensors: ") as caught:
        load_weights(tmp_path / "bad.safetensors")
    assert len(str(caught.value)) < 700


def test_memory_that_ends_while_a_model_is_opened(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_weights(good).names == NAMES

    def no_memory_there(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    def no_memory_here(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("tessera.utils.runtime.checkpoint.fused_copy", no_memory_there)
    with pytest.raises(UserError, match=r"out of memory on stand-in: the model of best\.pt .*Use a smaller model"):
        open_model(str(good), World(accelerator=StandIn()))
    monkeypatch.setattr(format, "read_archive", no_memory_here)
    with pytest.raises(UserError, match=r"out of memory on cpu: the model of .*best\.pt.*Use a smaller model"):
        load_weights(good)


def test_exhausted_device_memory_is_not_reported_as_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_torchscript(tmp_path / "best.torchscript")

    def exhausted(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(torch.jit, "load", exhausted)
    with pytest.raises(UserError, match=r"out of memory on stand-in: the model of .*best\.torchscript"):
        open_exported(path, StandIn(), trust_file=True)
