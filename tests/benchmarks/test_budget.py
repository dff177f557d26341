"""Counting of operators: FLOPs, bytes and kernels of known ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.benchmarks.budget import BYTES, Cost, Counter, launches


def test_a_convolution_is_counted_and_a_chain_has_a_kernel_for_each_operator_but_views() -> None:
    layer, x = nn.Conv2d(4, 8, 3, bias=False), torch.zeros(2, 4, 10, 10, requires_grad=True)
    counter = Counter()
    with counter, counter.stage("forward"):
        y = layer(x)
    moved = 4 * (x.numel() + layer.weight.numel() + y.numel())
    assert counter.parts == {"forward": Cost(1, 2 * y.numel() * 4 * 9, moved, moved / BYTES)}
    with counter, counter.stage("loss"):
        loss = (y.detach() * 2 + 1).flatten().relu_().sum()  # four kernels
    with counter, counter.stage("backward"):
        y.backward(torch.zeros_like(y))  # zeros, and the gradients of input and weight
    assert loss.ndim == 0 and [cost.kernels for cost in counter.parts.values()] == [1, 4, 3]
    assert counter.total.kernels == 8


def test_lists_of_tensors_are_launched_together_as_far_as_a_kernel_takes_them() -> None:
    def kernels(tensors: list[Tensor]) -> int:
        return launches(torch.ops.aten._foreach_mul_.Scalar, (tensors, 2.0), None)

    assert [kernels([torch.zeros(1)] * count) for count in (1, 770, 771)] == [1, 1, 2]
    assert kernels([torch.zeros(1).expand(2240 * 65536 + 1)]) == 2
