"""Weights: loading, and partial transfer to another model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tessera.models.detector import DetectionModel
from tessera.utils.checkpoints.format import save_checkpoint
from tessera.utils.checkpoints.transfer import intersect_weights
from tessera.utils.checkpoints.weights import EXPORTED, load_weights
from tessera.utils.errors import UserError
from tests.utils.checkpoints.made_state import Net, assert_equal, full, make_state, train


def test_weights_of_a_checkpoint(tmp_path: Path) -> None:
    state = make_state()
    train(state, 2)
    state.progress.epoch, state.progress.step_in_epoch = 3, 0
    save_checkpoint(tmp_path / "best.pt", full(state, config={"data": "shapes.yaml"}))
    weights = load_weights(tmp_path / "best.pt")
    assert_equal(dict(weights.state_dict), dict(state.ema.model.state_dict()))
    assert weights.names == ("class0", "class1") and weights.model_yaml == state.model.yaml
    assert weights.source == "best.pt (after 3 epochs)" and weights.data == "shapes.yaml"
    with pytest.raises(UserError, match="no such checkpoint"):
        load_weights(tmp_path / "none.pt")


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
        ("yolox-s", "yolox-s-free", "taken"),
        ("yolov5n", "yolov5n-free", "taken"),
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


@pytest.mark.parametrize("suffix", sorted(EXPORTED))
def test_an_exported_file_is_nothing_to_train_on(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"best{suffix}"
    path.write_bytes(b"an export")
    with pytest.raises(UserError, match=r"an exported file, .* exported from, .*best\.pt"):
        load_weights(path)
