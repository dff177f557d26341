"""Weights: loading, and partial transfer to another model.

Also impossible values in weights or their description: one message for every command.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tessera.deploy.runtime.runtimes import open_exported
from tessera.models.detector import DetectionModel
from tessera.utils.checkpoints import format
from tessera.utils.checkpoints.format import load_any_checkpoint, save_checkpoint
from tessera.utils.checkpoints.transfer import intersect_weights
from tessera.utils.checkpoints.weights import EXPORTED, Weights, load_weights, save_safetensors
from tessera.utils.errors import UserError
from tessera.utils.evaluation.network import open_model
from tessera.utils.ranks.world import World
from tests.deploy.exporting.made import ANCHORED, NAMES, checkpoint
from tests.deploy.runtime.made_files import write_torchscript
from tests.utils.checkpoints.made_state import Net, assert_equal, full, make_state, train
from tests.utils.machine.stand_in import StandIn


def test_weights_of_a_checkpoint(tmp_path: Path) -> None:
    state = make_state()
    train(state, 2)
    state.progress.epoch, state.progress.batch_in_epoch = 3, 0
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


NAN = float("nan")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("good") / "best.pt", ANCHORED)


def with_number(good: Path, path: Path, number: float) -> tuple[Path, str]:
    """The same with a number in a tensor, which is named too."""
    state = load_any_checkpoint(good)
    ema = {name: tensor.clone() for name, tensor in state["ema"].items()}
    name = [name for name, tensor in ema.items() if tensor.is_floating_point()][5]
    ema[name].view(-1)[-1] = number
    if path.suffix == ".pt":
        save_checkpoint(path, {**state, "ema": ema})
    else:
        save_safetensors(path, Weights(ema, state["model_yaml"], tuple(state["names"]), "best.pt"), {})
    return path, name


@pytest.mark.parametrize("number", [NAN, float("inf"), -float("inf")])
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_the_first_tensor_that_is_not_finite_is_named(good: Path, tmp_path: Path, suffix: str, number: float) -> None:
    if suffix == ".safetensors":
        pytest.importorskip("safetensors")
    path, name = with_number(good, tmp_path / f"bad{suffix}", number)
    with pytest.raises(UserError, match=rf"bad\{suffix}: damaged: '{name}' has values that are not finite"):
        load_weights(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"imgsz": 10**9}, "its size is 1000000000 pixels, expected 32 to 8192"),
        ({"imgsz": 0}, "its size is 0 pixels"),
        ({"names": ["x" * 300, "b", "c"]}, "names a class 'x.*, expected text of at most 200 letters"),
        ({"thresholds": {"confidence": NAN, "class_confidences": []}}, "its confidence is nan, expected 0 to 1"),
        ({"thresholds": {"confidence": 0.5, "class_confidences": [0.5, 7.0, 0.5]}}, "its confidence is 7, expected 0"),
        ({"thresholds": {"confidence": 0.5, "class_confidences": [0.5]}}, "1 confidence for 3 classes"),
    ],
    ids=str,
)
def test_impossible_descriptions(good: Path, tmp_path: Path, change: dict[str, Any], said: str) -> None:
    save_checkpoint(tmp_path / "bad.pt", {**load_any_checkpoint(good), **change})
    with pytest.raises(UserError, match=rf"bad\.pt: damaged: .*{said}"):
        load_weights(tmp_path / "bad.pt")


@pytest.mark.parametrize("key", ["format", "trained_imgsz", "names"])
def test_a_header_of_any_length_is_a_short_message(good: Path, tmp_path: Path, key: str) -> None:
    module = pytest.importorskip("safetensors.torch")
    save_safetensors(tmp_path / "good.safetensors", load_weights(good), {})
    with module.safe_open(tmp_path / "good.safetensors", "pt") as file:
        described = {**file.metadata(), key: f'"{"x" * 100_000}"'}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    module.save_file(tensors, tmp_path / "bad.safetensors", described)
    with pytest.raises(UserError, match=r"bad\.safetensors: ") as caught:
        load_weights(tmp_path / "bad.safetensors")
    assert len(str(caught.value)) < 700


def test_memory_that_ends_while_a_model_is_opened(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_weights(good).names == NAMES

    def no_memory_there(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    def no_memory_here(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("tessera.utils.evaluation.networks.fused_copy", no_memory_there)
    with pytest.raises(UserError, match=r"out of memory on stand-in: the model of best\.pt .*Use a smaller model"):
        open_model(str(good), World(accelerator=StandIn()))
    monkeypatch.setattr(format, "read_archive", no_memory_here)
    with pytest.raises(UserError, match=r"out of memory on cpu: the model of .*best\.pt.*Use a smaller model"):
        load_weights(good)


def test_exhausted_device_memory_is_not_reported_as_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_torchscript(tmp_path / "best.torchscript")

    def exhausted(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(torch.jit, "load", exhausted)
    with pytest.raises(UserError, match=r"out of memory on stand-in: the model of .*best\.torchscript"):
        open_exported(path, StandIn(), trust_file=True)
