"""Flags of val.py, and those it shares with compare.py."""

from __future__ import annotations

from dataclasses import dataclass

from tessera.utils.errors import ConfigError
from tessera.utils.flags.options import (
    Options,
    head_option,
    imgsz_option,
    option,
    threads_option,
    trust_file_option,
    weights_option,
)
from tessera.utils.image_size import ImageSize
from tessera.utils.thresholds import MAX_DET, MOST_DET, Threshold

ALL_CONF = 0.001  # confidence from which on detections count for mAP
MOST_CONF = 0.01  # with --find-errors


@dataclass(frozen=True)
class EvaluationConfig(Options):
    """Flags shared by val.py and compare.py."""

    data: str = option("", "dataset YAML, searched for in data/ too (default: the one the weights were trained on)")
    trust_file: bool = trust_file_option()
    head: str = head_option()
    batch_size: int = option(32, "batch size per rank", "--batch", kind=int, low=1)
    imgsz: ImageSize = imgsz_option(0, "0 = as trained")
    conf_thres: float = option(
        ALL_CONF,
        "confidence threshold of mAP; a higher one is also that of P, R and errors, else the best F1's",
        "--conf",
        kind=float,
        low=0,
        high=1,
    )
    iou_thres: float = option(0.6, "NMS IoU threshold", "--iou", kind=float, low=0, high=1)
    max_det: int = option(MAX_DET, "maximum detections per image", kind=int, low=1, high=MOST_DET)
    task: str = option("val", "split to evaluate", choices=("val", "train", "test"))
    device: str = option("", "cpu, 0, 0,1 or mps; under torchrun each rank takes its own GPU")
    threads: int = threads_option()
    workers: int = option(8, "data loader workers per rank, at most its CPUs", kind=int, low=0, high=1024)
    single_cls: bool = option(False, "treat all classes as one", kind=bool)
    augment: bool = option(False, "test-time augmentation", kind=bool)
    end2end: bool = option(False, "use the one-to-one branch, without NMS", kind=bool)
    verbose: bool = option(False, "print metrics per class", kind=bool)
    tile: int = option(
        0, "split large images into tiles of N pixels, in addition to the whole image (0 = off)", kind=int, low=32
    )
    overlap: float = option(
        0.2, "minimum overlap of neighbouring tiles, as a fraction of a tile", kind=float, low=0, high=0.9
    )
    project: str = option("runs/val", "parent folder of run directories")
    name: str = option("exp", "name of the run directory")
    exist_ok: bool = option(False, "write into an existing run directory instead of a new one", kind=bool)
    half: bool = option(False, "compute in half precision", kind=bool)
    local_rank: int = option(-1, "set by torch.distributed.launch", "--local_rank", kind=int, low=-1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.end2end and self.augment:
            raise ConfigError(
                "--end2end --augment: merging the boxes of several sizes needs NMS. Leave out one of them."
            )

    @property
    def threshold(self) -> Threshold | None:
        """The confidence of precision, recall and errors; None = that of the best F1."""
        return Threshold(self.conf_thres, "--conf-thres") if self.conf_thres > ALL_CONF else None


@dataclass(frozen=True)
class ValConfig(EvaluationConfig):
    """Evaluate a detector."""

    program = "val.py"

    weights: str = weights_option("checkpoint, exported file, or published file by name (--list-weights)")
    task: str = option(
        "val", "split to evaluate; speed = time it at deployment thresholds", choices=("val", "train", "test", "speed")
    )
    save_txt: bool = option(False, "save detections as YOLO label files", kind=bool)
    save_conf: bool = option(False, "add confidences to the label files", kind=bool)
    save_json: bool = option(False, "save detections as COCO results (predictions.json)", kind=bool)
    noreport: bool = option(False, "do not write report.html", kind=bool)
    find_errors: bool = option(False, "rank labels that are likely wrong: label_errors.jsonl and .html", kind=bool)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.find_errors:
            return
        if self.task == "speed":
            raise ConfigError(
                "--find-errors --task speed: detections above a deployment threshold do not show which labels lack "
                "support. Give the split: --task val, train or test."
            )
        if self.single_cls:
            raise ConfigError(
                "--find-errors --single-cls: wrong classes could not be detected, and missing labels would have no "
                "class. Leave out --single-cls."
            )
        if self.conf_thres > MOST_CONF:
            raise ConfigError(
                f"--find-errors --conf-thres {self.conf_thres:g}: labels with weak detections would look unsupported. "
                f"Leave out --conf-thres, or give at most {MOST_CONF:g}."
            )
