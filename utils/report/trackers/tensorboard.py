"""TensorBoard, the default."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from utils.machine.opencv import cv2
from utils.report.trackers.tracker import Tracker


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
        pixels = cv2.imread(str(path))
        if pixels is None:
            raise ValueError(f"{path} is not a picture")
        self._writer.add_image(tag, cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB), step, dataformats="HWC")

    def checkpoint(self, path: Path) -> None:
        """Nothing: TensorBoard keeps no files, and the checkpoint lies beside its events."""

    def close(self) -> None:
        self._writer.close()
