"""The flags of val.py, and those that it shares with compare.py."""

from __future__ import annotations

from dataclasses import dataclass

from tessera.utils.errors import ConfigError
from tessera.utils.flags.options import Options, option, threads_option, trust_file_option

MOST_CONF = 0.01  # with --find-errors


@dataclass(frozen=True)
class MeasuringConfig(Options):
    """How to measure."""

    data: str = option("", "dataset YAML, looked up in data/ (default: the one the weights were trained on)")
    trust_file: bool = trust_file_option()
    batch_size: int = option(32, "images a batch, on each rank", "--batch", kind=int, low=1)
    imgsz: int = option(0, "image size, pixels; 0 = as trained", "--img", "--img-size", kind=int, low=32, high=8192)
    conf_thres: float = option(0.001, "smallest confidence", "--conf", kind=float, low=0, high=1)
    iou_thres: float = option(0.6, "IoU above which NMS drops the weaker box", "--iou", kind=float, low=0, high=1)
    max_det: int = option(300, "detections an image", kind=int, low=1, high=30_000)
    task: str = option("val", "split to measure", choices=("val", "train", "test"))
    device: str = option("", "cpu, 0, 0,1 or mps; under torchrun each rank takes its own")
    threads: int = threads_option()
    workers: int = option(8, "loader workers a rank, capped by this process's CPUs", kind=int, low=0, high=1024)
    single_cls: bool = option(False, "all classes become one", kind=bool)
    augment: bool = option(False, "test-time augmentation", kind=bool)
    end2end: bool = option(False, "boxes of the one-to-one branch, without suppression", kind=bool)
    verbose: bool = option(False, "print a line for each class", kind=bool)
    tile: int = option(0, "larger images in tiles of so many pixels, and as a whole; 0 = as a whole", kind=int, low=32)
    overlap: float = option(0.2, "least share of a tile that the next one overlaps", kind=float, low=0, high=0.9)
    project: str = option("runs/val", "folder of runs")
    name: str = option("exp", "name of the run's folder")
    exist_ok: bool = option(False, "write into an existing folder instead of a new one", kind=bool)
    half: bool = option(False, "half precision", kind=bool)
    local_rank: int = option(-1, "set by torch.distributed.launch", "--local_rank", kind=int, low=-1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.end2end and self.augment:
            raise ConfigError("--end2end --augment: boxes of several sizes need suppression. Leave one of them out.")


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
