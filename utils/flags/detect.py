"""The flags of detect.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tessera.utils.errors import ConfigError
from tessera.utils.flags.options import Options, option, parsed_confidence, threads_option, trust_file_option


@dataclass(frozen=True)
class DetectConfig(Options):
    """Find objects in pictures, videos and streams."""

    program = "detect.py"

    weights: str = option(
        "yolov5n.pt", "checkpoint: ours, or a published one by name (--list-weights); or an exported file"
    )
    trust_file: bool = trust_file_option()
    source: tuple[str, ...] = option(
        (), "pictures, videos, folders, globs, lists (.txt), addresses, camera numbers; - = standard input", many=True
    )
    imgsz: int = option(
        0, "long side, pixels; 0 = what the weights were trained at", "--img", "--img-size", kind=int, low=32, high=8192
    )
    conf_thres: str = option(
        "", "smallest confidence; auto = the best of each class (default: the weights' best, else 0.25)", "--conf"
    )
    iou_thres: float = option(0.45, "IoU above which NMS drops the weaker box", "--iou", kind=float, low=0, high=1)
    max_det: int = option(1000, "detections a picture", kind=int, low=1, high=30_000)
    device: str = option("", "cpu, 0 or mps")
    threads: int = threads_option()
    save_txt: bool = option(False, "write a label file for each picture", kind=bool)
    auto_label: bool = option(
        False, "write label files to train with: each class above its best confidence, noted as a model's", kind=bool
    )
    data: str = option("", "with --auto-label: dataset YAML whose class numbers the labels get")
    save_csv: bool = option(False, "write predictions.csv", kind=bool)
    save_json: bool = option(False, "write predictions.jsonl, a line for each picture and event", kind=bool)
    save_conf: bool = option(False, "with confidences in the label files", kind=bool)
    save_crop: bool = option(False, "write each detection as a picture of its own", kind=bool)
    nosave: bool = option(False, "write no pictures and videos with boxes", kind=bool)
    classes: tuple[str, ...] = option((), "find these alone: numbers or names", many=True)
    agnostic_nms: bool = option(False, "boxes of different classes suppress each other", kind=bool)
    augment: bool = option(False, "test-time augmentation", kind=bool)
    project: str = option("runs/detect", "folder of runs")
    name: str = option("exp", "name of the run's folder")
    exist_ok: bool = option(False, "write into an existing folder instead of a new one", kind=bool)
    line_thickness: int = option(0, "pixels; 0 = what suits the picture", kind=int, low=0, high=200)
    hide_labels: bool = option(False, "draw boxes without names", kind=bool)
    hide_conf: bool = option(False, "draw names without confidences", kind=bool)
    half: bool = option(False, "half precision", kind=bool)
    tile: int = option(
        0, "take larger pictures in tiles of so many pixels, and as a whole; 0 = as a whole alone", kind=int, low=32
    )
    overlap: float = option(0.2, "least share of a tile that the next one overlaps", kind=float, low=0, high=0.9)
    track: bool = option(False, "of videos and streams, each object's id over the frames", kind=bool)
    vid_stride: int = option(1, "of videos and streams, each so-many-th frame", kind=int, low=1)
    every_frame: bool = option(False, "of streams, all frames in order instead of the newest one", kind=bool)

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.confidence
        if self.auto_label and (self.save_conf or self.track):
            flag = "--save-conf" if self.save_conf else "--track"
            raise ConfigError(f"--auto-label with {flag}: a row of labels has no room for it. Give one of the two.")

    @property
    def confidence(self) -> float | Literal["auto"] | None:
        """`--conf-thres` as a `Detector` takes it."""
        if (self.conf_thres or "auto" * self.auto_label).strip().lower() == "auto":
            return "auto"
        return parsed_confidence(self.conf_thres, "a number from 0 to 1, or auto")
