"""The flags of val.py."""

from __future__ import annotations

from dataclasses import dataclass

from tessera.utils.flags.measuring import MeasuringConfig
from tessera.utils.flags.options import option


@dataclass(frozen=True)
class ValConfig(MeasuringConfig):
    """Measure a detector."""

    program = "val.py"

    weights: str = option("yolov5n.pt", "checkpoint: ours, or a published one by name (--list-weights)")
    task: str = option("val", "split to measure, or speed", choices=("val", "train", "test", "speed"))
    save_txt: bool = option(False, "write a label file for each image", kind=bool)
    save_conf: bool = option(False, "with confidences in the label files", kind=bool)
    save_json: bool = option(False, "write COCO results", kind=bool)
    noreport: bool = option(False, "write no report.html", kind=bool)
