"""Partial self-attention, and channels and size changed apart."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from models.layers.attention import PSA, Attention, SCDown
from tests.models.hub import conv
from tests.models.layers.made_blocks import image, parameters, randomised


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Torch refuses operations whose sums depend on the order of threads."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("channels", "heads"), [(8, 1), (127, 1), (128, 2), (200, 2), (256, 4), (288, 4), (320, 5), (2, 1)]
)
def test_heads_share_the_channels_out(channels: int, heads: int) -> None:
    assert Attention(channels).heads == heads


def by_hand(layer: Attention, x: Tensor) -> Tensor:
    """One cell of one head of one image after the other."""
    b, c, h, w = x.shape
    made = layer.qkv(x)
    keys = (made.shape[1] - c) // 2
    q, k, values = made[:, :keys], made[:, keys : 2 * keys], made[:, 2 * keys :]
    attended = torch.zeros_like(values)
    for i in range(b):
        for head in range(layer.heads):
            narrow = slice(head * keys // layer.heads, (head + 1) * keys // layer.heads)
            wide = slice(head * c // layer.heads, (head + 1) * c // layer.heads)
            for cell in range(h * w):
                products = torch.stack(
                    [q[i, narrow].flatten(1)[:, cell] @ k[i, narrow].flatten(1)[:, n] for n in range(h * w)]
                )
                weights = (products / math.sqrt(keys / layer.heads)).softmax(0)
                attended[i, wide, cell // w, cell % w] = values[i, wide].flatten(1) @ weights
    return layer.project(attended + layer.position(values))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("size", [(3, 4), (1, 1)])
def test_attention_by_hand(size: tuple[int, int], layout: torch.memory_format) -> None:
    layer = randomised(Attention(128))
    assert layer.heads == 2
    x = 3 * image(2, 128, *size).contiguous(memory_format=layout)
    with torch.no_grad():
        expected = by_hand(copy.deepcopy(layer).double(), x.double())
        torch.testing.assert_close(layer(x).double(), expected, atol=1e-4, rtol=1e-4)


def test_half_of_the_channels_attend_and_both_additions_are_made() -> None:
    block = randomised(PSA(6, 16, 2))
    x = image(2, 6, 5, 7)
    with torch.no_grad():
        around, y = block.split(x).chunk(2, 1)
        for layer in block.blocks:
            y = y + layer.attention(y)
            y = y + layer.feed(y)
        torch.testing.assert_close(block(x), block.join(torch.cat((around, y), 1)))


@pytest.mark.parametrize(("c_in", "c_out", "repeats"), [(256, 256, 1), (64, 576, 1), (12, 16, 3)])
def test_parameters_by_hand(c_in: int, c_out: int, repeats: int) -> None:
    half = c_out // 2
    attention = conv(half, 2 * half) + conv(1, half, 3) + conv(half, half)  # queries and keys: half of `half` each
    feed = conv(half, 2 * half) + conv(2 * half, half)
    assert parameters(PSA(c_in, c_out, repeats)) == conv(c_in, c_out) + repeats * (attention + feed) + conv(
        c_out, c_out
    )


@pytest.mark.parametrize("channels", [2, 15])
def test_channels_that_cannot_be_halved(channels: int) -> None:
    with pytest.raises(ValueError, match=rf"with {channels} channels, expected an even number of at least 4"):
        PSA(8, channels)


def test_images_of_a_batch_do_not_see_each_other() -> None:
    block = randomised(PSA(8, 16))
    x = image(3, 8, 5, 4)
    with torch.no_grad():
        alone = torch.cat([block(one[None]) for one in x])
        torch.testing.assert_close(block(x), alone)
        x[2] = 9.0
        torch.testing.assert_close(block(x)[:2], alone[:2])


def step(block: PSA, x: Tensor) -> list[Tensor]:
    """The output and all gradients of a training step in half precision."""
    block.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        y = block(x)
    assert y.dtype == torch.bfloat16 and y.is_contiguous(memory_format=torch.channels_last)
    y.float().square().mean().backward()
    return [y.detach(), *(p.grad for p in block.parameters())]


@pytest.mark.usefixtures("deterministic")
def test_every_parameter_learns_in_half_precision_the_same_every_time() -> None:
    torch.manual_seed(0)
    block = PSA(32, 256).to(memory_format=torch.channels_last)
    x = image(2, 32, 10, 8).contiguous(memory_format=torch.channels_last)
    first = step(block, x)
    assert all(bool(found.isfinite().all()) and bool(found.any()) for found in first)
    for again in (step(block, x), step(block, x)):
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    with torch.no_grad():
        torch.testing.assert_close(first[0].float(), block(x), atol=0.15, rtol=0.05)


def test_compiles_once_for_all_sizes() -> None:
    torch.manual_seed(0)
    block = randomised(PSA(8, 16))
    compiled = torch.compile(block, backend="eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        for shape in ((2, 8, 4, 6), (3, 8, 5, 5)):
            torch.testing.assert_close(compiled(image(*shape)), block(image(*shape)))


def test_size_changes_after_the_channels_and_without_an_activation() -> None:
    block = randomised(SCDown(6, 16))
    assert parameters(block) == conv(6, 16) + conv(1, 16, 3)
    x = image(2, 6, 8, 10)
    with torch.no_grad():
        wide = block.widen(x)
        torch.testing.assert_close(block(x), block.shrink.bn(block.shrink.conv(wide)))
        assert wide.shape == (2, 16, 8, 10) and block(x).shape == (2, 16, 4, 5)
