"""The cross-stage block that keeps every step of its chain."""

from __future__ import annotations

import pytest
import torch

from models.layers.elan import Elan
from tests.models.hub import conv
from tests.models.layers.made_blocks import image, parameters, randomised


@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize("shortcut", [True, False])
def test_joins_both_parts_and_every_step_of_the_chain(repeats: int, shortcut: bool) -> None:
    block = randomised(Elan(6, 16, repeats, shortcut))
    x = image(2, 6, 5, 7)
    with torch.no_grad():
        around, last = block.split(x).chunk(2, 1)
        parts = [around, last]
        for step in block.chain:
            last = step.conv2(step.conv1(last)) + (last if shortcut else 0)
            parts.append(last)
        assert len(parts) == 2 + repeats
        torch.testing.assert_close(block(x), block.join(torch.cat(parts, 1)))


@pytest.mark.parametrize(
    ("c_in", "c_out", "repeats", "groups", "expansion"), [(32, 64, 2, 1, 0.5), (16, 48, 1, 4, 0.75), (8, 8, 3, 1, 1.0)]
)
def test_parameters_by_hand(c_in: int, c_out: int, repeats: int, groups: int, expansion: float) -> None:
    hidden = int(c_out * expansion)
    threes = hidden * (hidden // groups) * 9 + 2 * hidden
    counted = conv(c_in, 2 * hidden) + repeats * 2 * threes + conv((2 + repeats) * hidden, c_out)
    assert parameters(Elan(c_in, c_out, repeats, True, groups, expansion)) == counted


@pytest.mark.parametrize(
    ("groups", "expansion", "message"), [(3, 0.5, "8 channels.*multiple of 3"), (1, 0.01, "0 channels.*positive")]
)
def test_parts_that_cannot_be(groups: int, expansion: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Elan(4, 16, 1, True, groups, expansion)


def test_every_parameter_learns_in_half_precision() -> None:
    block = Elan(8, 16, 2).to(memory_format=torch.channels_last)
    x = image(2, 8, 6, 6).contiguous(memory_format=torch.channels_last).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = block(x)
    assert y.dtype == torch.bfloat16 and y.is_contiguous(memory_format=torch.channels_last)
    y.float().square().mean().backward()
    assert [name for name, p in block.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0] == []
    assert x.grad is not None and bool(x.grad.isfinite().all())
