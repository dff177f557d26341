"""Fixtures of device tests, which run on the stand-in, and on CUDA with `make gpu`.

On the stand-in they are in the default suite; for heads that share `DetectFree`'s loss, in the slow one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
import yaml

import tessera.utils.ranks.launch
from tessera.commands import train
from tessera.utils.engine.step import TrainStep
from tessera.utils.machine.accelerator import Accelerator, Cuda
from tessera.utils.types import Batch, Metrics
from tests.system.tiny import make_data
from tests.utils.engine.trainer import FREE, TINY, YOLOV9, YOLOX, Trainer
from tests.utils.machine.stand_in import StandIn

# torch reads it once, at its first use of cuBLAS, which may come before the case that needs it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

TOLERANCE = 0.02  # of a loss after 20 steps: each step multiplies a difference in the last digit
HEADS = {  # on the stand-in, on CUDA
    "Detect": (TINY, "yolov5n.yaml"),
    "DetectFree": (FREE, "tessera-n.yaml"),
    "DetectYOLOX": (YOLOX, "yolox-tiny.yaml"),
    "DetectYOLOv9": (YOLOV9, "yolov9-t.yaml"),
}
each_head = pytest.mark.parametrize(
    "head",
    [pytest.param(head, marks=pytest.mark.slow if head in ("DetectYOLOX", "DetectYOLOv9") else ()) for head in HEADS],
)
STEPS = 3  # of an epoch of the small dataset, with 8 images a batch


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr == "gpu" and not torch.cuda.is_available():
        raise pytest.UsageError(
            f"make gpu: torch {torch.__version__} finds no CUDA device; make gpu-stand-in needs none."
        )


@contextmanager
def cuda_without_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Gate:
    """A kind of device under test; `current` is the device of the running training, `steps` counts its steps.

    `before_step` is called before each step with the number of previous ones.
    """

    def __init__(self, accelerator: Accelerator, data: Path, project: Path) -> None:
        self.accelerator = self.current = accelerator
        self.data, self.project = data, project
        self.steps = 0
        self.before_step: Callable[[int], None] = lambda step: None

    @property
    def is_stand_in(self) -> bool:
        return isinstance(self.accelerator, StandIn)

    def no_waiting(self) -> AbstractContextManager[None]:
        return nullcontext() if self.is_stand_in else cuda_without_waiting()

    def train(
        self, name: str, *, head: str = "Detect", on_cpu: bool = False, large: bool = False, **flags: Any
    ) -> Metrics | None:
        """Train a small model in this process; `large` on CUDA: size n at 320 px, with crowded batches from workers."""
        small, real = HEADS[head]
        cfg = self.project / f"{head}.yaml"
        cfg.write_text(yaml.safe_dump({**small, "nc": 3}))
        common: dict[str, Any] = {
            "data": str(self.data),
            "cfg": str(cfg),
            "imgsz": 64,
            "batch_size": 8,
            "epochs": 2,
            "workers": 0,
            "noplots": True,
            "loggers": "none",
            "amp": "off",
            "project": str(self.project),
            "name": name,
        }
        if large and not self.is_stand_in:
            data = make_data(self.data.parent / "large", train=32 * STEPS, val=32, size=320)
            common |= {"data": str(data), "cfg": real, "imgsz": 320, "batch_size": 32, "workers": 2}
        given = flags if "resume" in flags else {**common, **flags}
        self.steps = 0
        self.current = Accelerator() if on_cpu else self.accelerator
        try:
            return train.run(device="cpu" if on_cpu else self.device_flag, **given)
        finally:
            self.current = self.accelerator

    @property
    def device_flag(self) -> str:
        return "" if self.is_stand_in else "0"

    def folder(self, name: str) -> Path:
        return self.project / name


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 images to train on, 8 to validate."""
    return make_data(tmp_path_factory.mktemp("data"), train=8 * STEPS, val=8)


@pytest.fixture(params=["stand-in", pytest.param("cuda", marks=pytest.mark.gpu)])
def gate(request: pytest.FixtureRequest, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """A device of each kind; a step that waits for CUDA fails."""
    with ExitStack() as stack:
        accelerator: Accelerator = Cuda(torch.device("cuda", 0))
        if request.param == "stand-in":
            accelerator = stack.enter_context(StandIn())
            monkeypatch.setattr(tessera.utils.ranks.launch, "choose_accelerator", lambda device, launch: gate.current)
        stack.enter_context(accelerator.full_float32())
        gate = Gate(accelerator, data, tmp_path)
        step, made = TrainStep.__call__, WeakKeyDictionary[TrainStep, int]()

        def watched(self: TrainStep, *args: Any) -> Any:
            gate.before_step(gate.steps)
            gate.steps += 1
            made[self] = made.get(self, 0) + 1
            watch = gate.current is gate.accelerator and made[self] > 3  # the first ones set up
            with gate.no_waiting() if watch else nullcontext():
                return step(self, *args)

        monkeypatch.setattr(TrainStep, "__call__", watched)
        yield gate


def pinned(gate: Gate, batch: Batch) -> Batch:
    return batch.pin_memory() if gate.accelerator.pins_memory else batch


def made_trainer(
    gate: Gate, dtype: torch.dtype = torch.float32, optimizer: str = "SGD", head: str = "Detect"
) -> Trainer:
    small, real = HEADS[head]
    return Trainer(gate.accelerator, dtype, optimizer, cfg=small if gate.is_stand_in else real)
