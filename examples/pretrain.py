"""Make models/tessera-n.pt: tessera-n pretrained on synthetic shapes with feature distillation from YOLOX-Nano.

uv run -m examples.pretrain [another size, such as tessera-s]
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tessera
from tessera.deploy.foreign.synthetic_shapes import NAMES, write_shapes
from tessera.models.detector import DetectionModel
from tessera.models.heads.criterion import LossSettings, SumOverRanks, no_reduction
from tessera.models.heads.free import AnchorFreeLoss, DetectFree
from tessera.models.heads.head import HeadSpec
from tessera.models.model_yaml import MODELS_DIR
from tessera.utils.checkpoints.format import save_checkpoint
from tessera.utils.checkpoints.initial_model import DRAWN
from tessera.utils.checkpoints.weights import load_weights, model_of_weights, resolve_weights
from tessera.utils.environment import datasets_dir

MAPS = {15: 17, 18: 20, 21: 23, 4: 4, 6: 6, 9: 9}  # layer of tessera: layer of the teacher, first those of the head
CHANNELS = (64, 128, 256, 64, 128, 256)  # of the teacher's maps
GAIN = 10.0  # of the distance between the maps, beside the detection losses
TEACHER = "yolox_nano.pth"
IMAGES = -23  # source of the head that stands for the images


@cache
def teacher() -> tuple[DetectionModel, dict[int, Tensor]]:
    """Return the teacher, and the maps of its latest forward by layer."""
    model = model_of_weights(load_weights(resolve_weights(TEACHER)), TEACHER).eval().fuse()
    maps: dict[int, Tensor] = {}
    for layer in MAPS.values():
        model.model[layer].register_forward_hook(lambda *call, layer=layer: maps.update({layer: call[-1]}))
    return model, maps


class DistillationLoss(AnchorFreeLoss):
    """The losses of the anchor-free head plus the distance to the teacher's maps, for training in one process."""

    def __call__(
        self,
        predictions: Sequence[Tensor],
        assignment: Any,
        global_counts: Tensor | None = None,
        sum_over_ranks: SumOverRanks = no_reduction,
    ) -> tuple[Tensor, Tensor]:
        """Return the loss and its parts; the distance comes last in `predictions`."""
        loss, parts = super().__call__(predictions[:-1], assignment, global_counts, sum_over_ranks)
        return loss + GAIN * predictions[-1], parts


class DetectDistilled(DetectFree):
    """`DetectFree` that also reads the other maps, and the images for the teacher."""

    adapters: nn.ModuleList

    @classmethod
    def from_spec(cls, spec: HeadSpec) -> DetectFree:
        """Build the head; 1×1 convolutions lead from each map to the teacher's channels."""
        head = super().from_spec(dataclasses.replace(spec, channels=spec.channels[:3], strides=spec.strides[:3]))
        head.adapters = nn.ModuleList(nn.Conv2d(own, to, 1) for own, to in zip(spec.channels, CHANNELS, strict=False))
        return head

    def forward(self, features: list[Tensor]) -> Any:
        """Return the head's output; in training mode with the mean smooth-L1 distance to standardised maps."""
        *maps, images = features
        output = super().forward(maps[:3])
        if not self.training:
            return output
        model, wanted = teacher()
        with torch.no_grad():
            model.to(images.device)(images)
        distances = [
            F.smooth_l1_loss(adapter(x).float(), F.batch_norm(wanted[layer].float(), None, None, training=True))
            for adapter, x, layer in zip(self.adapters, maps, MAPS.values(), strict=True)
        ]
        return [*output, torch.stack(distances).mean()]

    def criterion(self, settings: LossSettings) -> AnchorFreeLoss:
        """Return the loss that trains this head."""
        return DistillationLoss(self, settings)


def main(
    name: str = "tessera-n",
    *,
    images: int = 16_000,
    epochs: int = 8,
    project: Path = Path("runs/train"),
    results: Path = MODELS_DIR,
) -> None:
    """Train model `name` on synthetic shapes at 192 px; save it without the teacher's parts in half precision."""
    teacher()  # fails early without its weights
    run, root = project / f"pretrained-{name}", datasets_dir() / f"shapes-{images}"
    run.mkdir(parents=True, exist_ok=True)
    write_shapes(root, train=images, val=images // 50, size=192)
    data, model = run.with_suffix(".yaml"), project / f"{name}-distilled.yaml"
    data.write_text(f"path: {root.absolute()}\ntrain: images/train\nval: images/val\nnames: [{', '.join(NAMES)}]\n")
    before, row, after = (MODELS_DIR / f"{name}.yaml").read_text().partition("[[15, 18, 21], 1, DetectFree")
    assert row
    model.write_text(f"{before}[{[*MAPS, IMAGES]}, 1, DetectFree{after}")
    tessera.train(
        head=DetectDistilled,
        cfg=model,
        data=data,
        imgsz=192,
        batch_size=32,
        epochs=epochs,
        optimizer="AdamW",  # Muon's larger weights adapt too slowly afterwards
        noval=True,
        project=project,
        name=run.name,
        exist_ok=True,
    )
    weights = load_weights(run / "weights" / "last.pt")
    assert weights.checkpoint is not None
    tensors = {
        key: tensor.half() if tensor.is_floating_point() else tensor
        for key, tensor in weights.state_dict.items()
        if ".adapters." not in key
    }
    names = [f"{DRAWN}{shape}" for shape in weights.names]  # choose the recipe, and are no dataset's
    plain = DetectionModel(f"{name}.yaml", names=names).yaml
    start = {**weights.checkpoint, "config": {}, "names": names, "ema": tensors, "model_yaml": plain}
    save_checkpoint(results / f"{name}.pt", start)


if __name__ == "__main__":
    main(*sys.argv[1:2])
