"""BatchNorm's running statistics, put back after a skipped step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class RunningStatistics:
    """BatchNorm's running statistics before a step: a forward that is not finite would spoil them for good."""

    def __init__(self, model: nn.Module) -> None:
        norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        live = [t for m in norms for t in (m.running_mean, m.running_var, m.num_batches_tracked) if t is not None]
        self._live = [
            kind for kind in ([t for t in live if t.is_floating_point() == real] for real in (True, False)) if kind
        ]
        self._kept: list[Tensor] = []

    @torch.no_grad()
    def remember(self) -> None:
        """Keep the present values."""
        self._kept = [_flat(live) for live in self._live]

    @torch.no_grad()
    def restore_unless(self, finite: Tensor) -> None:
        """Put the kept values back where `finite`, bool () on the device, is false."""
        for live, kept in zip(self._live, self._kept, strict=True):
            parts = torch.where(finite, _flat(live), kept).split([t.numel() for t in live])
            torch._foreach_copy_(live, [part.view_as(t) for part, t in zip(parts, live, strict=True)])


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])
