"""Synchronised BatchNorm against plain BatchNorm of the whole batch."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tessera.utils.machine.accelerator import Accelerator, BatchNormParts, Metal
from tessera.utils.ranks.ddp import SyncBatchNorm2d, smart_DDP
from tessera.utils.ranks.world import Collectives
from tests.at_once import at_once


class Threads(Collectives):
    """Two ranks as threads of this process; counts messages."""

    def __init__(self, barrier: threading.Barrier, sums: list[Tensor]) -> None:
        super().__init__()
        self.messages = 0
        self._barrier, self._sums = barrier, sums

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.messages += 1
        if self._barrier.wait(60) == 0:
            self._sums.clear()
        self._barrier.wait(60)
        self._sums.append(tensor.clone())
        self._barrier.wait(60)
        tensor.copy_(self._sums[0] + self._sums[1])
        self._barrier.wait(60)
        return tensor


def layer(collectives: Collectives, parts: BatchNormParts) -> SyncBatchNorm2d:
    plain = norm()
    SyncBatchNorm2d.convert(plain, collectives, parts)
    assert isinstance(plain, SyncBatchNorm2d)
    return plain


def norm() -> nn.BatchNorm2d:
    plain = nn.BatchNorm2d(3, eps=1e-3, momentum=0.03)
    nn.init.uniform_(plain.weight, generator=torch.Generator().manual_seed(1))
    nn.init.uniform_(plain.bias, generator=torch.Generator().manual_seed(2))
    return plain


@pytest.mark.parametrize("device", [Accelerator(), Metal()], ids=["float64", "float32"])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_shares_of_two_ranks_are_normalised_as_the_whole_batch(
    device: Accelerator, memory_format: torch.memory_format
) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(6, 3, 8, 8, generator=generator) * 3 + 100  # a mean far from 0
    weights = torch.randn(6, 3, 8, 8, generator=generator)
    whole, given = norm(), images.clone().requires_grad_()
    whole.running_mean.fill_(99)
    (whole(given) * weights).sum().backward()

    barrier, sums = threading.Barrier(2), []
    ranks = [Threads(barrier, sums) for _ in range(2)]
    layers = [layer(rank, device.batch_norm) for rank in ranks]
    shares = [images[:4], images[4:]]
    inputs = [share.contiguous(memory_format=memory_format).requires_grad_() for share in shares]

    def run(rank: int, weight: Tensor) -> None:
        layers[rank].running_mean.fill_(99)
        (layers[rank](inputs[rank]) * weight).sum().backward()

    at_once([partial(run, *pair) for pair in enumerate((weights[:4], weights[4:]))])

    torch.testing.assert_close(torch.cat([share.grad for share in inputs]), given.grad, rtol=1e-3, atol=1e-4)
    for name in ("weight", "bias"):
        mine = sum(getattr(one, name).grad for one in layers)
        torch.testing.assert_close(mine, getattr(whole, name).grad, rtol=1e-4, atol=1e-3)
    for one in layers:
        torch.testing.assert_close(one.running_mean, whole.running_mean)
        torch.testing.assert_close(one.running_var, whole.running_var, rtol=1e-4, atol=1e-4)
    assert [rank.messages for rank in ranks] == [2, 2]  # one forward, one backward


def test_a_single_rank_computes_as_several(caplog: pytest.LogCaptureFixture) -> None:
    (converted,) = smart_DDP(nn.Sequential(norm()), sync_bn=True, compile=True)
    assert type(converted) is SyncBatchNorm2d and "--compile gains little with --sync-bn" in caplog.text
