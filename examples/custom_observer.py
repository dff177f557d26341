"""Observe a training with a class of your own, and choose best.pt by a metric of your own.

The observer writes to moved.csv of the run how far the weights move in an epoch.

uv run -m examples.custom_observer
uv run train.py --callbacks examples.custom_observer:Distance --metric recall@p=0.95
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

import tessera
from tessera.utils.engine.state import Training
from tessera.utils.report.observers import EpochResult, Observer


class Distance(Observer):
    """The L2 distance of the weights from those of the epoch before."""

    def begin(self, training: Training) -> None:
        """Remember the weights, and where to write."""
        self.model, self.file = training.state.model, training.context.folder / "moved.csv"
        self.before = self.weights()

    def epoch(self, epoch: EpochResult) -> None:
        """Write a line."""
        now = self.weights()
        with self.file.open("a") as file:
            file.write(f"{epoch.number},{sum(map(abs, epoch.losses)):.4g},{(now - self.before).norm():.4g}\n")
        self.before = now

    def weights(self) -> Tensor:
        """Return a copy of all weights, flat."""
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])


def main(epochs: int = 20, project: Path = Path("runs/train")) -> None:
    """Train on the synthetic shapes, and save as best.pt the epoch with the most recall at 95 % precision."""
    tessera.train(
        callbacks="examples.custom_observer:Distance",
        metric="recall@p=0.95",
        data="shapes.yaml",
        imgsz=128,
        epochs=epochs,
        project=project,
        name="observed",
    )


if __name__ == "__main__":
    main()
