"""The model of a run, known before it is made."""

from __future__ import annotations

import pytest

from models.detector import DetectionModel
from utils.checkpoints.start import build_model, head_class
from utils.checkpoints.weights import Weights
from utils.config import TrainConfig
from utils.errors import ConfigError

NAMES = ("cat", "dog")
FILES = {"yolov5n.yaml": "Detect", "tessera-n.yaml": "DetectFree"}


@pytest.mark.parametrize("cfg", FILES)
def test_the_head_is_that_of_the_model_that_is_built(cfg: str) -> None:
    config = TrainConfig(cfg=cfg)
    built = build_model(config, NAMES)
    assert head_class(config, NAMES) is type(built.head) and type(built.head).__name__ == FILES[cfg]
    weights = Weights(built.state_dict(), built.yaml, NAMES, "a file")
    assert head_class(TrainConfig(weights="last.pt"), NAMES, weights) is type(built.head), "the weights bring the model"
    (other,) = FILES.keys() - {cfg}
    asked = TrainConfig(cfg=other, weights="last.pt")
    assert head_class(asked, NAMES, weights).__name__ == FILES[other], "but --cfg wins"


def test_without_either_it_is_the_default_model() -> None:
    assert isinstance(DetectionModel("yolov5n.yaml", nc=2).head, head_class(TrainConfig(), NAMES))
    with pytest.raises(ConfigError, match="yolov5q"):
        head_class(TrainConfig(cfg="yolov5q.yaml"), NAMES)
