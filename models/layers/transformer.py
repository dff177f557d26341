"""`C3TR`: a `C3` with self-attention over a map's cells (Dosovitskiy et al., ViT, 2021) as its bottleneck branch."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from torch import Tensor, nn

from tessera.models.layers.blocks import C3

ATTENTION_HEADS = 4


class TransformerLayer(nn.Module):
    """Self-attention, then two linear layers, each added to its input; without normalisation.

    Queries, keys and values pass a linear layer of their own before the projections of the attention, as in the
    checkpoint format. `channels` must be a multiple of `heads`.
    """

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        if channels % heads:
            raise ValueError(f"attention over {channels} channels, expected a multiple of its {heads} heads")
        self.q = nn.Linear(channels, channels, bias=False)
        self.k = nn.Linear(channels, channels, bias=False)
        self.v = nn.Linear(channels, channels, bias=False)
        self.ma = nn.MultiheadAttention(channels, heads, batch_first=True)
        self.fc1 = nn.Linear(channels, channels, bias=False)
        self.fc2 = nn.Linear(channels, channels, bias=False)

    def forward(self, cells: Tensor) -> Tensor:
        attended, _ = self.ma(self.q(cells), self.k(cells), self.v(cells), need_weights=False)
        cells = attended + cells
        return cast(Tensor, self.fc2(self.fc1(cells)) + cells)


class TransformerBlock(nn.Module):
    """A linear layer in place of a position embedding, added to the cells, and several `TransformerLayer`s."""

    def __init__(self, channels: int, heads: int, layers: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, channels)
        self.tr = nn.Sequential(*(TransformerLayer(channels, heads) for _ in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        cells = x.flatten(2).transpose(1, 2)
        cells = self.tr(cells + self.linear(cells))
        return cells.transpose(1, 2).reshape(x.shape)


class C3TR(C3):
    """`C3` whose bottleneck branch is a `TransformerBlock` of `repeats` layers; arguments as of `C3`, without `conv`.

    Attention takes memory and time in the square of the number of cells, so that it is for the smallest maps.
    """

    @staticmethod
    def bottleneck_branch(channels: int, repeats: int, bottleneck: Callable[[int, int], nn.Module]) -> nn.Module:
        return TransformerBlock(channels, ATTENTION_HEADS, repeats)
