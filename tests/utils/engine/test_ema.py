"""EMA, compared with its formula."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tessera.utils.engine.state import ModelEMA, ema_decay


@given(st.integers(1, 10**7))
def test_without_a_share_the_decay_is_the_ramp(updates: int) -> None:
    assert ema_decay(updates) == 0.9999 * (1 - math.exp(-updates / 2000))


@given(st.integers(1, 10**7), st.floats(1e-6, 1))
def test_with_a_share_the_average_reaches_back_over_it(updates: int, share: float) -> None:
    decay = ema_decay(updates, share)
    assert 0 < decay <= 0.9999 and decay <= ema_decay(updates + 1, share)
    assert 1 / (1 - decay) == pytest.approx(min(1 + share * updates, 10_000))


@pytest.mark.parametrize("taken", [True, torch.tensor(True)])
@pytest.mark.parametrize("share", [0.0, 0.25])
def test_average_of_parameters_and_buffers_follows_the_formula(share: float, taken: bool | torch.Tensor) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    ema = ModelEMA(model, share)
    expected = {k: v.clone().double() for k, v in model.state_dict().items()}
    for n in range(1, 6):
        model(torch.randn(2, 3, 4, 4))
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p))
        ema.update(model, taken)
        d = n / (4 + n) if share else 0.9999 * (1 - math.exp(-n / 2000))
        for key, value in model.state_dict().items():
            expected[key] = d * expected[key] + (1 - d) * value.double()
    for key, value in ema.model.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(value.double(), expected[key], rtol=1e-5, atol=1e-6)
    assert ema.updates == 5
    assert ema.model[1].num_batches_tracked == model[1].num_batches_tracked == 5
