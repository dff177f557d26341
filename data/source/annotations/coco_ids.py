"""COCO's class names; and a dataset's own image and category ids, from its COCO files, for result files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tessera.utils.types import CocoId, CocoIds

# The names of COCO's 80 classes, in its order (Lin et al. 2014).
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


def result_ids(
    images: Sequence[CocoId],
    categories: Sequence[Mapping[int, str]],
    names: Sequence[str],
    single: bool,
    ignore: Sequence[str],
) -> CocoIds | None:
    """Return the ids that results are written with; None if files of one split use an id for two things.

    A class without a category of its name gets an id above all others.

    Args:
        images: ids of the images of a split.
        categories: category id → name, of each COCO file.
        names: the category that each class is named after.
        single: all classes count as one, with the id of the first trained category.
        ignore: names of the classes that are not trained.
    """
    by_name: dict[str, int] = {}
    by_id: dict[int, str] = {}
    for number, name in (item for of_file in categories for item in of_file.items()):
        if by_id.setdefault(number, name) != name or (len(categories) > 1 and by_name.get(name, number) != number):
            return None
        by_name.setdefault(name, number)
    if len(set(images)) < len(images) or not by_id:
        return None
    beyond = max(by_id) + 1
    own = [by_name.get(name, beyond + number) for number, name in enumerate(names)]
    if single:
        own = [min((number for number, name in by_id.items() if name not in ignore), default=beyond)]
    return CocoIds(tuple(images), tuple(own))
