"""Build, run and differentiate a model with models/ alone: no dataset, no configuration, no run.

uv run -m examples.model_alone
"""

from __future__ import annotations

import torch
from torch import Tensor

from tessera.models.detector import DetectionModel
from tessera.models.heads.criterion import LossSettings


def main() -> Tensor:
    """Return the loss of tessera-n for one object in each of two images, after its backward."""
    model = DetectionModel("tessera-n.yaml", names=["cat", "dog"])
    criterion = model.head.criterion(LossSettings(box=7.5, cls=0.5))
    targets = torch.tensor([[0.0, 1, 8, 8, 60, 40], [1, 0, 30, 20, 120, 90]])  # image, class, x1, y1, x2, y2 in pixels
    loss, _ = criterion(model(torch.rand(2, 3, 128, 128)), criterion.assign(targets, 2, (128, 128)))
    torch.autograd.backward(loss)
    return loss.detach()


if __name__ == "__main__":
    print(main())
