"""Train with a head and a loss of your own: an anchor-free head whose box loss is squared.

uv run -m examples.custom_loss
uv run train.py --head examples.custom_loss:DetectSquared --data shapes.yaml      # the same head in another run
uv run detect.py --head examples.custom_loss:DetectSquared --weights runs/train/squared/weights/best.pt --source images/
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

import tessera
from tessera.models.heads.criterion import LossSettings
from tessera.models.heads.free import AnchorFreeLoss, DetectFree


class SquaredBoxLoss(AnchorFreeLoss):
    """The losses of the anchor-free head with Σ t (1 − CIoU)² as box loss."""

    def box_loss(self, weights: Tensor, ious: Tensor) -> Tensor:
        """Return the squared box loss of assigned cells."""
        return (weights * (1 - ious) ** 2).sum()


class DetectSquared(DetectFree):
    """`DetectFree` that is trained with `SquaredBoxLoss`.

    A checkpoint names its head, but no command imports it for that: --resume, val.py, detect.py, export.py and
    compare.py need the same --head.
    """

    def criterion(self, settings: LossSettings) -> AnchorFreeLoss:
        """Return the loss that trains this head."""
        return SquaredBoxLoss(self, settings)


def main(epochs: int = 20, project: Path = Path("runs/train")) -> None:
    """Train tessera-n with the new head on the synthetic shapes."""
    tessera.train(
        head=DetectSquared,
        cfg="tessera-n.yaml",
        data="shapes.yaml",
        imgsz=128,
        epochs=epochs,
        project=project,
        name="squared",
    )


if __name__ == "__main__":
    main()
