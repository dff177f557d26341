"""The model of a run, known before it is made."""

from __future__ import annotations

import dataclasses

import pytest

from tessera.models.detector import DetectionModel
from tessera.utils.checkpoints.start import DEFAULT_MODEL, build_model, described_model, head_class
from tessera.utils.checkpoints.weights import Weights
from tessera.utils.config import TrainConfig
from tessera.utils.errors import ConfigError

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


@pytest.mark.parametrize("cfg", FILES)
def test_what_starts_anew_is_told_apart(cfg: str, caplog: pytest.LogCaptureFixture) -> None:
    other = {"yolov5n.yaml": "yolov5n-free.yaml", "tessera-n.yaml": "yolov5n.yaml"}[cfg]
    said = {"yolov5n.yaml": "have another kind of head", "tessera-n.yaml": "are of another architecture"}[cfg]
    trained = DetectionModel(cfg, nc=3)
    weights = Weights(trained.state_dict(), trained.yaml, ("a", "b", "c"), "a file")
    with caplog.at_level("INFO"):
        build_model(TrainConfig(weights="best.pt"), NAMES, weights)
        build_model(TrainConfig(weights="best.pt", cfg=other), NAMES, weights)
    classes, head = (record.message for record in caplog.records if "tensors taken" in record.message)
    assert "; the rest starts anew, as with other classes: " in classes
    assert f"; the rest starts anew, for the weights {said}: " in head


@pytest.mark.parametrize(
    ("freeze", "found"),
    [
        ((100,), "--freeze 100: yolov5n has 25 layers, 0 to 24"),
        (
            (25,),
            "--freeze 25: nothing is left to train of yolov5n, whose layers are 0 to 24. Freeze fewer: --freeze 24",
        ),
        (tuple(range(25)), "--freeze 0 1 2 .* 24: nothing is left to train"),
        ((0, 25), "--freeze 0 25: yolov5n has 25 layers"),
    ],
)
def test_what_cannot_be_frozen(freeze: tuple[int, ...], found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        build_model(TrainConfig(cfg="yolov5n.yaml", freeze=freeze), NAMES)


def test_all_but_the_head_can_be_frozen(caplog: pytest.LogCaptureFixture) -> None:
    config = TrainConfig(cfg="yolov5n.yaml", freeze=(24,))
    model = build_model(config, NAMES)
    (warning,) = (record.message for record in caplog.records if record.levelname == "WARNING")
    assert warning == "--freeze 24 without --weights: the frozen layers stay as random as they start."
    caplog.clear()
    build_model(config, NAMES, Weights(model.state_dict(), model.yaml, NAMES, "a file"))
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    assert {name.split(".")[1] for name, p in model.named_parameters() if p.requires_grad} == {"24"}


def test_without_either_it_is_the_default_model() -> None:
    assert described_model(TrainConfig()) == DEFAULT_MODEL
    assert isinstance(DetectionModel(DEFAULT_MODEL, nc=2).head, head_class(TrainConfig(), NAMES))
    (cfg,) = (f for f in dataclasses.fields(TrainConfig) if f.name == "cfg")
    assert f"else {DEFAULT_MODEL})" in cfg.metadata["help"], "what --help says"
    with pytest.raises(ConfigError, match="yolov5q"):
        head_class(TrainConfig(cfg="yolov5q.yaml"), NAMES)
