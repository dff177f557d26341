"""Original YOLOv5 checkpoints, read without running their code."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tessera.utils.checkpoints.format import load_checkpoint
from tessera.utils.checkpoints.weights import load_weights
from tessera.utils.errors import UserError


@pytest.fixture
def original(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that writes a checkpoint as YOLOv5 does: whole modules of packages that are not ours."""
    common, yolo = types.ModuleType("models.common"), types.ModuleType("models.yolo")

    class Conv(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3, bias=False)
            self.bn = nn.BatchNorm2d(4)
            self.act = nn.SiLU()

    class Detect(nn.Module):
        def __init__(self, nc: int) -> None:
            super().__init__()
            self.stride = torch.tensor([8.0, 16.0])
            self.register_buffer("anchors", torch.arange(8.0).view(2, 2, 2))
            self.register_buffer("anchor_grid", torch.zeros(2, 1, 2, 1, 1, 2))  # before v6
            self.register_buffer("scratch", torch.zeros(5), persistent=False)
            self.m = nn.ModuleList(nn.Conv2d(4, 2 * (nc + 5), 1) for _ in range(2))

    class Model(nn.Module):
        def __init__(self, nc: int) -> None:
            super().__init__()
            self.model = nn.Sequential(Conv(), Detect(nc))
            self.stride = self.model[1].stride
            self.yaml = {"nc": nc, "backbone": [[-1, 1, "Conv", [4, 3]]], "head": [[-1, 1, "Detect", ["nc"]]]}
            self.names = [f"class{i}" for i in range(nc)]
            self.nc = nc
            self.hyp = {"lr0": 0.01, "odd": np.float64(1.5), "path": Path("x")}

    for module, classes in ((common, (Conv,)), (yolo, (Detect, Model))):
        for cls in classes:
            cls.__module__, cls.__qualname__ = module.__name__, cls.__name__
            setattr(module, cls.__name__, cls)
        monkeypatch.setitem(sys.modules, module.__name__, module)

    def write(name: str = "original.pt", half: bool = True, nc: int = 3, **extra: Any) -> tuple[Path, nn.Module]:
        torch.manual_seed(0)
        model = Model(nc)
        model = model.half() if half else model
        torch.save({"epoch": 7, "model": model, "ema": None, **extra}, tmp_path / name)
        return tmp_path / name, model

    return write


def test_official_file(shared: Path) -> None:
    weights = load_weights(shared / "weights/yolov5n.pt")
    state = weights.state_dict
    assert len(state) == 349 and weights.family == "YOLOv5" and weights.data == ""
    assert {t.dtype for t in state.values()} == {torch.float32, torch.int64}
    learned = {k: t for k, t in state.items() if k.endswith(("weight", "bias"))}
    assert sum(t.numel() for t in learned.values()) == 1_872_157
    assert state["model.24.m.2.weight"].shape == (255, 256, 1, 1)
    assert state["model.9.cv2.bn.num_batches_tracked"].shape == ()
    assert len(weights.names) == 80 and weights.names[0] == "person" and weights.names[79] == "toothbrush"
    pixels = state["model.24.anchors"] * torch.tensor([8.0, 16, 32]).view(3, 1, 1)
    assert pixels[0].tolist() == [[10, 13], [16, 30], [33, 23]]
    assert weights.model_yaml["width_multiple"] == 0.25 and len(weights.model_yaml["head"]) == 15
    with pytest.raises(UserError, match=r"it holds pickled objects, .* give it as --weights"):
        load_checkpoint(shared / "weights/yolov5n.pt")


@pytest.mark.parametrize(("half", "protocol"), [(True, 2), (False, 2), (True, 4), (True, 5)])
def test_reads_what_torch_wrote(original: Any, half: bool, protocol: int) -> None:
    path, model = original(half=half)
    torch.save({"model": model}, path, pickle_protocol=protocol)
    weights = load_weights(path)
    expected = {k: v.float() if v.is_floating_point() else v for k, v in model.state_dict().items()}
    del expected["model.1.anchor_grid"]
    assert list(weights.state_dict) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(weights.state_dict[name], tensor) and weights.state_dict[name].dtype == tensor.dtype
    assert weights.names == ("class0", "class1", "class2") and weights.source == "original.pt (original YOLOv5)"
    assert weights.model_yaml == {"name": "original", **model.yaml}


def test_prefers_the_ema_and_reads_unfinished_runs(original: Any) -> None:
    """A last.pt in mid-run carries an optimizer's state, NumPy values and the command's options."""
    _, ema = original("other.pt")
    with torch.no_grad():
        ema.model[0].conv.weight.fill_(2)
    optimizer = {"state": {0: {"momentum_buffer": torch.ones(2)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    path, _ = original(
        ema=ema,
        updates=12,
        optimizer=optimizer,
        best_fitness=np.array([0.25]),
        scalar=np.float64(0.5),
        opt={"save_dir": Path("runs/train/exp"), "epochs": 3},
        state=nn.Linear(2, 2).state_dict(),
        device=torch.device("cpu"),
        dtype=torch.float16,
    )
    state = load_weights(path).state_dict
    assert (state["model.0.conv.weight"] == 2).all() and state["model.0.conv.weight"].dtype == torch.float32


def test_names_as_a_dict(original: Any) -> None:
    path, model = original()
    model.names = {2: "c", 0: "a", 1: "b"}
    torch.save({"model": model}, path)
    assert load_weights(path).names == ("a", "b", "c")
    model.names = {0: "a", 2: "c"}
    torch.save({"model": model}, path)
    with pytest.raises(UserError, match="without a gap"):
        load_weights(path)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda model: delattr(model, "yaml"), "unsupported YOLOv5 file: its model has no `yaml`"),
        (lambda model: setattr(model, "yaml", {"nc": Path("x")}), "damaged: it holds a value of type InertObject"),
        (lambda model: model.model[0].bn.running_var.neg_(), "'model.0.bn.running_var' has a variance below 0"),
        (lambda model: model.model[0].conv.weight.data.fill_(float("nan")), "'model.0.conv.weight' has values that"),
    ],
)
def test_unsupported_models(original: Any, change: Any, text: str) -> None:
    path, model = original()
    change(model)
    torch.save({"model": model}, path)
    with pytest.raises(UserError, match=text):
        load_weights(path)
