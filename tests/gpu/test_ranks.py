"""Groups of ranks with the device's own backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tessera.commands import export
from tessera.utils.engine.step import RunningStatistics
from tessera.utils.ranks.ddp import DataParallel, SyncBatchNorm2d, average_statistics
from tessera.utils.ranks.world import Collectives, World
from tests.deploy.exporting.made import ANCHORED, checkpoint
from tests.gpu.conftest import TOLERANCE, Gate, made_trainer, pinned
from tests.system.jobs import train
from tests.system.launch import torchrun
from tests.system.test_distributed import PROGRAM, read
from tests.system.test_failure import fail, reports
from tests.system.test_val import VAL, printed_metrics
from tests.system.tiny import assert_same_checkpoint, flags, losses
from tests.utils.engine.trainer import made_batch


@pytest.fixture
def one_rank(gate: Gate) -> Iterator[World]:
    """The only rank of a process group with the device's backend; it sends what several ranks would."""
    accelerator = gate.accelerator
    accelerator.activate()
    dist.init_process_group(
        accelerator.backend, store=dist.HashStore(), rank=0, world_size=1, device_id=accelerator.group_device
    )
    collectives = Collectives()
    try:
        yield World(accelerator=accelerator, collectives=collectives)
    finally:
        collectives.close()
        dist.destroy_process_group()


def test_one_rank_sums_and_averages_with_the_devices_backend(gate: Gate, one_rank: World) -> None:
    accelerator, sizes = gate.accelerator, (3, 5)
    tensor = accelerator.send(torch.arange(3.0))
    norms = nn.Sequential(*map(nn.BatchNorm1d, sizes)).to(accelerator.device)
    one_rank.size = 2  # of which the other one is missing: sums are its own, and means half of that
    own = RunningStatistics(norms).own
    one_rank.sum(tensor)  # the first message sets up
    with gate.no_waiting():
        one_rank.collectives.all_reduce(tensor)
        later = one_rank.begin_sum(tensor)
        average_statistics(own, one_rank)
        summed = later()
    assert summed.tolist() == tensor.tolist() == [0, 1, 2]
    for norm, size in zip(norms, sizes, strict=True):
        assert norm.running_mean.tolist() == [0] * size and norm.running_var.tolist() == [0.5] * size
    model = nn.Linear(3, 1, bias=False).to(accelerator.device)
    wrapped = DataParallel(model, one_rank.collectives, 1)
    with gate.no_waiting():
        wrapped(tensor[None]).sum().backward()
    assert model.weight.grad is not None and model.weight.grad.tolist() == [[0, 1, 2]]


def test_shared_batch_norm_of_one_rank_trains_like_the_plain_one(gate: Gate, one_rank: World) -> None:
    """With the device's own parts, whose two messages a layer the host does not wait for."""
    trainers = [made_trainer(gate) for _ in range(2)]
    norms = [module for module in trainers[1].model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert norms
    for norm in norms:
        SyncBatchNorm2d.convert(norm, one_rank.collectives, gate.accelerator.batch_norm)
    for number in range(8):
        losses = []
        for trainer in trainers:
            for group in trainer.state.optimizer.param_groups:
                group["lr"] = 0.002
            batch = pinned(gate, made_batch(number % 4, images=8))
            with gate.no_waiting() if number > 2 else nullcontext():
                losses.append(trainer.step([batch], 1).losses)
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-4 if number < 3 else TOLERANCE, atol=1e-5)
    plain, shared = (trainer.model.state_dict() for trainer in trainers)
    for name in plain:
        if "running" in name:
            torch.testing.assert_close(shared[name], plain[name], rtol=TOLERANCE, atol=1e-3)


@pytest.fixture
def devices() -> str:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two CUDA devices, found {torch.cuda.device_count()}")
    return "0,1"


@pytest.mark.gpu
@pytest.mark.parametrize("more", [(), ("--sync-bn",), ("--compile",)])
def test_two_ranks(data: Path, tmp_path: Path, devices: str, more: tuple[str, ...]) -> None:
    outcome = train(tmp_path, 2, *flags(data, tmp_path, "--epochs", "1", "--device", devices, *more), timeout=900)
    assert outcome.code == 0, outcome.said
    assert losses(tmp_path / "exp").notna().all(axis=None)


@pytest.mark.gpu
def test_two_ranks_resume_with_the_bits_of_an_undisturbed_run(data: Path, tmp_path: Path, devices: str) -> None:
    args = flags(data, tmp_path, "--epochs", "2", "--deterministic", "--device", devices)
    for name, fault in (("whole", ""), ("again", ""), ("stopped", "1 step 2 SIGTERM")):
        outcome = train(tmp_path, 2, *args, "--name", name, fault=fault)
        assert (outcome.code != 0, outcome.err.count("Stopped as requested in epoch 0")) == (bool(fault), bool(fault))
    outcome = train(tmp_path, 2, "--resume", str(tmp_path / "stopped"), "--device", devices)
    assert outcome.code == 0, outcome.said
    for name in ("again", "stopped"):
        assert_same_checkpoint(*(tmp_path / run / "weights" / "last.pt" for run in (name, "whole")))


@pytest.mark.gpu
@pytest.mark.parametrize(("what", "reporter"), [("raise", "1"), ("kill", "0")])
def test_a_rank_that_fails_ends_the_other(data: Path, tmp_path: Path, devices: str, what: str, reporter: str) -> None:
    outcome = fail(data, tmp_path, f"1 step 2 {what}", "--device", devices)
    assert reports(outcome) == [reporter], outcome.said


@pytest.mark.gpu
def test_a_call_succeeds_after_one_that_failed(devices: str) -> None:
    lines = read(torchrun(PROGRAM, "messages", env={"DEVICE": devices}), "messages")
    assert [(line["sum"], line["later"]) for line in lines] == [(3, 10)] * 2


@pytest.mark.gpu
def test_an_exported_file_is_evaluated_on_two_ranks(data: Path, tmp_path: Path, devices: str) -> None:
    if "CUDAExecutionProvider" not in pytest.importorskip("onnxruntime").get_available_providers():
        pytest.skip("needs onnxruntime-gpu")
    (file,) = export.run(weights=str(checkpoint(tmp_path / "best.pt", ANCHORED)), include=["onnx"], device="cpu")
    args = f"--weights {file} --data {data} --device {devices} --project {tmp_path}".split()
    assert printed_metrics(torchrun(VAL, *args)) == printed_metrics(torchrun(VAL, *args, ranks=1))
