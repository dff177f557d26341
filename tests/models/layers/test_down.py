"""Halving a map after a mean."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tessera.models.detector import DetectionModel
from tessera.models.layers.elan import AConv, ADown
from tessera.utils.errors import ConfigError
from tests.models.hub import conv
from tests.models.layers.made_blocks import assert_learns_in_half_precision, image, parameters, randomised


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


def test_parameters_by_hand() -> None:
    assert parameters(AConv(16, 24)) == conv(16, 24, 3)
    assert parameters(ADown(16, 24)) == conv(8, 12, 3) + conv(8, 12, 1)


@pytest.mark.parametrize("channels", [(5, 8), (8, 5)])
def test_odd_channels_have_no_halves(channels: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"halves of {channels[0]} and {channels[1]} channels, expected even numbers"):
        ADown(*channels)


def test_odd_channels_in_a_model_are_named_with_their_line() -> None:
    """A layer makes a multiple of 8, so that only the images can have an odd number."""
    described = {
        "nc": 2,
        "backbone": [[-1, 1, "ADown", [8]]],
        "head": [[[0], 1, "DetectFree", ["nc"]]],
    }
    with pytest.raises(ConfigError, match=r"ADown.*halves of 3 and 8 channels, expected even numbers"):
        DetectionModel(described)


@pytest.mark.parametrize("block", [AConv(8, 16), ADown(8, 16)], ids=["AConv", "ADown"])
def test_every_parameter_learns_in_half_precision(block: AConv | ADown) -> None:
    assert_learns_in_half_precision(block, 2, 8, 8, 8)
