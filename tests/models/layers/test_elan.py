"""ELAN blocks, and YOLOv9's downsampling blocks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tessera.models.detector import DetectionModel
from tessera.models.layers.elan import AConv, ADown, ConvElan, Elan, RepElan
from tessera.utils.errors import ConfigError
from tests.models.layers.made_blocks import image, randomised


@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize("shortcut", [True, False])
def test_joins_both_parts_and_every_step_of_the_chain(repeats: int, shortcut: bool) -> None:
    block = randomised(Elan(6, 16, repeats, shortcut))
    x = image(2, 6, 5, 7)
    with torch.no_grad():
        parts = list(block.split(x).chunk(2, 1))
        for step in block.chain:
            parts.append(step.conv2(step.conv1(parts[-1])) + (parts[-1] if shortcut else 0))
        assert len(parts) == 2 + repeats
        torch.testing.assert_close(block(x), block.join(torch.cat(parts, 1)))


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
        torch.testing.assert_close(block(x), block.cv4(torch.cat(parts, 1)))


@pytest.mark.parametrize("kind", [ConvElan, RepElan])
@pytest.mark.parametrize(("c_out", "expansion"), [(6, 1.0), (8, 0.75), (8, 0.01)])
def test_halves_that_cannot_be(kind: type[ConvElan | RepElan], c_out: int, expansion: float) -> None:
    with pytest.raises(ValueError, match=rf"halves of {int(c_out * expansion)} channels \({c_out} by.*multiple of 4"):
        kind(4, c_out, expansion=expansion)


@pytest.mark.parametrize("sides", [(2, 2), (8, 12), (7, 9)])
def test_downsampling_of_a_mean_by_convolutions_and_a_maximum(sides: tuple[int, int]) -> None:
    x = image(2, 6, *sides) - 1  # a maximum with zeros around the map would be another
    mean = (x[..., :-1, :-1] + x[..., 1:, :-1] + x[..., :-1, 1:] + x[..., 1:, 1:]) / 4
    first, second = mean.split(3, 1)
    maxima = F.pad(second, (1, 1, 1, 1), value=-torch.inf).unfold(2, 3, 2).unfold(3, 3, 2).amax((4, 5))
    one, two = randomised(AConv(6, 6)), randomised(ADown(6, 10))
    with torch.no_grad():
        assert one(x).shape == (2, 6, sides[0] // 2, sides[1] // 2)
        torch.testing.assert_close(one(x), one.conv(mean))
        torch.testing.assert_close(two(x), torch.cat((two.cv1(first), two.cv2(maxima)), 1))


def test_odd_channels_in_a_model_are_named_with_their_line() -> None:
    """A layer makes a multiple of 8, so that only the images can have an odd number."""
    head = [[[0], 1, "DetectFree", ["nc"]]]
    with pytest.raises(ConfigError, match=r"ADown.*halves of 3 and 8 channels, expected even numbers"):
        DetectionModel({"nc": 2, "backbone": [[-1, 1, "ADown", [8]]], "head": head})
