"""Whole trainings on a device with a queue: stopped, resumed, diverged, and at the end of its memory."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from tessera.commands import val
from tessera.models.detector import DetectionModel
from tessera.utils.errors import Diverged, Interrupted, UserError
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.training import setup, validation
from tests.gpu.conftest import STEPS, Gate, each_head
from tests.system.tiny import losses, tensors
from tests.utils.machine.stand_in import StandIn

pytestmark = pytest.mark.slow


def last(gate: Gate, name: str) -> dict[str, Any]:
    return torch.load(gate.folder(name) / "weights" / "last.pt", weights_only=True)


def difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    mine, theirs = tensors(one["model"]), tensors(other["model"])
    return max(float((mine[name].double() - theirs[name].double()).abs().max()) for name in mine)


@each_head
def test_a_training_is_that_of_the_cpu(gate: Gate, head: str) -> None:
    found = gate.train("device", head=head)
    assert gate.steps == 2 * STEPS and found is not None
    expected = gate.train("cpu", head=head, on_cpu=True)
    assert expected is not None
    tolerance = 0.0 if gate.is_stand_in else 0.02
    difference = (losses(gate.folder("device")) / losses(gate.folder("cpu")) - 1).abs().to_numpy().max()
    assert difference <= tolerance
    assert last(gate, "device")["ema_updates"] == last(gate, "cpu")["ema_updates"] == 2 * STEPS
    assert abs(found.map - expected.map) <= 1e-3


def test_a_validation_is_that_of_the_cpu(gate: Gate) -> None:
    gate.train("run", epochs=1)
    found = []
    for on_cpu in (False, True):
        weights = str(gate.folder("run") / "weights" / "last.pt")
        flags = {"weights": weights, "data": str(gate.data), "imgsz": 64, "workers": 0, "project": str(gate.project)}
        gate.current = Accelerator() if on_cpu else gate.accelerator
        found.append(val.run(device="cpu" if on_cpu else gate.device_flag, **flags))
    assert abs(found[0].map50 - found[1].map50) <= 1e-4 and abs(found[0].map - found[1].map) <= 1e-4


@pytest.mark.parametrize("save_steps", [0, 1])
def test_a_stop_arrives_a_step_late_and_the_run_resumes_where_it_was(gate: Gate, save_steps: int) -> None:
    """A save reads the flags of its own step, and with them the request to stop."""

    def stop(step: int) -> None:
        if step == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    gate.train("whole", deterministic=True)
    gate.before_step = stop
    with pytest.raises(Interrupted):
        gate.train("stopped", deterministic=True, save_steps=save_steps)
    gate.before_step = lambda step: None
    assert last(gate, "stopped")["step"] == gate.steps == 3 - save_steps
    gate.train("stopped", resume=str(gate.folder("stopped") / "weights" / "last.pt"))
    whole, resumed = last(gate, "whole"), last(gate, "stopped")
    assert resumed["step"] == whole["step"] == 2 * STEPS
    assert difference(whole, resumed) == 0.0
    assert losses(gate.folder("stopped")).equals(losses(gate.folder("whole")))


def test_a_resume_from_the_end_of_an_epoch_is_exact(gate: Gate) -> None:
    for name in ("whole", "stopped"):
        gate.train(name, epochs=3, save_period=1, deterministic=True, optimizer="AdamW")
    weights = gate.folder("stopped") / "weights"
    (weights / "epoch0.pt").rename(weights / "last.pt")
    gate.train("stopped", resume=str(weights / "last.pt"), epochs=3)
    assert difference(last(gate, "whole"), last(gate, "stopped")) == 0.0


def test_a_run_that_is_not_finite_ends_though_its_epochs_are_short(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags are read when a checkpoint is written, and the first step after it has none to read."""
    forward = DetectionModel.forward

    def spoiled(self: DetectionModel, images: Tensor) -> Any:
        return forward(self, images * float("nan") if self.training else images)

    monkeypatch.setattr(DetectionModel, "forward", spoiled)
    with pytest.raises(Diverged, match=r"step 10 \(epoch 3, batch \d\).*10 steps in a row.*images: .*jpg"):
        gate.train("lost", epochs=9, noval=True)
    assert gate.steps <= 11


def test_exhausted_memory_is_explained(gate: Gate) -> None:
    limit(gate, 2 * 2**20)
    with pytest.raises(UserError, match=r"a batch of 24 images a rank at 96 px.* free\. Give a smaller --batch-size"):
        gate.train("large", batch_size=24, imgsz=96)


@pytest.mark.parametrize(
    ("part", "work"),
    [
        ("choose_precision", "the model at 64 px, before its first batch"),
        ("build_optimizer", "a batch of 8 images a rank at 64 px"),
        ("ModelEMA", "a batch of 8 images a rank at 64 px"),
    ],
)
def test_memory_that_ends_before_the_first_step_is_explained(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, part: str, work: str
) -> None:
    """The device has no memory for a second copy of the model."""
    make = getattr(setup, part)

    def tight(*args: Any, **kwargs: Any) -> Any:
        limit(gate, 2**20)
        kept = [p.detach().clone() for p in args[2 if part == "choose_precision" else 0].parameters()]
        return make(*args, **kwargs), kept

    monkeypatch.setattr(setup, part, tight)
    with pytest.raises(UserError, match=rf"out of memory on .*: {work}.* free\. Give a smaller --batch-size"):
        gate.train("tight", cfg="yolov5n.yaml", optimizer="AdamW")
    assert not gate.folder("tight").exists()


def test_memory_that_ends_in_a_validation_is_explained(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = validation.fused_copy
    monkeypatch.setattr(validation, "fused_copy", lambda *args: limit(gate, 0) or copied(*args))
    with pytest.raises(UserError, match=r": a validation batch of 16 images a rank at 64 px.*smaller --batch-size"):
        gate.train("full", epochs=1)


def limit(gate: Gate, more: int) -> None:
    if isinstance(gate.accelerator, StandIn):
        gate.accelerator.capacity = gate.accelerator.allocated_memory() + more
    else:
        torch.cuda.empty_cache()
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + more) / total)


@pytest.fixture(autouse=True)
def unlimited() -> Any:
    yield
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_autobatch_and_a_run_at_its_batch(gate: Gate) -> None:
    if isinstance(gate.accelerator, StandIn):
        limit(gate, 8 * 2**20)
    gate.train("auto", batch_size=-1, epochs=1, multi_scale=True)
    batch = yaml.safe_load((gate.folder("auto") / "opt.yaml").read_text())["batch_size"]
    assert 1 <= batch <= 24 and last(gate, "auto")["epoch"] == 1


@each_head
def test_deterministic_twice_equal(gate: Gate, head: str) -> None:
    for name in ("one", "two"):
        gate.train(name, head=head, deterministic=True, large=True)
    assert difference(last(gate, "one"), last(gate, "two")) == 0.0


@pytest.mark.parametrize(
    "flags",
    [
        {"sync_bn": True, "multi_scale": True},  # the former is nothing to a single rank
        pytest.param({"compile": True}, marks=pytest.mark.gpu),
        pytest.param({"compile": True, "multi_scale": True}, marks=pytest.mark.gpu),
    ],
)
def test_other_ways_to_train(gate: Gate, flags: dict[str, bool]) -> None:
    gate.train("other", large=True, **flags)
    assert losses(gate.folder("other")).notna().all(axis=None)
