"""Train with a head and a loss of your own: an anchor-free head whose box loss is squared.

uv run -m examples.custom_loss
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

import tessera
from tessera.models.heads.criterion import LossSettings
from tessera.models.heads.free import AnchorFreeLoss, DetectFree
from tessera.models.model_yaml import HEADS, MODELS_DIR


class SquaredBoxLoss(AnchorFreeLoss):
    """The losses of the anchor-free head with Σ t (1 − CIoU)² as box loss."""

    def box_loss(self, weights: Tensor, ious: Tensor) -> Tensor:
        """Return the squared box loss of assigned cells."""
        return (weights * (1 - ious) ** 2).sum()


class DetectSquared(DetectFree):
    """`DetectFree` that is trained with `SquaredBoxLoss`; a checkpoint names the head, so it needs this file too."""

    def criterion(self, settings: LossSettings) -> AnchorFreeLoss:
        """Return the loss that trains this head."""
        return SquaredBoxLoss(self, settings)


def main(epochs: int = 20, project: Path = Path("runs/train")) -> None:
    """Train tessera-n with the new head on the synthetic shapes."""
    HEADS["DetectSquared"] = DetectSquared
    model = project / "tessera-n-squared.yaml"
    project.mkdir(parents=True, exist_ok=True)
    model.write_text((MODELS_DIR / "tessera-n.yaml").read_text().replace("DetectFree", "DetectSquared"))
    tessera.train(cfg=model, data="shapes.yaml", imgsz=128, epochs=epochs, project=project, name="squared")


if __name__ == "__main__":
    main()
