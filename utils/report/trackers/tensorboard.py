"""TensorBoard, the default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tessera.models.detector import GraphNode
from tessera.utils.machine.opencv import cv2
from tessera.utils.pixels import Pixels
from tessera.utils.report.trackers.tracker import Tracker

# An event file holds some 25 pictures, and is read whole by every viewer. The pictures themselves lie beside it.
_MOST_BYTES, _QUALITY = 60_000, 60
_SIDES = (1200, 1000, 850, 700, 600, 500, 400, 300)  # pixels of the longer side


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
            raise ValueError(f"{path} is not a picture")
        shown, encoded = _small_jpeg(np.asarray(pixels, np.uint8))
        picture = Summary.Image(height=shown.shape[0], width=shown.shape[1], colorspace=3, encoded_image_string=encoded)
        self._writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=tag, image=picture)]), step)

    def graph(self, nodes: Sequence[GraphNode]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.graph_pb2 import GraphDef

        graph = GraphDef()
        for node in nodes:
            made = graph.node.add(name=node.name, op=node.kind, input=node.inputs)
            if node.parameters:
                made.attr["parameters"].i = node.parameters
        self._writer.file_writer.add_event(Event(graph_def=graph.SerializeToString()))

    def checkpoint(self, path: Path) -> None:
        """Nothing: TensorBoard keeps no files, and the checkpoint lies beside its events."""

    def close(self) -> None:
        self._writer.close()


def _small_jpeg(pixels: Pixels) -> tuple[Pixels, bytes]:
    """A picture (h, w, 3) BGR shrunk until its JPEG has at most `_MOST_BYTES`, and that JPEG."""
    shown = pixels
    for side in _SIDES:
        scale = side / max(pixels.shape)
        if scale < 1:
            shown = np.asarray(cv2.resize(pixels, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA), np.uint8)
        encoded = cv2.imencode(".jpg", shown, [cv2.IMWRITE_JPEG_QUALITY, _QUALITY])[1].tobytes()
        if len(encoded) <= _MOST_BYTES:
            break
    return shown, encoded
