"""What TensorBoard gets to show, and that its event file stays small."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tessera.models.detector import DetectionModel
from tessera.models.summary import count_parameters
from tessera.utils.report.trackers.loggers import Loggers


def test_pictures_in_an_event_file_stay_small_and_legible(tmp_path: Path) -> None:
    """Whatever they hold (noise compresses worst): a run has 26, and viewers read the file whole."""
    cv2.imwrite(str(tmp_path / "noise.jpg"), np.random.default_rng(0).integers(0, 256, (1000, 1000, 3), np.uint8))
    cv2.imwrite(str(tmp_path / "chart.png"), np.full((1200, 1500, 3), 255, np.uint8))
    with Loggers(["tensorboard"], tmp_path / "run", {}) as log:
        log.image("noise", tmp_path / "noise.jpg", 0)
        log.image("chart", tmp_path / "chart.png", 0)
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    (noise,), (chart,) = events.Images("noise"), events.Images("chart")
    assert len(noise.encoded_image_string) < 64_000 and noise.width >= 300
    assert (chart.width, chart.height) == (1200, 960)


def test_tensorboard_shows_the_layers_and_where_they_take_their_input_from(tmp_path: Path) -> None:
    model = DetectionModel("yolov5n.yaml")
    with Loggers(["tensorboard"], tmp_path, {}) as log:
        log.graph(model.graph())
    nodes = {node.name: node for node in EventAccumulator(str(tmp_path)).Reload().Graph().node}
    assert len(nodes) == 1 + len(model.model)
    assert list(nodes["0_Conv"].input) == ["images"] and nodes["0_Conv"].op == "Conv"
    assert list(nodes["12_Concat"].input) == ["11_Upsample", "6_C3"]
    assert list(nodes["24_Detect"].input) == ["17_C3", "20_C3", "23_C3"]
    assert sum(node.attr["parameters"].i for node in nodes.values()) == count_parameters(model)
    assert all(name in nodes for node in nodes.values() for name in node.input)
    (events,) = tmp_path.glob("events.*")
    assert events.stat().st_size < 10_000
