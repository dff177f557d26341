"""The flags of val.py."""

from __future__ import annotations

from dataclasses import dataclass

from tessera.utils.errors import ConfigError
from tessera.utils.flags.measuring import MeasuringConfig
from tessera.utils.flags.options import option, runtime_option

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
    runtime: str = runtime_option()
    noreport: bool = option(False, "write no report.html", kind=bool)
    find_errors: bool = option(False, "rank the labels that are likely wrong, as a list and a page", kind=bool)
    folds: int = option(
        0,
        "with --find-errors --task train: train again, in so many parts, so that no part is judged by a detector that "
        "has seen it; 0 = as it is",
        kind=int,
        low=2,
        high=100,
    )
    epochs: int = option(0, "of each training of --folds; 0 = as the weights were trained", kind=int, low=1)
    corrected: str = option("", "a new folder for a copy of the dataset with the suggestions of --find-errors applied")
    corrected_score: float = option(
        0.8, "score from which on --corrected applies a suggestion", kind=float, low=0, high=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("folds", "epochs", "corrected", "corrected_score"):
            if getattr(self, name) != getattr(type(self), name):
                flag = f"--{name.replace('_', '-')}"
                if not self.find_errors:
                    raise ConfigError(f"{flag} without --find-errors: no label is judged. Give --find-errors too.")
                if name == "epochs" and not self.folds:
                    raise ConfigError(
                        "--epochs without --folds: nothing is trained. Give --folds too, or leave it out."
                    )
                if name == "corrected_score" and not self.corrected:
                    raise ConfigError(
                        "--corrected-score without --corrected: no copy is written. Give --corrected too."
                    )
        if self.find_errors:
            self._check_finding()

    def _check_finding(self) -> None:
        """Refuse what --find-errors cannot go with."""
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
        if self.folds and self.runtime != "auto":
            raise ConfigError(
                f"--folds {self.folds} --runtime {self.runtime}: torch computes each fold. Leave --runtime out."
            )
        if self.folds and self.task != "train":
            raise ConfigError(
                f"--folds {self.folds} --task {self.task}: what is trained on is judged. Give --task train."
            )
