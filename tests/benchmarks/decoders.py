"""JPEG decoders, to uint8 (H, W, 3) RGB, one thread: OpenCV, torchvision and, where it is installed, simplejpeg.

uv run --with simplejpeg python -m tests.benchmarks.decoders --data coco128.yaml
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cv2
import numpy as np
import torch
from torchvision.io import decode_jpeg

from tests.benchmarks.rounds import indexed, parser, rounds, show

try:
    import simplejpeg
except ImportError:
    simplejpeg = None


def main() -> None:
    given = parser(__doc__, data="shapes.yaml", rounds=7).parse_args()
    torch.set_num_threads(1)
    index = indexed(given.data)
    files = [np.fromfile(index.path(number), np.uint8) for number in range(min(len(index), 64))]
    tensors, texts = [torch.from_numpy(file) for file in files], [file.tobytes() for file in files]

    def each(decode: Callable[[Any], object], encoded: list[Any]) -> Callable[[], int]:
        return lambda: sum(decode(one) is not None for one in encoded)

    rivals = {
        "OpenCV": each(lambda file: cv2.cvtColor(cv2.imdecode(file, cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB), files),
        "OpenCV, straight to RGB": each(lambda file: cv2.imdecode(file, cv2.IMREAD_COLOR_RGB), files),
        "torchvision, turned to channels last": each(
            lambda file: decode_jpeg(file).permute(1, 2, 0).contiguous(), tensors
        ),
    }
    if simplejpeg is not None:
        rivals["simplejpeg"] = each(lambda text: simplejpeg.decode_jpeg(text, "RGB"), texts)
    show(rounds(rivals, given.rounds), "OpenCV")


if __name__ == "__main__":
    main()
