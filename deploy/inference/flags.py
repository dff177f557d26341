"""Flags of detect.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tessera.utils.errors import ConfigError
from tessera.utils.flags.options import (
    Options,
    head_option,
    imgsz_option,
    option,
    parsed_confidence,
    threads_option,
    trust_file_option,
    weights_option,
)
from tessera.utils.image_size import ImageSize


@dataclass(frozen=True)
class DetectConfig(Options):
    """Detect objects in images, videos and streams."""

    program = "detect.py"

    weights: str = weights_option("checkpoint, exported file, or published file by name (--list-weights)")
    trust_file: bool = trust_file_option()
    head: str = head_option()
    source: tuple[str, ...] = option(
        (), "images, videos, folders, globs, lists (.txt), URLs, camera numbers; - = standard input", many=True
    )
    imgsz: ImageSize = imgsz_option(0, "0 = as trained")
    conf_thres: str = option(
        "", "confidence threshold; auto = the best of each class (default: the weights' best, else 0.25)", "--conf"
    )
    iou_thres: float = option(0.45, "NMS IoU threshold", "--iou", kind=float, low=0, high=1)
    max_det: int = option(1000, "maximum detections per image", kind=int, low=1, high=30_000)
    device: str = option("", "cpu, 0 or mps")
    threads: int = threads_option()
    save_txt: bool = option(False, "save detections as YOLO label files", kind=bool)
    auto_label: bool = option(
        False, "save label files for training, each class above its best threshold, marked as model-made", kind=bool
    )
    data: str = option("", "with --auto-label: dataset YAML that gives the class numbers of the labels")
    save_csv: bool = option(False, "save predictions.csv", kind=bool)
    save_json: bool = option(False, "save predictions.jsonl, one line per image or event", kind=bool)
    save_conf: bool = option(False, "add confidences to the label files", kind=bool)
    save_crop: bool = option(False, "save each detection as a cropped image", kind=bool)
    nosave: bool = option(False, "do not save annotated images and videos", kind=bool)
    classes: tuple[str, ...] = option((), "detect only these classes, by number or name", many=True)
    agnostic_nms: bool = option(False, "class-agnostic NMS", kind=bool)
    augment: bool = option(False, "test-time augmentation", kind=bool)
    project: str = option("runs/detect", "parent folder of run directories")
    name: str = option("exp", "name of the run directory")
    exist_ok: bool = option(False, "write into an existing run directory instead of a new one", kind=bool)
    line_thickness: int = option(0, "line thickness of boxes in pixels (0 = by image size)", kind=int, low=0, high=200)
    hide_labels: bool = option(False, "draw boxes without class names", kind=bool)
    hide_conf: bool = option(False, "draw class names without confidences", kind=bool)
    half: bool = option(False, "compute in half precision", kind=bool)
    tile: int = option(
        0, "split large images into tiles of N pixels, in addition to the whole image (0 = off)", kind=int, low=32
    )
    overlap: float = option(
        0.2, "minimum overlap of neighbouring tiles, as a fraction of a tile", kind=float, low=0, high=0.9
    )
    track: bool = option(False, "track objects over the frames of videos and streams", kind=bool)
    vid_stride: int = option(1, "process every Nth frame of videos and streams", kind=int, low=1)
    every_frame: bool = option(False, "process every frame of streams in order, instead of the newest", kind=bool)

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.confidence
        if self.auto_label and (self.save_conf or self.track):
            flag = "--save-conf" if self.save_conf else "--track"
            raise ConfigError(
                f"--auto-label with {flag}: label files for training cannot hold it. Give one of the two."
            )

    @property
    def confidence(self) -> float | Literal["auto"] | None:
        """`--conf-thres` as a `Detector` takes it."""
        if (self.conf_thres or "auto" * self.auto_label).strip().lower() == "auto":
            return "auto"
        return parsed_confidence(self.conf_thres, "a number from 0 to 1, or auto")
