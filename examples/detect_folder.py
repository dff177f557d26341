"""Run a detector over a folder of images, and count objects with supervision.

uv run -m examples.detect_folder runs/train/shapes/weights/best.pt path/to/images
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import supervision as sv

import tessera


def main(weights: Path, images: Path) -> Counter[str]:
    """Print the detections of every image; return how many objects of each class there are."""
    detector = tessera.Detector(weights)
    counts: Counter[str] = Counter()
    for result in detector(images):
        detections = sv.Detections(xyxy=result.boxes_xyxy, confidence=result.scores, class_id=result.classes)
        print(f"{result.source}: {len(detections)} objects, the largest of {max(detections.area, default=0):.0f} px²")
        counts.update(box.name for box in result)
    return counts


if __name__ == "__main__":
    print(main(Path(sys.argv[1]), Path(sys.argv[2])))
