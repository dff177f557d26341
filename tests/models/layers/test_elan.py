"""The cross-stage blocks that keep every step of a chain, or every stage."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tessera.models.detector import DetectionModel
from tessera.models.layers.elan import AConv, ADown, ConvElan, Elan, RepElan
from tessera.utils.errors import ConfigError
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


@pytest.mark.parametrize("kind", [ConvElan, RepElan])
@pytest.mark.parametrize(("c_out", "expansion"), [(6, 1.0), (8, 0.75), (8, 0.01)])
def test_halves_that_cannot_be(kind: type[ConvElan | RepElan], c_out: int, expansion: float) -> None:
    with pytest.raises(ValueError, match=rf"halves of {int(c_out * expansion)} channels \({c_out} by.*multiple of 4"):
        kind(4, c_out, expansion=expansion)


@pytest.mark.parametrize(
    "block",
    [Elan(8, 16, 2), ConvElan(8, 16), RepElan(8, 16, 2), AConv(8, 16), ADown(8, 16)],
    ids=lambda block: type(block).__name__,
)
def test_every_parameter_learns_in_half_precision(block: nn.Module) -> None:
    assert_learns_in_half_precision(block, 2, 8, 8, 8)


def mean_of_four(x: Tensor) -> Tensor:
    """Every 2×2 window's, one pixel apart."""
    return (x[..., :-1, :-1] + x[..., 1:, :-1] + x[..., :-1, 1:] + x[..., 1:, 1:]) / 4


def maxima(x: Tensor) -> Tensor:
    """Of 3×3 windows around every second pixel; there is nothing outside."""
    height, width = x.shape[2:]
    rows = [
        [x[..., max(i - 1, 0) : i + 2, max(j - 1, 0) : j + 2].amax((2, 3)) for j in range(0, width, 2)]
        for i in range(0, height, 2)
    ]
    return torch.stack([torch.stack(row, -1) for row in rows], -2)


@pytest.mark.parametrize("sides", [(2, 2), (8, 12), (7, 9)])
def test_a_mean_then_a_convolution(sides: tuple[int, int]) -> None:
    block = randomised(AConv(4, 6))
    assert isinstance(block, AConv)
    x = image(2, 4, *sides)
    with torch.no_grad():
        y = block(x)
        assert y.shape == (2, 6, sides[0] // 2, sides[1] // 2)
        torch.testing.assert_close(y, block.conv(mean_of_four(x)))


@pytest.mark.parametrize("sides", [(2, 2), (8, 12), (7, 9)])
def test_half_of_the_channels_through_a_convolution_and_half_through_a_maximum(sides: tuple[int, int]) -> None:
    block = randomised(ADown(6, 10))
    assert isinstance(block, ADown)
    x = image(2, 6, *sides) - 1  # a maximum with zeros around the map would be another
    with torch.no_grad():
        y, first, second = block(x), *mean_of_four(x).split(3, 1)
        assert y.shape == (2, 10, sides[0] // 2, sides[1] // 2)
        torch.testing.assert_close(y, torch.cat((block.cv1(first), block.cv2(maxima(second))), 1))


def test_odd_channels_in_a_model_are_named_with_their_line() -> None:
    """A layer makes a multiple of 8, so that only the images can have an odd number."""
    described = {
        "nc": 2,
        "backbone": [[-1, 1, "ADown", [8]]],
        "head": [[[0], 1, "DetectFree", ["nc"]]],
    }
    with pytest.raises(ConfigError, match=r"ADown.*halves of 3 and 8 channels, expected even numbers"):
        DetectionModel(described)
