"""Averaging over ranks: the same messages in every step of every process, and nothing changed that is equal."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tessera.utils.ranks import ddp
from tessera.utils.ranks.ddp import DataParallel, average_statistics, gradients_stay_local
from tessera.utils.ranks.world import Collectives, World


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
