"""Training, validation and detection on a CUDA device that is not there: types, devices, and no wait of the host."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from tessera.deploy.inference.detector import Detector
from tessera.models.heads.criterion import LossSettings
from tessera.models.layers.blocks import concat
from tessera.models.model_yaml import MODELS_DIR
from tessera.models.nms import NmsSettings, non_max_suppression, select_candidates
from tessera.utils.engine.precision import Precision
from tessera.utils.engine.step import TrainStep
from tessera.utils.evaluation.evaluate import Settings, ShardEvaluation
from tessera.utils.evaluation.network import fused_copy, network_of
from tessera.utils.machine.accelerator import BatchNormParts, FusedBatchNormParts
from tessera.utils.ranks.ddp import SyncBatchNorm2d
from tessera.utils.ranks.world import Collectives
from tessera.utils.training.autobatch import synthetic_batch, synthetic_index
from tests.gpu.conftest import HEADS as SHARED_HEADS
from tests.utils.engine.trainer import FREE, SIZE, Trainer, made_batch
from tests.utils.machine.fake_cuda import FakeCuda

HALVES = (torch.float16, torch.bfloat16)
HEADS: dict[str, Any] = {
    **{name: small for name, (small, _) in SHARED_HEADS.items()},
    "one-to-one": {**FREE, "head": [[[2], 1, "DetectFree", ["nc", 16, 1, True]]]},
}
each_head = pytest.mark.parametrize("head", HEADS)
MODELS = sorted(path.stem for path in MODELS_DIR.glob("*.yaml"))
# A model of each kind of blocks; those of YOLOv9 are in HEADS too. Sizes differ in repeats and channels: they are slow.
DEFAULT = ("tessera-n", "yolov5n")
TARGETS = torch.tensor([[0, 0, 8, 8, 40, 50], [1, 1, 2, 2, 60, 60], [1, -1, 0, 0, 30, 30]]).float()


@pytest.fixture
def device() -> Iterator[FakeCuda]:
    with FakeCuda() as device:
        yield device


def step(device: FakeCuda, trainer: Trainer, *targets: Tensor) -> None:
    """Take a step without a wait, but for the first, in which constants are copied to the device."""
    batches = [replace(made_batch(0), targets=rows).pin_memory() for rows in targets or (TARGETS,)]
    with device.no_waiting() if trainer.state.progress.step else nullcontext():
        losses = trainer.step(device.prefetch(batches), len(batches)).losses
    assert (losses.device, losses.dtype) == (device.device, torch.float32)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=() if name in DEFAULT else pytest.mark.slow)
        for name, dtype in zip(MODELS, itertools.cycle(HALVES), strict=False)
    ],
)
def test_every_model_trains_and_predicts(device: FakeCuda, name: str, dtype: torch.dtype) -> None:
    trainer, learnt = Trainer(device, dtype, cfg=name), set[Tensor]()
    parameters = {p for p in trainer.model.parameters() if p.register_post_accumulate_grad_hook(learnt.add)}
    step(device, trainer)
    assert learnt == parameters
    model, images = trainer.state.ema.model, torch.zeros(2, 3, SIZE, SIZE, device=device.device)
    rules = NmsSettings(0.001, 0.6, has_objectness=model.head.has_objectness)
    with torch.no_grad(), device.no_waiting():
        with trainer.state.precision.autocast():
            decoded, raw = model(images)
        candidates = select_candidates(decoded, rules)
    rows = sum(model.head.rows_per_level((SIZE, SIZE)))
    assert decoded.shape == (2, rows, 4 + model.head.has_objectness + model.nc) and decoded.device == device.device
    assert candidates.shape == (2, rows * model.nc, 6) and candidates.device == device.device
    assert decoded.dtype == candidates.dtype == torch.float32 and {x.dtype for x in raw} == {dtype}
    with pytest.raises(DynamicOutputShapeException):  # on the device NMS reads; a validation runs it on the host
        non_max_suppression(decoded, rules)


@each_head
@pytest.mark.parametrize(("dtype", "optimizer", "multi_scale"), [(HALVES[0], "SGD", False), (HALVES[1], "Muon", True)])
def test_a_step_waits_for_nothing(
    device: FakeCuda, head: str, dtype: torch.dtype, optimizer: str, multi_scale: bool
) -> None:
    """With class weights, ignored regions, the focal loss, two batches a step, and batches without objects.

    Once with deterministic kernels.
    """
    trainer = Trainer(device, dtype, optimizer, HEADS[head], fl_gamma=1.5, obj_pw=2.0, cls_pw=2.0)
    weights = device.send(torch.tensor([0.5, 2.0]))
    criterion = trainer.model.head.criterion(LossSettings.of(trainer.context.hyp, imgsz=SIZE, class_weights=weights))
    context = replace(trainer.context, config=replace(trainer.context.config, multi_scale=multi_scale))
    trainer.step = TrainStep(trainer.model, trainer.state, criterion, context)
    with device.deterministic_kernels(multi_scale):
        step(device, trainer)
        step(device, trainer, TARGETS, TARGETS[:0])
    slots = [value for state in trainer.state.optimizer.state.values() for value in state.values()]
    average = trainer.state.ema.model.state_dict().values()
    assert {tensor.device for tensor in (*slots, *average)} == {device.device}
    assert {tensor.dtype for tensor in slots} == {torch.float32}


def test_muon_continues_where_torch_leaves_numbers_of_steps_on_the_host(device: FakeCuda) -> None:
    trainer = Trainer(device, HALVES[1], "Muon")
    step(device, trainer)
    optimizer = trainer.state.optimizer
    saved = optimizer.state_dict()
    states = {place: {**state, "step": state["step"].cpu()} for place, state in saved["state"].items()}
    groups = [{**group, "fused": False} for group in saved["param_groups"]]
    optimizer.load_state_dict({"state": states, "param_groups": groups})
    for parameter in trainer.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # which refused numbers of steps on another device than the weights


@pytest.mark.parametrize("parts", [FusedBatchNormParts(), BatchNormParts(), BatchNormParts(torch.float32)])
def test_shared_statistics_take_two_messages_a_layer(device: FakeCuda, parts: BatchNormParts) -> None:
    class Counting(Collectives):
        messages = 0

        def all_reduce(self, tensor: Tensor) -> Tensor:
            self.messages += 1
            return tensor

    collectives = Counting()
    trainer = Trainer(device, torch.float16, cfg=FREE)
    norms = [module for module in trainer.model.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        SyncBatchNorm2d.convert(norm, collectives, parts)
    step(device, trainer)
    step(device, trainer)
    assert collectives.messages == 2 * 2 * len(norms) > 0


@each_head
def test_a_prediction_reads_one_copy(device: FakeCuda, head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A validation one a batch, and a detector one an image."""
    trainer = Trainer(device, cfg=HEADS[head])
    fused, index = fused_copy(trainer.model, device), synthetic_index(2, SIZE, ("a", "b"))
    read_back, copies = device.read_back, []
    monkeypatch.setattr(device, "read_back", lambda tensor: copies.append(tensor.shape) or read_back(tensor))
    for dtype in (torch.float32, torch.float16):  # in the first, constants are copied to the device
        network = network_of(fused, SIZE, device, Precision(device, dtype))
        evaluation = ShardEvaluation(network, index, trainer.context.world, Settings(), trainer.step._criterion)
        batches = device.prefetch(synthetic_batch(2, SIZE).pin_memory() for _ in range(2))
        with device.no_waiting() if copies else nullcontext():
            evaluation.add(batches)
        assert len(evaluation.matches) == 4 and evaluation.meter is not None and not np.any(evaluation.meter.total())
    assert len(copies) == 4
    opened = network_of(fused, SIZE, device, Precision(device, torch.float16), augment=True)
    with device.no_waiting():
        assert opened(torch.zeros(1, 3, SIZE, SIZE, device=device.device)).dtype == torch.float32
    (found,) = Detector(opened, classes=["a"])(np.zeros((50, 70, 3), np.uint8))
    assert len(found.boxes_xyxy) == 0 and found.names == ("a", "b")


@pytest.mark.parametrize(
    "read",
    [
        lambda value, host: value.sum().item(),
        lambda value, host: value.nonzero(),
        lambda value, host: value[value > 0],
        lambda value, host: torch.equal(value, value),
        lambda value, host: value.cpu(),
        lambda value, host: value.to("cpu", non_blocking=True),  # into memory that is not page-locked
        lambda value, host: host.to(value.device, non_blocking=True),
        lambda value, host: value.copy_(host.pin_memory()),
        lambda value, host: value.index_put_((value.long(),), value, accumulate=True),  # looks for the largest index
        lambda value, host: value + host,
        lambda value, host: value[host.long()],
        lambda value, host: concat([value.half().requires_grad_(), value], 0).sum().backward(),  # of another type
    ],
)
def test_the_device_refuses_to_be_read(device: FakeCuda, read: Callable[[Tensor, Tensor], object]) -> None:
    value, host = device.send(torch.ones(3)), torch.ones(3)
    with device.no_waiting():
        assert host.sum().item() == 3 and device.read_back(value * 2 + value.mean())().tolist() == [0, 0, 0]
        with pytest.raises((RuntimeError, AssertionError, DataDependentOutputException, DynamicOutputShapeException)):
            read(value, host)
