"""Weights from anywhere: found, read, and reported where they do not fit."""

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


def test_weights_of_ours(tmp_path: Path) -> None:
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


def test_everything_fits() -> None:
    model, other = Net(), Net()
    fitting, report = intersect_weights(model.state_dict(), other.state_dict())
    assert len(fitting) == 10 and report == ""
    model.load_state_dict(fitting)
    assert_equal(dict(model.state_dict()), dict(other.state_dict()))


def test_other_classes_fit_but_for_the_head() -> None:
    fitting, report = intersect_weights(Net(nc=3).state_dict(), Net(nc=2).state_dict())
    assert len(fitting) == 8 and "model.2.weight" not in fitting
    assert report.startswith("; the rest is reinitialised, as with other classes: ")
    assert "model.2.weight is (3, 4, 1, 1), in the checkpoint (2, 4, 1, 1)" in report


def test_weights_of_another_architecture_are_called_that_and_long_reports_are_cut() -> None:
    state = Net().state_dict()
    other = {f"x.{name}": tensor for name, tensor in state.items() if not name.startswith("model.0")}
    other["model.0.weight"] = state["model.0.weight"]
    fitting, report = intersect_weights(state, other)
    assert list(fitting) == ["model.0.weight"]
    assert report.startswith(
        "; the rest is reinitialised, for the weights are of another architecture: "
    ) and report.endswith("; and 13 more")


def test_another_head_is_not_called_other_classes() -> None:
    """Though most of the tensors fit in each case."""
    own = Net().state_dict()
    other = {name.replace("model.2.weight", "model.2.box.weight"): tensor for name, tensor in own.items()}
    other["model.2.bias"] = torch.zeros(7)
    fitting, report = intersect_weights(own, other)
    assert len(fitting) == 8 and report.startswith(
        "; the rest is reinitialised, for the weights have another kind of head: "
    )
    other = {**own, "model.1.weight": torch.zeros(5)}
    assert "of another architecture: " in intersect_weights(own, other)[1]
    other = {**own, "model.3.weight": torch.zeros(5)}
    fitting, report = intersect_weights(own, other)
    assert len(fitting) == 10 and "; the rest is reinitialised, for the weights are of another" in report


def test_excluded_tensors_stay() -> None:
    fitting, report = intersect_weights(Net().state_dict(), Net().state_dict(), exclude=[r"anchors$"])
    assert "anchors" not in fitting
    assert report == "; 1 excluded"


def test_another_architecture_is_an_error() -> None:
    """Anchors and batch counters have one shape in every width; they do not make it fit."""
    with pytest.raises(UserError, match=r"best\.pt: an architecture that does not fit the weights: 3 of 10 .* --cfg"):
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
        with pytest.raises(UserError, match=r"does not fit the weights.* Give the --cfg that belongs to the weights"):
            intersect_weights(own, offered)
        return
    intersect_weights(own, offered)
    assert ("of the model's layers start from these weights" in caplog.text) == (outcome == "warned of")


@pytest.mark.parametrize("suffix", sorted(EXPORTED))
def test_an_exported_file_is_nothing_to_train_on(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"best{suffix}"
    path.write_bytes(b"an export")
    with pytest.raises(UserError, match=r"an exported file; .* cannot be trained on or .*best\.pt"):
        load_weights(path)
