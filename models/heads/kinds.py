"""Which heads there are, by their name in a model YAML."""

from __future__ import annotations

from tessera.models.heads.anchor.head import Detect
from tessera.models.heads.free.head import DetectFree
from tessera.models.heads.head import Head
from tessera.models.heads.yolov9.head import DetectYOLOv9
from tessera.models.heads.yolox.head import DetectYOLOX

HEADS: dict[str, type[Head]] = {
    "Detect": Detect,
    "DetectFree": DetectFree,
    "DetectYOLOX": DetectYOLOX,
    "DetectYOLOv9": DetectYOLOv9,
}
