"""Muon: what it does with matrices, and what it leaves to AdamW."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tessera.utils.engine.muon import POLYNOMIALS, RMS, Muon, is_matrix, orthogonalize


def iterated(x: Tensor) -> Tensor:
    """The iterations, written out."""
    x = x / x.norm()
    for a, b, c in POLYNOMIALS:
        gram = x @ x.mT
        x = (a * torch.eye(len(x), dtype=x.dtype) + b * gram + c * gram @ gram) @ x
    return x


@given(st.lists(st.tuples(*[st.integers(1, 40)] * 2), min_size=1, max_size=6), st.integers(0, 2**30))
def test_matrices_are_orthogonalised_each_on_its_own(shapes: list[tuple[int, int]], seed: int) -> None:
    generator, shapes = torch.Generator().manual_seed(seed), sorted(shapes)
    matrices = [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]
    norms = torch.rand(len(shapes), generator=generator, dtype=torch.float64) + 1
    made = orthogonalize(torch.cat([x.flatten() for x in matrices]), shapes, norms)
    for x, y, norm in zip(matrices, made.split([x.numel() for x in matrices]), norms, strict=True):
        torch.testing.assert_close(y.view_as(x), iterated(x) * x.norm() / norm, atol=1e-8, rtol=1e-6)


def test_singular_values_are_near_one() -> None:
    """Of a matrix whose largest singular value is 30 times the smallest."""
    values = torch.logspace(0, -1.5, 24, dtype=torch.float64)
    u, v = (torch.linalg.qr(torch.randn(n, 24, dtype=torch.float64))[0] for n in (24, 60))
    made = orthogonalize(((u * values) @ v.mT).flatten(), [(24, 60)], values.norm()[None]).view(24, 60)
    found = (u.mT @ made @ v).diagonal()
    assert found.min() > 0.73 and found.max() < 1.27


def model(memory_format: torch.memory_format = torch.channels_last) -> nn.Module:
    """Kernels that are matrices, equal shapes apart; a depthwise one and one with few outputs that are not."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(4, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 16, 3, groups=16), nn.Conv2d(16, 24, 1)]
    layers += [nn.Conv2d(24, 24, 1), nn.Conv2d(24, 16, 1), nn.Conv2d(16, 24, 1), nn.Conv2d(24, 3, 1)]
    return nn.Sequential(*layers).to(torch.float64, memory_format=memory_format)


def optimizer_of(module: nn.Module, optimizer: type[torch.optim.AdamW] = Muon) -> torch.optim.AdamW:
    groups = [{"params": [p], "weight_decay": 0.1 * (p.ndim > 1)} for p in module.parameters()]
    groups[0].update(lr=0.02, weight_decay=0.2)
    return optimizer(groups, lr=0.01, betas=(0.9, 0.999), weight_decay=0.1, fused=True)


def set_gradients(module: nn.Module, seed: int = 0) -> None:
    module.zero_grad()
    images = torch.randn(2, 4, 12, 12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    module(images).square().mean().backward()


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
def test_matrices_follow_muon_and_the_rest_adamw(memory_format: torch.memory_format) -> None:
    ours = model(memory_format)
    other = copy.deepcopy(ours)
    muon, adamw = optimizer_of(ours), optimizer_of(other, torch.optim.AdamW)
    momenta = {name: torch.zeros_like(p) for name, p in ours.named_parameters()}
    squares = dict.fromkeys(momenta, torch.zeros((), dtype=torch.float64))
    for seed in range(3):
        set_gradients(ours, seed)
        gradients = {name: p.grad.clone() for name, p in ours.named_parameters() if p.grad is not None}
        before = copy.deepcopy(ours.state_dict())
        for name, p in other.named_parameters():  # the same gradients for both
            p.grad = gradients[name].clone()
        muon.step()
        adamw.step()
        matrices = [name for name, p in ours.named_parameters() if is_matrix(p)]
        assert matrices == ["0.weight", "3.weight", "4.weight", "5.weight", "6.weight"]
        for name, p in ours.named_parameters():
            if name not in matrices:
                torch.testing.assert_close(p, dict(other.named_parameters())[name], atol=0, rtol=0)
                continue
            momenta[name].lerp_(gradients[name], 0.1)
            squares[name] = 0.999 * squares[name] + 0.001 * gradients[name].square().sum()
            mean = gradients[name].lerp(momenta[name], 0.9)
            usual = (squares[name] / (1 - 0.999 ** (seed + 1))).sqrt() * (1 - 0.9 ** (seed + 2))
            update = iterated(mean.flatten(1)).view_as(p) * mean.norm() / usual
            rms = RMS * max(len(p), p[0].numel()) ** 0.5
            rate, decay = (0.02, 0.2) if name == "0.weight" else (0.01, 0.1)
            torch.testing.assert_close(p, before[name] * (1 - rate * decay) - rate * rms * update, atol=1e-9, rtol=1e-6)
            other.get_parameter(name).data.copy_(p)


@pytest.mark.parametrize("value", [0.0, 1e-30])
def test_a_matrix_without_gradient_stays_and_one_with_next_to_none_decays(value: float) -> None:
    ours = model()
    muon, before = optimizer_of(ours), copy.deepcopy(ours)
    set_gradients(ours)
    ours.get_parameter("3.weight").grad = None
    still = ours.get_parameter("4.weight")
    still.grad = torch.full_like(still, value)
    muon.step()
    assert torch.equal(ours.get_parameter("3.weight"), before.get_parameter("3.weight"))
    torch.testing.assert_close(still.data, before.get_parameter("4.weight") * (1 - 0.01 * 0.1), atol=1e-12, rtol=0)
