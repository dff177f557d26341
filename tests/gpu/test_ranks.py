"""Groups of ranks with the device's own backend."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.gpu.conftest import Gate
from tests.system.jobs import train
from tests.system.tiny import flags, losses
from utils.machine.cuda import Cuda


def test_one_rank_sums_and_averages_with_the_devices_backend(gate: Gate) -> None:
    accelerator = gate.accelerator
    accelerator.activate()
    dist.init_process_group(
        accelerator.backend, store=dist.HashStore(), rank=0, world_size=1, device_id=accelerator.group_device
    )
    try:
        tensor = accelerator.send(torch.arange(3.0))
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        assert tensor.tolist() == [0, 1, 2]
        model = nn.Linear(3, 1, bias=False).to(accelerator.device)
        wrapped = DistributedDataParallel(model, device_ids=accelerator.device_ids, gradient_as_bucket_view=True)
        wrapped(tensor[None]).sum().backward()
        assert model.weight.grad is not None and model.weight.grad.tolist() == [[0, 1, 2]]
    finally:
        dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.parametrize("more", [(), ("--sync-bn",)])
def test_two_ranks(data: Path, tmp_path: Path, more: tuple[str, ...]) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two CUDA devices, found {torch.cuda.device_count()} on {Cuda().name}; {sys.platform}")
    words = list(flags(data, tmp_path, "--epochs", "1", "--amp", "off", *more))
    words[words.index("--device") + 1] = "0,1"
    outcome = train(tmp_path, 2, *words)
    assert outcome.code == 0, outcome.said
    assert losses(tmp_path / "exp").notna().all(axis=None)
