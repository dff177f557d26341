"""Averaging over ranks: the same messages in every step of every process, and nothing changed that is equal."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tessera.utils.machine.accelerator import Accelerator, BatchNormParts, Metal
from tessera.utils.ranks import ddp
from tessera.utils.ranks.ddp import DataParallel, SyncBatchNorm2d, average_statistics, gradients_stay_local, smart_DDP
from tessera.utils.ranks.world import Collectives, World
from tests.at_once import at_once


class Equals(Collectives):
    """Ranks with equal tensors; notes what is summed."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks, self.sent = ranks, list[Tensor]()

    def begin_all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        self.sent.append(tensor.clone())
        total = sum([tensor.clone() for _ in range(self.ranks)])
        return lambda: tensor.copy_(total)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return self.begin_all_reduce(tensor)()

    def begin_broadcast(self, tensor: Tensor, source: int) -> Callable[[], Tensor]:
        return lambda: tensor


class Crossed(nn.Module):
    """Layers that are used in another order than they are registered in, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.unused, self.first = nn.Conv2d(4, 2, 1), nn.Linear(2, 2), nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())


@pytest.mark.parametrize("bucket_bytes", [1, 80, 2**20])
def test_gradients_lie_in_the_order_of_the_parameters_in_every_step(
    bucket_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ddp, "_BUCKET_BYTES", bucket_bytes)
    model = Crossed().to(memory_format=torch.channels_last)
    images = torch.rand(2, 3, 8, 8)
    model(images).sum().backward()
    expected = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    in_memory = [grad.permute(0, 2, 3, 1) if grad.dim() == 4 else grad for grad in reversed(expected)]
    collectives = Equals(4)
    wrapped = DataParallel(model, collectives, 4)
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        collectives.sent.clear()
        with gradients_stay_local(wrapped):
            (wrapped(images).sum() / 4).backward()
        assert not collectives.sent
        (wrapped(images).sum() * 3 / 4).backward()
        torch.testing.assert_close([p.grad for p in model.parameters()], expected)
        torch.testing.assert_close(torch.cat(collectives.sent), torch.cat([grad.flatten() for grad in in_memory]))


@pytest.mark.parametrize("ranks", [2, 3, 5, 6, 7])
def test_statistics_that_are_equal_on_all_ranks_stay_as_they_are(ranks: int) -> None:
    world = World(collectives=Equals(ranks))
    world.size = ranks
    frozen = [torch.rand(50), torch.rand(1000) * 1e4]
    before = [buffer.clone() for buffer in frozen]
    average_statistics(frozen, world)
    assert all(map(torch.equal, frozen, before))


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
