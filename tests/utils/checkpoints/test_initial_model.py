"""Initial model of a run: head, frozen layers, fixed statistics, kind of start."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from tessera.models.detector import DetectionModel
from tessera.models.heads.head import Head
from tessera.models.layers.blocks import Conv
from tessera.models.model_yaml import find_model_yaml, read_model
from tessera.utils.checkpoints import initial_model
from tessera.utils.checkpoints.initial_model import (
    build_model,
    freeze_bn_of_first_layers,
    intersect_weights,
    model_source,
    pretraining_of,
    with_frozen_layers,
)
from tessera.utils.checkpoints.weights import Weights
from tessera.utils.config import TrainConfig, load_hyp
from tessera.utils.errors import ConfigError, UserError
from tessera.utils.types import Pretraining
from tests.utils.checkpoints.made_state import Net, assert_equal

HYP = load_hyp("hyp.short.yaml")
NAMES = ("cat", "dog")
FILES = {"yolov5n.yaml": "Detect", "tessera-n.yaml": "DetectFree"}


def head_class(config: TrainConfig, weights: Weights | None = None) -> type[Head]:
    """The head of the model that a new run builds."""
    return read_model(model_source(config, weights), {"nc": len(NAMES)}).head


@pytest.mark.parametrize("cfg", FILES)
def test_the_head_is_that_of_the_model_that_is_built(cfg: str) -> None:
    config = TrainConfig(cfg=cfg)
    built = build_model(config, HYP, NAMES)
    assert head_class(config) is type(built.head) and type(built.head).__name__ == FILES[cfg]
    weights = Weights(built.state_dict(), built.yaml, NAMES, "a file")
    assert head_class(TrainConfig(weights="last.pt"), weights) is type(built.head), "the weights bring the model"
    (other,) = FILES.keys() - {cfg}
    given = TrainConfig(cfg=other, weights="last.pt")
    assert head_class(given, weights).__name__ == FILES[other], "but --cfg wins"


def test_only_a_known_start_keeps_the_anchors_of_the_weights() -> None:
    trained, config = DetectionModel("yolov5n.yaml", nc=2), TrainConfig(cfg="yolov5n.yaml", weights="last.pt")
    fitted = trained.state_dict()["model.24.anchors"].mul_(2)
    weights = Weights(trained.state_dict(), trained.yaml, NAMES, "a file")
    for names in (NAMES, ("cat", "cow")):
        found = build_model(config, HYP, names, weights).state_dict()["model.24.anchors"]
        assert torch.equal(found, fitted) == (names == NAMES)


@pytest.mark.parametrize(
    ("freeze", "found"),
    [
        ((25,), "--freeze 25: nothing left to train in yolov5n, which has 25 layers, 0 to 24. Freeze .*: --freeze 24"),
        (tuple(range(25)), "--freeze 0 1 2 .* 24: nothing left to train"),
        ((0, 25), "--freeze 0 25: yolov5n has 25 layers"),
    ],
)
def test_invalid_freeze_flags(freeze: tuple[int, ...], found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        build_model(TrainConfig(cfg="yolov5n.yaml", freeze=freeze), HYP, NAMES)


def test_all_but_the_head_can_be_frozen(caplog: pytest.LogCaptureFixture) -> None:
    config = TrainConfig(cfg="yolov5n.yaml", freeze=(24,))
    model = build_model(config, HYP, NAMES)
    (warning,) = (record.message for record in caplog.records if record.levelname == "WARNING")
    assert warning == "--freeze 24 without --weights: the frozen layers keep their random initial values."
    caplog.clear()
    build_model(config, HYP, NAMES, Weights(model.state_dict(), model.yaml, NAMES, "a file"))
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    assert {name.split(".")[1] for name, p in model.named_parameters() if p.requires_grad} == {"24"}


def test_without_either_it_is_the_default_model() -> None:
    assert initial_model.model_source(TrainConfig()) == initial_model.DEFAULT_MODEL
    assert isinstance(DetectionModel(initial_model.DEFAULT_MODEL, nc=2).head, head_class(TrainConfig()))
    (cfg,) = (f for f in dataclasses.fields(TrainConfig) if f.name == "cfg")
    assert f"else {initial_model.DEFAULT_MODEL})" in cfg.metadata["help"], "what --help says"
    with pytest.raises(ConfigError, match="yolov5q"):
        head_class(TrainConfig(cfg="yolov5q.yaml"))


@pytest.mark.parametrize(
    ("cfg", "nc", "weights", "given", "fixed"),
    [
        ("", 2, "best.pt", 1000, 23),  # the whole of tessera-n
        ("", 3, "best.pt", 1000, 22),  # all but the head, which is reinitialised
        ("", 3, "best.pt", 5, 5),
        ("", 2, "", 1000, 0),  # from scratch
        ("yolov5n.yaml", 2, "best.pt", 1000, 0),  # which has another first layer
    ],
)
def test_only_completely_loaded_layers_keep_their_statistics(
    cfg: str, nc: int, weights: str, given: int, fixed: int
) -> None:
    """A run that is resumed, without the weights, fixes the same layers."""
    trained = DetectionModel("tessera-n.yaml", nc=2)
    config = TrainConfig(cfg=cfg, weights=weights)
    hyp = dataclasses.replace(HYP, fixed_norms=float(given))
    model = DetectionModel(cfg or "tessera-n.yaml", nc=nc)
    found = freeze_bn_of_first_layers(model, config, hyp, Weights(trained.state_dict(), trained.yaml, NAMES, "a file"))
    again = DetectionModel(cfg or "tessera-n.yaml", nc=nc)
    assert found == freeze_bn_of_first_layers(again, config, found, None)
    assert found.fixed_norms == (fixed if weights else given)
    for one in (model, again):
        convolutions = ((int(name.split(".")[1]), m) for name, m in one.named_modules() if isinstance(m, Conv))
        assert all(m.frozen_statistics == (layer < fixed) for layer, m in convolutions)


@pytest.mark.parametrize(
    ("cfg", "before", "now", "expected"),
    [
        ("", NAMES, ("Cat ", "dog"), "known"),
        ("tessera-n.yaml", NAMES, NAMES, "known"),
        ("yolov5n.yaml", NAMES, NAMES, "new"),
        ("", NAMES, ("dog", "cat"), "known"),
        ("", NAMES, ("DOG",), "known"),
        ("", NAMES, ("cow", "horse"), "new"),
        ("", NAMES, (*NAMES, "cow"), "new"),
        ("", ("0", "1"), ("0", "1"), "new"),  # of any two datasets without names
        ("", ("item",), ("item",), "new"),
        ("", ("drawn circle", "drawn star"), NAMES, "drawn"),
        ("", ("drawn circle", "dog"), NAMES, "new"),
        ("", (), NAMES, "new"),
    ],
)
def test_kind_of_start(
    cfg: str, before: tuple[str, ...], now: tuple[str, ...], expected: Pretraining, tmp_path: Path
) -> None:
    trained = DetectionModel("tessera-n.yaml", nc=max(len(before), 1))
    weights = Weights({}, trained.yaml, before, "a file")
    assert pretraining_of(TrainConfig(cfg=cfg, weights="best.pt"), now, weights) == expected
    other_model = "drawn" if expected == "drawn" else "new"
    own = tmp_path / "tessera-n.yaml"  # a name is not enough
    other, same = (find_model_yaml(name).read_text() for name in ("yolov5n.yaml", "tessera-n.yaml"))
    for text in (other, f"activation: nn.ReLU()\n{same}"):
        own.write_text(text)
        assert pretraining_of(TrainConfig(cfg=str(own), weights="best.pt"), now, weights) == other_model
    foreign = Weights({}, {**trained.yaml, "backbone": [[-1, 1, "Foreign", [64]]]}, before, "a file")
    assert pretraining_of(TrainConfig(cfg="tessera-n.yaml", weights="best.pt"), now, foreign) == other_model


def test_freeze_overrides_the_recipe() -> None:
    freezing = dataclasses.replace(HYP, frozen_layers=3.0)
    for flags, frozen in (
        ({"weights": "a.pt"}, (0, 1, 2)),
        ({"weights": "a.pt", "freeze": (0,)}, ()),
        ({"weights": ""}, ()),
    ):
        assert with_frozen_layers(TrainConfig(**flags), freezing).frozen_layers == frozen


# Transfer of weights


def test_everything_fits_but_what_is_excluded() -> None:
    model, other = Net(), Net()
    fitting, report = intersect_weights(model.state_dict(), other.state_dict())
    assert len(fitting) == 10 and report == ""
    model.load_state_dict(fitting)
    assert_equal(dict(model.state_dict()), dict(other.state_dict()))
    fitting, report = intersect_weights(model.state_dict(), other.state_dict(), exclude=[r"anchors$"])
    assert len(fitting) == 9 and "anchors" not in fitting and report == "; 1 excluded"


OWN = Net().state_dict()
BOX = {name.replace("model.2.weight", "model.2.box.weight"): tensor for name, tensor in OWN.items()}
OTHER = {f"x.{name}": tensor for name, tensor in OWN.items() if not name.startswith("model.0")}


@pytest.mark.parametrize(
    ("offered", "fits", "why", "listed"),
    [
        (Net(nc=3).state_dict(), 8, "reinitialised 2 (different classes)", "model.2.weight is (2, 4, 1, 1), in the"),
        ({**BOX, "model.2.bias": torch.zeros(7)}, 8, "reinitialised 2 (another kind of head)", ""),
        ({**OWN, "model.1.weight": torch.zeros(5)}, 9, "reinitialised 1 (another architecture)", ""),
        ({**OWN, "model.3.weight": torch.zeros(5)}, 10, "others unused (another architecture)", ""),
        ({**OTHER, "model.0.weight": OWN["model.0.weight"]}, 1, "reinitialised 9 (another architecture)", "13 more"),
    ],
)
def test_why_weights_fit_in_part(offered: dict[str, torch.Tensor], fits: int, why: str, listed: str) -> None:
    fitting, report = intersect_weights(OWN, offered)
    assert len(fitting) == fits and report.startswith(f"; {why}: ") and listed in report


def test_another_architecture_is_an_error() -> None:
    """Anchors and batch counters have one shape in every width; they do not make it fit."""
    with pytest.raises(UserError, match=r"best\.pt: the weights do not fit the architecture: 3 of 10 .* --cfg"):
        intersect_weights(Net(width=8).state_dict(), Net(width=4).state_dict(), source="best.pt")
    with pytest.raises(UserError, match="0 of 10"):
        intersect_weights(Net().state_dict(), {})


def state_on_paper(cfg: str, nc: int = 80) -> dict[str, torch.Tensor]:
    """The names and shapes of a model's tensors."""
    with torch.device("meta"):
        return dict(DetectionModel(cfg, nc=nc).state_dict())


@pytest.mark.parametrize(
    ("weights", "cfg", "outcome"),
    [
        ("yolov9-s", "yolov9-m", "refused"),  # 181 of 906 tensors fit: counters, norms and 8 convolutions
        ("yolov9-m", "yolov9-c", "refused"),
        ("yolox-s", "yolov9-s", "refused"),
        ("yolov5s", "yolov5n", "refused"),
        ("yolox-tiny", "yolox-s", "refused"),
        ("yolov9-t", "yolov9-s", "warned of"),
        ("yolov5s", "yolov5s6", "warned of"),  # which begins with the same layers
        ("yolox-s", "yolov5s", "taken"),  # the body but for the first convolution
        ("yolov5s", "yolox-s", "taken"),
        ("yolov9-t", "yolov9-t", "taken"),
    ],
)
def test_weights_of_another_size_are_refused_or_warned_of(
    weights: str, cfg: str, outcome: str, caplog: pytest.LogCaptureFixture
) -> None:
    offered, own = state_on_paper(f"{weights}.yaml"), state_on_paper(f"{cfg}.yaml", nc=3)
    if outcome == "refused":
        with pytest.raises(
            UserError, match=r"do not fit the architecture.* Give the --cfg that belongs to the weights"
        ):
            intersect_weights(own, offered)
        return
    intersect_weights(own, offered)
    assert ("of the model's layers start from these weights" in caplog.text) == (outcome == "warned of")
