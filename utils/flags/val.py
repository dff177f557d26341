"""The flags of val.py."""

from __future__ import annotations

from dataclasses import dataclass

from tessera.utils.errors import ConfigError
from tessera.utils.flags.measuring import MeasuringConfig
from tessera.utils.flags.options import option

MOST_CONF = 0.01  # with --find-errors


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
    find_errors: bool = option(False, "rank the labels that are likely wrong, as a list and a page", kind=bool)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.find_errors:
            return
        if self.task == "speed":
            raise ConfigError(
                "--find-errors --task speed: finds above the confidence of a deployed detector do not tell which "
                "labels nothing supports. Give the split: --task val, train or test."
            )
        if self.single_cls:
            raise ConfigError(
                "--find-errors --single-cls: wrong classes would not be seen, and missing labels would have none. "
                "Leave --single-cls out."
            )
        if self.conf_thres > MOST_CONF:
            raise ConfigError(
                f"--find-errors --conf-thres {self.conf_thres:g}: labels that the detector supports weakly would look "
                f"like those of nothing. Leave --conf-thres out, or give at most {MOST_CONF:g}."
            )
