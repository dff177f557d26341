"""Flags of export.py."""

from __future__ import annotations

from dataclasses import dataclass

from tessera.utils.errors import ConfigError
from tessera.utils.flags.options import Options, head_option, imgsz_option, option, parsed_confidence, weights_option
from tessera.utils.image_size import ImageSize


@dataclass(frozen=True)
class ExportConfig(Options):
    """Export a detector."""

    program = "export.py"

    weights: str = weights_option("checkpoint, or published file by name (--list-weights)")
    head: str = head_option()
    include: tuple[str, ...] = option(("onnx",), "formats to write", many=True)
    imgsz: ImageSize = imgsz_option(0, "0 = as trained; with --raw fixed")
    output: str = option(
        "", "output folder, created if missing (default: the checkpoint's; for a bare name, the working directory)"
    )
    raw: bool = option(False, "export the network alone: letterboxed images in, raw predictions out", kind=bool)
    batched: bool = option(False, "accept a batch of equally sized images: (B, H, W, 3)", kind=bool)
    half: bool = option(False, "float16 weights and activations", kind=bool)
    int8: bool = option(False, "8-bit quantisation, calibrated on the training images", kind=bool)
    end2end: bool = option(False, "use the one-to-one branch, without NMS", kind=bool)
    conf_thres: str = option(
        "", "default confidence threshold of the file (default: where F1 is best, else 0.25)", "--conf"
    )
    iou_thres: float = option(0.45, "default NMS IoU threshold of the file", "--iou", kind=float, low=0, high=1)
    max_det: int = option(1000, "default maximum detections per image of the file", kind=int, low=1, high=30_000)
    data: str = option("", "dataset YAML for calibration and evaluation (default: the one the weights were trained on)")
    max_drop: float = option(0.01, "largest accepted loss of mAP50-95", kind=float, low=0, high=1)
    device: str = option("cpu", "device that exports are evaluated on: cpu, 0 or mps")
    opset: int = option(18, "ONNX opset version", kind=int, low=18, high=23)
    license: str = option("", "licence of the weights, stored in the metadata")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.raw and self.batched:
            raise ConfigError("--raw --batched: the raw network takes any batch size. Leave out --batched.")
        if self.half and self.int8:
            raise ConfigError("--half --int8: a file has one precision. Leave out one of them.")
        parsed_confidence(self.conf_thres)
