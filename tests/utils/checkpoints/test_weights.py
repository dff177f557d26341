"""Weights from anywhere: found, read, and reported where they do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.utils.checkpoints.made_state import Net, assert_equal, full, make_state, train
from utils.checkpoints import weights as module
from utils.checkpoints.format import load_checkpoint, save_checkpoint
from utils.checkpoints.weights import (
    OFFICIAL_NAMES,
    Weights,
    intersect_weights,
    load_weights,
    moved_classes,
    resolve_weights,
    warn_of_moved_classes,
)
from utils.errors import UserError


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


def test_official_weights_are_weights_only(shared: Path) -> None:
    path = shared / "weights/yolov5n.pt"
    weights = load_weights(path)
    assert (
        len(weights.state_dict) == 349 and weights.names[0] == "person" and weights.source.endswith("(original YOLOv5)")
    )
    assert weights.data == ""
    with pytest.raises(UserError, match="give it as --weights"):
        load_checkpoint(path)


def test_everything_fits() -> None:
    model, other = Net(), Net()
    fitting, report = intersect_weights(model.state_dict(), other.state_dict())
    assert report == "10 of 10 tensors taken"
    model.load_state_dict(fitting)
    assert_equal(dict(model.state_dict()), dict(other.state_dict()))


def test_other_classes_fit_but_for_the_head() -> None:
    fitting, report = intersect_weights(Net(nc=3).state_dict(), Net(nc=2).state_dict())
    assert len(fitting) == 8 and "model.2.weight" not in fitting
    assert report.startswith("8 of 10 tensors taken; the rest starts anew, as with other classes: ")
    assert "model.2.weight is (3, 4, 1, 1), in the checkpoint (2, 4, 1, 1)" in report


def test_weights_of_another_architecture_are_called_that_and_long_reports_are_cut() -> None:
    state = Net().state_dict()
    other = {f"x.{name}": tensor for name, tensor in state.items() if not name.startswith("model.0")}
    other["model.0.weight"] = state["model.0.weight"]
    fitting, report = intersect_weights(state, other)
    assert list(fitting) == ["model.0.weight"]
    assert report.startswith(
        "1 of 10 tensors taken; the rest starts anew, for the weights are of another architecture: "
    ) and report.endswith("; and 13 more")


def test_another_head_is_not_called_other_classes() -> None:
    """Though most of the tensors fit in each case."""
    own = Net().state_dict()
    other = {name.replace("model.2.weight", "model.2.box.weight"): tensor for name, tensor in own.items()}
    other["model.2.bias"] = torch.zeros(7)
    report = intersect_weights(own, other)[1]
    assert report.startswith("8 of 10 tensors taken; the rest starts anew, for the weights have another kind of head: ")
    other = {**own, "model.1.weight": torch.zeros(5)}
    assert "8 of 10" not in (report := intersect_weights(own, other)[1]) and "of another architecture: " in report
    other = {**own, "model.3.weight": torch.zeros(5)}
    assert (
        "10 of 10 tensors taken; the rest starts anew, for the weights are of another"
        in (intersect_weights(own, other)[1])
    )


def test_excluded_tensors_stay() -> None:
    fitting, report = intersect_weights(Net().state_dict(), Net().state_dict(), exclude=[r"anchors$"])
    assert "anchors" not in fitting
    assert report == "9 of 10 tensors taken; 1 left out as asked"


def test_another_architecture_is_an_error() -> None:
    """Anchors and batch counters have one shape in every width; they do not make it fit."""
    with pytest.raises(UserError, match=r"best\.pt: an architecture that does not fit the weights: 3 of 10 .* --cfg"):
        intersect_weights(Net(width=8).state_dict(), Net(width=4).state_dict(), source="best.pt")
    with pytest.raises(UserError, match="0 of 10"):
        intersect_weights(Net().state_dict(), {})


def test_resolving_existing_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "fetch", lambda *a, **k: pytest.fail("nothing may be downloaded"))
    (tmp_path / "best.pt").write_bytes(b"x")
    assert resolve_weights(str(tmp_path / "best.pt")) == tmp_path / "best.pt"
    monkeypatch.chdir(tmp_path)
    assert resolve_weights("best.pt").samefile(tmp_path / "best.pt")
    cached = tmp_path / "cache/weights/yolov5s.pt"
    cached.parent.mkdir(parents=True)
    cached.write_bytes(b"x")
    assert resolve_weights("yolov5s.pt") == cached
    (tmp_path / "yolov5s.pt").write_bytes(b"mine")  # a file of the user's own comes first
    assert resolve_weights("yolov5s.pt").samefile(tmp_path / "yolov5s.pt")


def test_official_names_are_downloaded_into_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fake(url: str, target: Path, *, progress: bool) -> Path:
        asked.append(url)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(b"x")
        return target

    monkeypatch.setattr(module, "fetch", fake)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    assert len(OFFICIAL_NAMES) == 10
    for name in OFFICIAL_NAMES:
        assert resolve_weights(name) == tmp_path / "cache/weights" / name
    assert asked == [f"https://github.com/ultralytics/yolov5/releases/download/v7.0/{n}" for n in OFFICIAL_NAMES]
    assert resolve_weights("yolov5x6.pt") and len(asked) == 10
    assert resolve_weights("yolov5n") == tmp_path / "cache/weights/yolov5n.pt" and len(asked) == 10
    assert list((tmp_path / "work").iterdir()) == []


def test_unresolvable_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "fetch", lambda *a, **k: pytest.fail("nothing may be downloaded"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        resolve_weights("yolov5ss.pt")
    message = str(caught.value)
    assert message.startswith("--weights yolov5ss.pt: no such file; tried ")
    assert str(tmp_path / "yolov5ss.pt") in message and str(tmp_path / "cache/weights/yolov5ss.pt") in message
    assert "Did you mean 'yolov5s.pt'?" in message
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/best.pt").write_bytes(b"x")
    with pytest.raises(UserError, match=r"Did you mean 'best\.pt'"):
        resolve_weights("runs/bst.pt")
    (tmp_path / "runs/last.pt").symlink_to("gone")
    with pytest.raises(UserError, match=r"runs/last\.pt: no such file; tried \S+ Did you mean 'best\.pt'"):
        resolve_weights("runs/last.pt")  # which is never offered in place of itself
    with pytest.raises(UserError, match="no such file"):
        resolve_weights("nowhere/yolov5s.pt")  # a path is meant, not the official name
    with pytest.raises(UserError, match="--weights is empty, expected a checkpoint"):
        resolve_weights("")
    for own in ("tessera-n.pt", "tessera-n", "tessera-n.yaml"):
        message = rf"--weights {own}: no such file; tried .* No weights of tessera-n are .* --cfg tessera-n\.yaml; or"
        with pytest.raises(UserError, match=message):
            resolve_weights(own)
    (tmp_path / "folder.pt").mkdir()
    with pytest.raises(UserError, match="found a folder, expected a checkpoint file"):
        resolve_weights(str(tmp_path / "folder.pt"))
    (tmp_path / "exp/weights").mkdir(parents=True)
    (tmp_path / "exp/weights/best.pt").write_bytes(b"x")
    with pytest.raises(UserError, match=r"found a folder, .* Its best one is --weights exp/weights/best\.pt\.$"):
        resolve_weights("exp")


def test_classes_in_another_order_are_named() -> None:
    assert moved_classes(["cat", "dog"], ["Cat ", "hound"]) == ""
    assert moved_classes(["cat", "dog"], ["dog", "cat"]) == (
        "'cat' is 0 in the checkpoint and 1 in the data, 'dog' is 1 in the checkpoint and 0 in the data"
    )
    assert moved_classes([*"abcdef"], [*"bcdefa"]).endswith("and 3 more")


def test_weights_of_classes_in_another_order_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    weights = Weights({}, {}, ("cat", "dog"), "best.pt (after 1 epoch)")
    for names in (["cat", "dog"], ["dog", "cat", "cow"], ["person", "car"]):  # other ones start anew, or are meant
        warn_of_moved_classes(weights, names)
    assert not caplog.records
    warn_of_moved_classes(weights, ["dog", "cat"])
    assert "'cat' is 0 in the checkpoint and 1 in the data" in caplog.text
