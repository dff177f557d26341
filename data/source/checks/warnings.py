"""What a run is warned of before it uses a dataset."""

from __future__ import annotations

from tessera.data.source.checks.boxes import flat
from tessera.data.source.index import problem_report
from tessera.data.source.refusals import without_objects
from tessera.utils.text import counted
from tessera.utils.types import DatasetIndex


def index_warnings(index: DatasetIndex) -> list[str]:
    """What a run is warned of before it uses an index; it goes on all the same.

    Boxes without an area count in a validation as they do in COCO's metric: as objects that nothing can be matched to.
    """
    found = list(filter(None, [problem_report(index)]))
    without_area = int(flat(index.boxes_xyxy).sum())
    if without_area:
        use = (
            "nothing is learnt from such a box"
            if index.split == "train"
            else "such a box is an object that is never found"
        )
        every = "all " if without_area == len(index.classes) > 1 else ""
        boxes = counted(without_area, "box")
        found.append(f"{index.split}: {every}{boxes} without width or height: {use}; --check-data says where")
    if not len(index.classes):
        found.append(without_objects(index.split, len(index)))
    return found
