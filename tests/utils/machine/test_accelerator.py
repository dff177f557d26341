"""Accelerators: choice, copies, exhausted memory, kernels, as far as a machine without a GPU can test them."""

from __future__ import annotations

import os
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tessera.models.heads.criterion import LossSettings
from tessera.models.layers.blocks import Conv
from tessera.models.nms import NmsSettings, non_max_suppression
from tessera.utils.environment import Launch
from tessera.utils.errors import ConfigError, UserError
from tessera.utils.machine.accelerator import Accelerator, Cuda, Metal, choose_accelerator, explain_out_of_memory
from tests.utils.engine.trainer import made_batch
from tests.utils.machine.stand_in import StandIn


def test_nccl_is_configured_unless_the_user_has_done_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(os, "environ", environment := {"TORCH_NCCL_USE_COMM_NONBLOCKING": "1"})
    Cuda(torch.device("cuda", 0)).activate()
    names = ("TORCH_NCCL_DUMP_ON_TIMEOUT", "NCCL_NVLS_ENABLE", "TORCH_NCCL_USE_COMM_NONBLOCKING")
    assert [environment[name] for name in names] == ["0", "0", "1"]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("NCCL error in: a.cpp:9\nLast error:\nFailed to CUDA calloc async 4096 bytes"),
        RuntimeError("Unable to find a valid cuDNN algorithm to run convolution"),
        RuntimeError("GET was unable to find an engine to execute this computation"),
        MemoryError(),
        Exception("[ONNXRuntimeError] : 6 : Conv: BFCArena: Failed to allocate memory for requested buffer of size 64"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: 64 bytes"),
    ],
)
def test_cuda_knows_every_kind_of_out_of_memory(error: Exception) -> None:
    assert Cuda().is_out_of_memory(error)


@pytest.mark.parametrize("accelerator", [Accelerator(), Cuda(), Metal()], ids=lambda found: found.kind)
def test_another_error_is_not_out_of_memory(accelerator: Accelerator) -> None:
    assert not accelerator.is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert not accelerator.is_out_of_memory(ValueError("out of memory"))


def test_metal_computes_nothing_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the device, where a float64 tensor is an error."""

    def refused(*_: object) -> None:
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64.")

    block, exact = Conv(3, 8, 3), Conv(3, 8, 3)
    exact.load_state_dict(block.state_dict())
    images = torch.rand(1, 3, 8, 8)
    exact.eval().fold_batch_norm()
    monkeypatch.setattr(Tensor, "double", refused)
    block.eval().fold_batch_norm(Metal.widest)
    torch.testing.assert_close(block(images), exact(images))
    boxes = torch.tensor([[[20.0, 20, 10, 10, 1, 0.9, 0.1], [21, 20, 10, 10, 1, 0.8, 0.1]]])
    assert len(non_max_suppression(boxes, NmsSettings(0.2, 0.5), Metal.widest)[0]) == 1


def test_cuda_copies_the_tensors_of_a_dataclass_in_one_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[Tensor] = []
    monkeypatch.setattr(Cuda, "_send", lambda self, tensor: copies.append(tensor) or tensor.clone())
    rows, there, none = torch.arange(35).view(5, 7), torch.ones(2, device="meta"), torch.from_numpy(np.zeros(0, int))
    batch = replace(made_batch(0), targets=torch.rand(3, 6), indices=rows.T, sizes_hw=none, placements=there)
    batch = replace(batch, unlabelled=torch.tensor([[True, False, True]]))
    sent = Cuda().send(batch)
    assert len(copies) == 1 and sent.placements is there and sent.loaded is batch.loaded
    for name in ("images", "targets", "indices", "sizes_hw", "unlabelled"):
        own, found = getattr(batch, name), getattr(sent, name)
        assert (
            found.dtype == own.dtype and torch.equal(found, own) and found.storage_offset() * found.itemsize % 16 == 0
        )
    assert Cuda().send(LossSettings(box=1, cls=1, class_weights=there)).class_weights is there and len(copies) == 1


def test_cuda_tunes_no_kernel_where_shapes_vary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    with Cuda().without_kernel_benchmark():
        assert not torch.backends.cudnn.benchmark
    assert torch.backends.cudnn.benchmark


@pytest.mark.parametrize(
    ("accelerator", "error", "message"),
    [
        (StandIn(capacity=2 * 2**30), torch.OutOfMemoryError("CUDA"), r"stand-in: a batch, 2\.00 GiB were free\. Do"),
        (Accelerator(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 64 bytes"), r"cpu: a batch\. Do"),
    ],
)
def test_exhausted_memory_is_explained_and_another_error_is_not(
    accelerator: Accelerator, error: Exception, message: str
) -> None:
    with pytest.raises(UserError, match=message), explain_out_of_memory(accelerator, "a batch", "Do less."):
        raise error
    with pytest.raises(RuntimeError, match="shapes"), explain_out_of_memory(accelerator, "", ""):
        raise RuntimeError("shapes do not match")


@pytest.mark.parametrize("on", [True, False])
def test_the_choice_of_kernels_ends_with_the_run(on: bool) -> None:
    def state() -> tuple[bool, ...]:
        cudnn, warn_only = torch.backends.cudnn, torch.is_deterministic_algorithms_warn_only_enabled()
        return cudnn.benchmark, cudnn.deterministic, torch.are_deterministic_algorithms_enabled(), warn_only

    before = state()
    with pytest.raises(ZeroDivisionError), Accelerator().deterministic_kernels(on):
        assert state()[:3] == (not on, on, on)
        raise ZeroDivisionError
    assert state() == before


def test_deterministic_cuda_sets_cublas_and_refuses_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    try:
        Cuda().set_deterministic(True)
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark
        with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
            torch.zeros(4).put_(torch.tensor([0, 0]), torch.ones(2))
        Accelerator().set_deterministic(True)
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        Accelerator().set_deterministic(False)
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)


def show(monkeypatch: pytest.MonkeyPatch, devices: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)


def rank(local: int) -> Launch:
    return Launch(rank=local, local_rank=local, size=8, launcher="slurm")


@pytest.mark.parametrize(
    ("visible", "flag", "local_rank", "index"),
    [(8, "", 3, 3), (8, "6,7", 1, 7), (1, "", 3, 0), (1, "0", 7, 0), (1, "cuda", 0, 0)],
)
def test_a_rank_takes_the_device_of_its_place_or_the_only_one_that_it_sees(
    monkeypatch: pytest.MonkeyPatch, visible: int, flag: str, local_rank: int, index: int
) -> None:
    show(monkeypatch, visible)
    assert choose_accelerator(flag, rank(local_rank)).device == torch.device("cuda", index)


def test_more_ranks_than_devices_are_refused_by_the_rank_that_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    show(monkeypatch, 2)
    with pytest.raises(ConfigError, match="local rank 5 has no device: this node has 2 devices") as caught:
        choose_accelerator("", rank(5))
    assert caught.value.reporter == 5


def test_the_last_batch_is_free_once_it_was_used() -> None:
    """An epoch's stream stays open while its model is validated."""
    with StandIn() as device:
        stream = device.prefetch([made_batch(seed) for seed in range(3)])
        for _ in range(3):
            images = weakref.ref(next(stream).images)
            assert images() is None
        assert next(stream, None) is None
