"""TensorBoard tracker, the default."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tessera.utils.machine.opencv import cv2
from tessera.utils.report.trackers.servers import Tracker

# Viewers read an event file whole, with some 25 images: these are small copies of the files beside it.
_SIDE, _QUALITY = 800, 50  # pixels of the longer side


class TensorBoard(Tracker):
    """Event files in the run directory."""

    module = "torch.utils.tensorboard"
    package = "tensorboard"

    def __init__(self, api: Any, run: Path, config: Mapping[str, Any], previous_id: str | None) -> None:
        self._writer = api.SummaryWriter(log_dir=str(run))
        rows = "\n".join(f"| {key} | {value} |" for key, value in config.items())
        self._writer.add_text("config", f"| key | value |\n|---|---|\n{rows}", 0)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def image(self, tag: str, path: Path, step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        pixels = cv2.imread(str(path))
        if pixels is None:
            raise ValueError(f"{path} is not an image")
        scale = min(_SIDE / max(pixels.shape), 1)
        shown = cv2.resize(pixels, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA)
        encoded = cv2.imencode(".jpg", shown, [cv2.IMWRITE_JPEG_QUALITY, _QUALITY])[1].tobytes()
        image = Summary.Image(height=shown.shape[0], width=shown.shape[1], colorspace=3, encoded_image_string=encoded)
        self._writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=tag, image=image)]), step)

    def close(self) -> None:
        self._writer.close()
