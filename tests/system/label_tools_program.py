"""Reads files of Tessera with the packages of labelling tools, and prints what they found as JSON.

Runs in an environment of its own: these packages bring another OpenCV. `FORMAT PATH` are its arguments: coco, voc, yolo
and cvat are read by Datumaro, label-studio by Label Studio's SDK.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def by_datumaro(kind: str, path: Path) -> list[Any]:
    """Of each image its name and objects: class, corners in pixels, whether it is a crowd or difficult."""
    from datumaro import Dataset
    from datumaro.components.annotation import AnnotationType

    found = []
    dataset = Dataset.import_from(str(path), kind)
    names = [label.name for label in dataset.categories()[AnnotationType.label]]
    for item in dataset:
        boxes = [one for one in item.annotations if one.type == AnnotationType.bbox]
        rows = []
        for one in boxes:
            x, y, width, height = one.get_bbox()
            crowd = bool(one.attributes.get("is_crowd") or one.attributes.get("difficult"))
            rows.append([names[one.label], *(round(float(side), 2) for side in (x, y, x + width, y + height)), crowd])
        found.append([item.id, sorted(rows)])
    return sorted(found)


def by_label_studio(path: Path) -> list[Any]:
    """The errors of each prediction, after its task was looked at."""
    from label_studio_sdk.label_interface import LabelInterface

    interface = LabelInterface((path / "label-studio.xml").read_text())
    tasks = json.loads((path / "predictions.label-studio.json").read_text())
    assert all(interface.validate_task({"data": task["data"]}) for task in tasks)
    return [interface.validate_prediction(one, return_errors=True) for task in tasks for one in task["predictions"]]


if __name__ == "__main__":
    kind, path = sys.argv[1], Path(sys.argv[2])
    print(json.dumps(by_label_studio(path) if kind == "label-studio" else by_datumaro(kind, path)))
