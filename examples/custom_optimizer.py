"""Train with an optimizer of your own: Lion (Chen et al. 2023, arXiv 2302.06675).

uv run -m examples.custom_optimizer
uv run train.py --optimizer examples.custom_optimizer:lion --hyp lr0=0.0003
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import tessera


class Lion(torch.optim.Optimizer):
    """Sign of an interpolation of gradient and momentum, with decoupled weight decay (algorithm 2 of the paper)."""

    def __init__(self, params: Iterable[Any], lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters."""
        for group in self.param_groups:
            (beta1, beta2), rate, decay = group["betas"], group["lr"], group["weight_decay"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                momentum = state.setdefault("momentum", torch.zeros_like(p))
                update = momentum.lerp(p.grad, 1 - beta1).sign_()
                p.mul_(1 - rate * decay).sub_(update, alpha=rate)
                momentum.lerp_(p.grad, 1 - beta2)


def lion(groups: list[dict[str, Any]], *, lr: float, momentum: float, weight_decay: float) -> Lion:
    """Return the optimizer of a run; its schedule sets `lr`, and `momentum` or the first of `betas`, in each group."""
    return Lion(groups, lr, (momentum, 0.99), weight_decay)


def main(epochs: int = 20, project: Path = Path("runs/train")) -> None:
    """Train tessera-n with Lion, whose learning rate is a few times smaller than AdamW's."""
    part = "examples.custom_optimizer:lion"
    tessera.train(
        optimizer=part, hyp={"lr0": 0.0003}, data="shapes.yaml", imgsz=128, epochs=epochs, project=project, name="lion"
    )


if __name__ == "__main__":
    main()
