"""The flags of export.py."""

from __future__ import annotations

from dataclasses import dataclass

from tessera.utils.errors import ConfigError
from tessera.utils.flags.options import Options, option, parsed_confidence


@dataclass(frozen=True)
class ExportConfig(Options):
    """Export a detector."""

    program = "export.py"

    weights: str = option("yolov5n.pt", "checkpoint: ours, or a published one by name (--list-weights)")
    include: tuple[str, ...] = option(("onnx",), "formats", many=True)
    imgsz: tuple[int, ...] = option(
        (),
        "long side in pixels (default: as trained); with --raw the one size, a side or height and width (default: any)",
        "--img",
        "--img-size",
        kind=int,
        low=32,
        high=8192,
        many=True,
    )
    output: str = option("", "folder for the files, made where it is missing (default: the checkpoint's)")
    raw: bool = option(False, "the bare network: letterboxed images in, predictions out", kind=bool)
    batched: bool = option(False, "several pictures of one size at once: images (B, H, W, 3)", kind=bool)
    half: bool = option(False, "weights and features in float16", kind=bool)
    int8: bool = option(False, "quantised, calibrated on the training pictures", kind=bool)
    end2end: bool = option(False, "boxes of the one-to-one branch, without suppression", kind=bool)
    conf_thres: str = option("", "confidence that the file recommends (default: where F1 is best, else 0.25)", "--conf")
    iou_thres: float = option(
        0.45, "IoU above which NMS drops the weaker box, that it recommends", "--iou", kind=float, low=0, high=1
    )
    max_det: int = option(1000, "detections a picture, that it recommends", kind=int, low=1, high=30_000)
    data: str = option("", "dataset YAML to calibrate and measure on (default: the one the weights were trained on)")
    max_drop: float = option(0.01, "largest loss of mAP50-95 that is no failure", kind=float, low=0, high=1)
    device: str = option("cpu", "what exports are measured on: cpu, 0 or mps")
    opset: int = option(18, "version of ONNX's operators", kind=int, low=18, high=23)
    license: str = option("", "licence of the weights, for the metadata")

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.imgsz) > 2 or (len(self.imgsz) == 2 and not self.raw):
            found = " ".join(map(str, self.imgsz))
            raise ConfigError(
                f"--imgsz {found}: expected one number, the long side, or with --raw two, height and width. The "
                "other side follows from each picture."
            )
        if self.raw and self.batched:
            raise ConfigError("--raw --batched: the bare network takes any number of images. Leave --batched out.")
        if self.half and self.int8:
            raise ConfigError("--half --int8: a file is either. Leave one of them out.")
        parsed_confidence(self.conf_thres)
