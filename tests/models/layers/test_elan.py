"""The cross-stage blocks that keep every step of a chain, or every stage."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tessera.models.layers.elan import ConvElan, Elan, RepElan
from tests.models.hub import conv
from tests.models.layers.made_blocks import assert_learns_in_half_precision, image, parameters, randomised


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


@pytest.mark.parametrize("block", [ConvElan(6, 16), ConvElan(6, 32, 0.5), RepElan(6, 16, 2), RepElan(6, 32, 1, 0.5)])
def test_joins_both_halves_and_both_stages(block: ConvElan | RepElan) -> None:
    randomised(block)
    x = image(2, 6, 5, 7)
    with torch.no_grad():
        halves = block.cv1(x)
        parts = [halves[:, :8], halves[:, 8:]]
        for stage in (block.cv2, block.cv3):
            last = parts[-1]
            for step in stage if isinstance(stage, nn.Sequential) else [stage]:
                last = step(last)
            parts.append(last)
        assert [part.shape for part in parts] == [(2, 8, 5, 7)] * 4
        torch.testing.assert_close(block(x), block.cv4(torch.cat(parts, 1)))


@pytest.mark.parametrize(("c_in", "c_out", "repeats", "expansion"), [(32, 64, 1, 1.0), (16, 48, 2, 0.5), (8, 8, 3, 1)])
def test_parameters_of_two_stages_by_hand(c_in: int, c_out: int, repeats: int, expansion: float) -> None:
    parts = int(c_out * expansion)
    c = parts // 2
    around = conv(c_in, parts) + conv(2 * parts, c_out)
    assert parameters(ConvElan(c_in, c_out, expansion)) == around + 2 * conv(c, c, 3)
    step = 2 * conv(c // 2, c // 2, 3) + conv(c // 2, c // 2)
    rep = 2 * conv(c, c // 2) + repeats * step + conv(c, c)
    assert parameters(RepElan(c_in, c_out, repeats, expansion)) == around + 2 * (rep + conv(c, c, 3))


@pytest.mark.parametrize("kind", [ConvElan, RepElan])
@pytest.mark.parametrize(("c_out", "expansion"), [(6, 1.0), (8, 0.75), (8, 0.01)])
def test_halves_that_cannot_be(kind: type[ConvElan | RepElan], c_out: int, expansion: float) -> None:
    with pytest.raises(ValueError, match=rf"halves of {int(c_out * expansion)} channels \({c_out} by.*multiple of 4"):
        kind(4, c_out, expansion=expansion)


@pytest.mark.parametrize("block", [Elan(8, 16, 2), ConvElan(8, 16), RepElan(8, 16, 2)], ids=lambda b: type(b).__name__)
def test_every_parameter_learns_in_half_precision(block: nn.Module) -> None:
    assert_learns_in_half_precision(block, 2, 8, 6, 6)
