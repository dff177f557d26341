"""Validation: images per second.

uv run python -m tests.benchmarks.val --data coco128.yaml --weights yolov5n.pt --imgsz 640
"""

from __future__ import annotations

import copy

import cv2
import numpy as np
import torch
from torchvision.ops import batched_nms

from tessera.data.feed.image_sizes import rect_val_shapes
from tessera.data.feed.image_store import ImageStore
from tessera.data.feed.loader import build_val_loader
from tessera.models.detector import DetectionModel
from tessera.utils.boxes import cxcywh_to_xyxy
from tessera.utils.checkpoints.weights import load_weights, resolve_weights
from tessera.utils.engine.precision import Precision
from tessera.utils.evaluation.evaluate import evaluate
from tessera.utils.evaluation.network import fused_copy, network_of
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.machine.host import keep_malloc_memory
from tessera.utils.ranks.world import World
from tessera.utils.types import DatasetIndex
from tests.benchmarks.harness import OwnProcess, indexed, parser, rounds, show

MOST = 30_000  # candidates of an image


def plain_nms(decoded: torch.Tensor, conf: float = 0.001, iou: float = 0.6) -> list[torch.Tensor]:
    """Image by image: threshold, sort, torchvision's NMS per class, and the best 300."""
    found = []
    for rows in decoded:
        rows = rows[rows[:, 4] > conf]
        scores = rows[:, 5:] * rows[:, 4:5]
        index, classes = (scores > conf).nonzero(as_tuple=True)
        scores = scores[index, classes]
        order = scores.argsort(descending=True)[:MOST]
        boxes = cxcywh_to_xyxy(rows[index[order], :4])
        keep = batched_nms(boxes, scores[order], classes[order], iou)[:300]
        found.append(torch.cat([boxes[keep], scores[order][keep, None], classes[order][keep, None].float()], 1))
    return found


def plain_validation(model: DetectionModel, index: DatasetIndex, imgsz: int, batch: int):  # type: ignore[no-untyped-def]
    """Sorted by shape, channels first, float32, one batch after the other."""
    model = copy.deepcopy(model).eval().fuse().to(memory_format=torch.contiguous_format)
    shapes = rect_val_shapes(index.sizes_hw, imgsz, 32)
    order = np.lexsort((shapes[:, 1], shapes[:, 0]))

    @torch.no_grad()
    def run() -> int:
        for start in range(0, len(order), batch):
            numbers = order[start : start + batch]
            height, width = shapes[numbers].max(0).tolist()
            images = np.full((len(numbers), 3, height, width), 114, np.uint8)
            for row, number in enumerate(numbers):
                image = cv2.imread(str(index.path(int(number))))
                assert image is not None
                ratio = imgsz / max(image.shape[:2])
                image = cv2.resize(image, None, fx=ratio, fy=ratio, interpolation=cv2.INTER_AREA)
                top, left = (height - image.shape[0]) // 2, (width - image.shape[1]) // 2
                place = images[row, :, top : top + image.shape[0], left : left + image.shape[1]]
                place[:] = image.transpose(2, 0, 1)[::-1]
            decoded, _ = model(torch.from_numpy(images).float() / 255)
            plain_nms(decoded)
        return len(order)

    return run


def our_validation(model: DetectionModel, index: DatasetIndex, imgsz: int, batch: int, precision: Precision):  # type: ignore[no-untyped-def]
    """`evaluate` as val.py calls it, matching and metrics included."""
    keep_malloc_memory()
    network, said = network_of(fused_copy(model, Accelerator()), imgsz, Accelerator(), precision), []
    store = ImageStore(index, imgsz, "area")
    loader = build_val_loader(store, World(), batch_size=batch, stride=32, workers=0)

    def run() -> int:
        metrics = evaluate(network, loader, World()).metrics
        if not said:
            said.append(f"  {precision.name}: mAP50 {metrics.map50:.4f}, mAP50-95 {metrics.map:.4f}")
            print(said[0], flush=True)
        return metrics.images

    return run


def main() -> None:
    given = parser(__doc__, data="coco128.yaml", rounds=7, weights="yolov5n.pt", imgsz=640, batch=32).parse_args()
    index = indexed(given.data, "val")
    weights = load_weights(resolve_weights(given.weights))
    model = DetectionModel(weights.model_yaml, names=index.names)
    model.load_state_dict(weights.state_dict)
    cpu = Accelerator()
    common = (model, index, given.imgsz, given.batch)
    rivals = {
        "plain: channels first, fp32": OwnProcess(plain_validation, *common),
        "Tessera, fp32": OwnProcess(our_validation, *common, Precision(cpu, torch.float32)),
        "Tessera, bf16": OwnProcess(our_validation, *common, Precision(cpu, torch.bfloat16)),
    }
    show(rounds(rivals, given.rounds), "plain: channels first, fp32")


if __name__ == "__main__":
    main()
