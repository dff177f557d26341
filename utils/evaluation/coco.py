"""COCO's numbering: 80 classes in a row, but category ids from 1 to 90 with ten left out (Lin et al. 2014)."""

from __future__ import annotations

from collections.abc import Sequence

# fmt: off
COCO_NAMES = (
    "person", "bicycle", "car", "motorcycle", "airplane", "bus", "train", "truck", "boat", "traffic light",
    "fire hydrant", "stop sign", "parking meter", "bench", "bird", "cat", "dog", "horse", "sheep", "cow", "elephant",
    "bear", "zebra", "giraffe", "backpack", "umbrella", "handbag", "tie", "suitcase", "frisbee", "skis", "snowboard",
    "sports ball", "kite", "baseball bat", "baseball glove", "skateboard", "surfboard", "tennis racket", "bottle",
    "wine glass", "cup", "fork", "knife", "spoon", "bowl", "banana", "apple", "sandwich", "orange", "broccoli",
    "carrot", "hot dog", "pizza", "donut", "cake", "chair", "couch", "potted plant", "bed", "dining table", "toilet",
    "tv", "laptop", "mouse", "remote", "keyboard", "cell phone", "microwave", "oven", "toaster", "sink",
    "refrigerator", "book", "clock", "vase", "scissors", "teddy bear", "hair drier", "toothbrush",
)
# fmt: on
_UNUSED_IDS = frozenset({12, 26, 29, 30, 45, 66, 68, 69, 71, 83})
COCO_IDS = tuple(i for i in range(1, 91) if i not in _UNUSED_IDS)


def coco_category_ids(names: Sequence[str]) -> tuple[int, ...]:
    """Category id of each class: COCO's own where `names` are COCO's 80 in order, else the class index."""
    return COCO_IDS if tuple(names) == COCO_NAMES else tuple(range(len(names)))
