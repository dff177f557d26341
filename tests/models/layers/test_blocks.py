"""Blocks of the model YAML."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tessera.models.layers.blocks import C3, SILU, SPP, SPPF, Bottleneck, BottleneckCSP, Concat, Conv, DWConv, Focus
from tessera.models.layers.elan import Elan
from tessera.models.layers.ghost import C3Ghost, GhostBottleneck, GhostConv
from tessera.models.layers.transformer import C3TR, TransformerLayer
from tests.models.layers.made_blocks import image, parameters, randomised


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation", "size"),
    [
        (1, 1, None, 1, (8, 10)),
        (3, 2, None, 1, (4, 5)),
        (6, 2, 2, 1, (4, 5)),
        (3, 1, None, 2, (8, 10)),
        ((3, 1), 1, None, 1, (8, 10)),
    ],
)
def test_conv_sizes(kernel: int, stride: int, padding: int | None, dilation: int, size: tuple[int, int]) -> None:
    conv = Conv(4, 6, kernel, stride, padding, dilation=dilation)
    assert conv(image(2, 4, 8, 10)).shape == (2, 6, *size)


@pytest.mark.parametrize(
    "block",
    [
        Conv(4, 8, 3),
        DWConv(4, 8, 3),
        C3(4, 8, 2),
        Focus(4, 8, 3),
        GhostBottleneck(4, 8, 3, 2),
        C3Ghost(4, 16, 2),
        C3TR(4, 16),
        Elan(4, 16, 2),
    ],
)
def test_folding_changes_parameters_not_results(block: nn.Module) -> None:
    randomised(block)
    x = image(2, 4, 8, 10)
    with torch.no_grad():
        expected = block(x.clone())
        for _ in range(2):  # the second time there is nothing left to fold
            for module in block.modules():
                if isinstance(module, Conv):
                    module.fold_batch_norm()
            assert not any(isinstance(module, nn.BatchNorm2d) for module in block.modules())
            torch.testing.assert_close(block(x.clone()), expected, atol=1e-5, rtol=1e-5)


def test_silu_overwrites_only_while_no_gradients_are_recorded() -> None:
    x = torch.linspace(-4, 4, 9)
    expected = x * torch.sigmoid(x)
    kept = x.clone().requires_grad_()
    y = SILU(kept)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(kept.detach(), x)
    assert torch.autograd.gradcheck(SILU, x.double().requires_grad_())
    with torch.no_grad():
        overwritten = x.clone()
        assert SILU(overwritten).data_ptr() == overwritten.data_ptr()
        torch.testing.assert_close(overwritten, expected)


def test_bottleneck_adds_its_input_only_where_it_can() -> None:
    x = image(1, 8, 4, 4)
    for c_out, shortcut, adds in ((8, True, True), (8, False, False), (16, True, False)):
        block = randomised(Bottleneck(8, c_out, shortcut))
        with torch.no_grad():
            plain = block.cv2(block.cv1(x))
            torch.testing.assert_close(block(x), x + plain if adds else plain)


def test_chained_pools_see_what_wide_pools_see() -> None:
    slow, fast = randomised(SPP(8, 8, (5, 9, 13))), SPPF(8, 8, 5)
    fast.load_state_dict(slow.state_dict())
    x = image(2, 8, 20, 16)
    with torch.no_grad():
        torch.testing.assert_close(fast.eval()(x), slow(x), atol=0, rtol=0)


def test_focus_orders_channels_as_checkpoints_expect() -> None:
    block = Focus(3, 12)
    seen: list[Tensor] = []
    block.conv.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    x = image(2, 3, 6, 8)
    block(x)
    corners = [x[:, :, row::2, column::2] for column in (0, 1) for row in (0, 1)]
    torch.testing.assert_close(seen[0], torch.cat(corners, 1), atol=0, rtol=0)


def test_c3_joins_a_deep_and_a_shallow_branch() -> None:
    block = randomised(C3(8, 16, repeats=3, shortcut=False))
    assert len(block.m) == 3
    x = image(1, 8, 4, 4)
    with torch.no_grad():
        joined = Concat(1)([block.m(block.cv1(x)), block.cv2(x)])
        torch.testing.assert_close(block(x), block.cv3(joined))


def test_parameters_of_blocks_as_originals_print_them() -> None:
    assert [parameters(GhostConv(c // 2 or 3, c, 3, 2)) for c in (32, 64, 128, 256)] == [2768, 10144, 38720, 151168]
    assert parameters(GhostConv(3, 16, 3, 2)) == 448
    assert parameters(C3(512, 512)) == 1_182_720 and parameters(BottleneckCSP(64, 64)) == 19_904


def test_the_second_half_of_a_ghost_is_made_from_the_first_channel_by_channel() -> None:
    block = randomised(GhostConv(4, 8, 3))
    x = image(2, 4, 8, 10)
    with torch.no_grad():
        first, second = block(x).chunk(2, 1)
        torch.testing.assert_close(first, block.cv1(x))
        alone = [block.cv2(torch.where(torch.arange(4)[:, None, None] == c, first, 0.0))[:, c] for c in range(4)]
        torch.testing.assert_close(second, torch.stack(alone, 1))


@pytest.mark.parametrize("stride", [1, 2])
def test_a_ghost_bottleneck_adds_its_input(stride: int) -> None:
    block = randomised(GhostBottleneck(8, 8, 3, stride))
    x = image(1, 8, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(block(x), block.conv(x) + (x if stride == 1 else block.shortcut(x)))
        assert block(x).shape == (1, 8, 8 // stride, 8 // stride)
    assert isinstance(block.conv[1], nn.Identity) == (stride == 1)


def test_attention_by_hand() -> None:
    """Softmax of the products of queries and keys over the root of a head's width, for each head."""
    torch.manual_seed(0)
    layer = TransformerLayer(8, 2)
    nn.init.normal_(layer.ma.in_proj_bias)
    cells = torch.rand(3, 5, 8)
    with torch.no_grad():
        projected = zip(
            (layer.q, layer.k, layer.v), layer.ma.in_proj_weight.chunk(3), layer.ma.in_proj_bias.chunk(3), strict=True
        )
        q, k, v = ((f(cells) @ w.T + b).view(3, 5, 2, 4).transpose(1, 2) for f, w, b in projected)
        weights = (q @ k.transpose(2, 3) / 2).softmax(-1)
        attended = layer.ma.out_proj((weights @ v).transpose(1, 2).reshape(3, 5, 8)) + cells
        torch.testing.assert_close(layer(cells), attended + layer.fc2(layer.fc1(attended)))


def test_a_transformer_treats_all_cells_alike() -> None:
    """Cells in another order give their outputs in that order: a place in the map is no information."""
    block = randomised(C3TR(8, 16, 2))
    x = image(2, 8, 4, 6)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        shuffled = x.flatten(2)[:, :, order].view(x.shape)
        torch.testing.assert_close(block(shuffled).flatten(2), block(x).flatten(2)[:, :, order])
