"""Files of YOLOX and YOLOv9: in every published form, of other sizes and classes, and with impossible tensors."""

from __future__ import annotations

import collections
import sys
import types
import typing
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tessera.data.labels.coco import COCO_NAMES
from tessera.utils.checkpoints.initial_model import build_model
from tessera.utils.checkpoints.weights import Weights, load_weights, model_of_weights
from tessera.utils.config import TrainConfig, load_hyp
from tests import families
from tests.deploy.foreign.made import LAST, MIDDLE, STEM, V9_HEAD, Tensors, refusal, save, small_yolox, v9_t, with_at
from tests.deploy.foreign.made import bounded as bounded

HYP = load_hyp("hyp.short.yaml")
THREE = ("ant", "bee", "cow")
HALVED = "float16"  # the form that rounds


def prefixed(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def zeros(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def same(weights: Weights, other: Weights, *, halved: bool = False) -> bool:
    """Whether two files gave the same weights of the same architecture; to half precision's rounding where `halved`."""
    assert weights.model_yaml == other.model_yaml and weights.state_dict.keys() == other.state_dict.keys()
    pairs = [(tensor, other.state_dict[name]) for name, tensor in weights.state_dict.items()]
    close = partial(torch.allclose, rtol=1e-3, atol=1e-6) if halved else torch.equal
    return all(mine.dtype == theirs.dtype and close(mine, theirs) for mine, theirs in pairs)


YOLOX_FORMS: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "as published": lambda t: {"start_epoch": 300, "model": t, "optimizer": optimizer_state()},
    "of a run of its own": lambda t: {"model": t, "best_ap": np.float64(0.405), "curr_ap": np.float32(0.4)},
    "of several processes": lambda t: {"model": prefixed("module.", t)},
    HALVED: lambda t: {"model": {n: x.half() if x.is_floating_point() else x for n, x in t.items()}},
    "channels last": lambda t: {
        "model": {n: x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x for n, x in t.items()}
    },
    "parameters": lambda t: {"model": {n: torch.nn.Parameter(x) if x.is_floating_point() else x for n, x in t.items()}},
    "an average beside": lambda t: {"model": zeros(t), "ema": t},
}
YOLOV9_FORMS: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "bare, as published": lambda t: t,
    "without the auxiliary branch": lambda t: {n: x for n, x in t.items() if int(n.partition(".")[0]) <= V9_HEAD},
    "of its trainer": lambda t: {
        "epoch": 3,
        "global_step": 99,
        "pytorch-lightning_version": "2.4.0",
        "state_dict": prefixed("model.model.", t),
        "callbacks": {"ModelCheckpoint{'monitor': None}": {"best_model_score": torch.tensor(0.38), "dirpath": "x"}},
        "optimizer_states": [optimizer_state()],
    },
    "its average wins": lambda t: {"state_dict": {**prefixed("model.model.", zeros(t)), **prefixed("ema.model.", t)}},
    HALVED: lambda t: {n: x.half() if x.is_floating_point() else x for n, x in t.items()},
}


def optimizer_state() -> dict[str, Any]:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.01, momentum=0.9)
    parameter.sum().backward()
    optimizer.step()
    return optimizer.state_dict()


@pytest.fixture(scope="module")
def yolox(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """What the small model's file gives in its published form."""
    path = tmp_path_factory.mktemp("small") / "yolox.pth"
    return load_weights(save(path, {"start_epoch": 300, "model": small_yolox(shared)}))


@pytest.fixture(scope="module")
def yolov9(family_files: Callable[[str], Path]) -> Weights:
    """What the published form of YOLOv9-t gives."""
    return load_weights(family_files("yolov9-t"))


@pytest.mark.parametrize(
    ("family", "form"), [*(("YOLOX", f) for f in YOLOX_FORMS), *(("YOLOv9", f) for f in YOLOV9_FORMS)]
)
def test_every_form_of_a_file(
    family: str, form: str, shared: Path, yolox: Weights, yolov9: Weights, tmp_path: Path
) -> None:
    if family == "YOLOX":
        content, expected = YOLOX_FORMS[form](small_yolox(shared)), yolox
    else:
        content, expected = YOLOV9_FORMS[form](v9_t(shared, auxiliary=True)), yolov9
    weights = load_weights(save(tmp_path / "any.name", content))
    assert same(weights, expected, halved=form == HALVED) and weights.names == COCO_NAMES
    assert weights.family == family and f"any.name (original {family})" in weights.source
    assert not any(name.startswith("model.23") for name in weights.state_dict if family == "YOLOv9")


class Configuration:
    """Classes of the names that the trainer's configuration has, in modules of those names, while it is written."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        metadata = self._of("omegaconf.base", "ContainerMetadata")
        metadata.__dict__.update(ref_type=typing.Any, object_type=dict, key_type=str, element_type=int, optional=True)
        self.content = self._of("omegaconf.dictconfig", "DictConfig")
        self.content.__dict__.update(_metadata=metadata, _content={"name": "v9-t"}, _parent=None, _flags_cache=None)
        self.config = self._of("yolo.config.config", "Config")
        self.config.__dict__.update(model=self.content, image_size=[640, 640], path=Path("runs"))

    def _of(self, module: str, name: str) -> Any:
        made = type(name, (), {"__module__": module})
        for end in range(1, module.count(".") + 2):
            parent = ".".join(module.split(".")[:end])
            if parent not in sys.modules:
                self._patch.setitem(sys.modules, parent, types.ModuleType(parent))
        self._patch.setattr(sys.modules[module], name, made, raising=False)
        return made()


def test_objects_of_a_trainers_configuration_are_read_over(
    shared: Path, yolov9: Weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content: dict[str, Any] = {"state_dict": prefixed("model.model.", v9_t(shared))}
    with monkeypatch.context() as patch:
        made = Configuration(patch)
        content["hyper_parameters"] = {"cfg": made.config, "model": made.content}
        content["lr_schedulers"] = [collections.defaultdict(dict, last_epoch=3)]
        path = save(tmp_path / "run.ckpt", content)
    assert b"omegaconf.dictconfig" in path.read_bytes()
    before = {*sys.modules}
    assert same(load_weights(path), yolov9)
    assert not any(name.startswith(("yolo.", "omegaconf")) for name in {*sys.modules} - before)


@pytest.mark.parametrize(("nc", "names"), [(3, ("0", "1", "2")), (80, COCO_NAMES)])
def test_files_for_other_classes_have_their_head(
    nc: int, names: tuple[str, ...], shared: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for weights, outputs in (
        (load_weights(save(tmp_path / "x.pth", {"model": small_yolox(shared, nc)})), 5 + nc),
        (load_weights(save(tmp_path / "9.pt", v9_t(shared, nc))), 4 + nc),
    ):
        assert weights.names == (names if nc == 80 else ())
        model = model_of_weights(weights, "given").eval()
        assert model.names == names and model.nc == nc
        with torch.no_grad():
            assert model(torch.zeros(1, 3, 32, 32))[0].shape == (1, 21, outputs)
    assumed = ["x.pth: no class names in this YOLOX file", "9.pt: no class names in this YOLOv9 file"]
    assert [message.partition(";")[0] for message in caplog.messages] == (assumed if nc == 80 else [])


@pytest.mark.parametrize("width", [80, 64])
def test_the_width_of_class_branches_is_the_files(width: int, shared: Path, tmp_path: Path) -> None:
    """YOLOv9 makes it of the number of classes, and its trainer may have had another."""
    weights = load_weights(save(tmp_path / "9.pt", v9_t(shared, 3, width)))
    assert weights.model_yaml["head"][-1][3] == ["nc", width, 16]
    model = model_of_weights(weights, "given")
    assert {name: tuple(p.shape) for name, p in model.named_parameters() if ".cls.1." in name and p.ndim == 4} == {
        "model.22.one_to_many.cls.1.0.conv.weight": (width, 96, 3, 3),
        "model.22.one_to_many.cls.1.1.conv.weight": (width, width, 3, 3),
        "model.22.one_to_many.cls.1.2.weight": (3, width, 1, 1),
    }


@pytest.mark.parametrize("family", ["YOLOX", "YOLOv9"])
def test_other_classes_reinitialise_the_last_class_convolutions_alone(
    family: str, shared: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content: Any = {"model": small_yolox(shared)} if family == "YOLOX" else v9_t(shared)
    weights = load_weights(save(tmp_path / "file.pt", content))
    with caplog.at_level("INFO"):
        model = build_model(TrainConfig(weights=str(tmp_path / "file.pt")), HYP, THREE, weights)
    last = {"YOLOX": "model.24.cls.{}.2", "YOLOv9": "model.22.one_to_many.cls.{}.2"}[family]
    reinitialised = {f"{last.format(level)}.{kind}" for level in range(3) for kind in ("weight", "bias")}
    state = model.state_dict()
    assert state.keys() == weights.state_dict.keys()
    different = {name for name, tensor in weights.state_dict.items() if not torch.equal(state[name], tensor)}
    assert different == reinitialised and model.names == THREE
    total = len(state)
    (text,) = [record.message for record in caplog.records if record.message.startswith("Loaded ")]
    assert text.startswith(f"Loaded {total - 6} of {total} tensors from ")
    assert text.endswith("; class layer: 1 of 3 classes known by name (cow), 2 reinitialised")
    assert torch.equal(state[min(reinitialised)][2], weights.state_dict[min(reinitialised)][19]), "COCO's cow"


def test_the_input_of_yolox_is_brought_to_rgb_in_0_to_1(shared: Path, yolox: Weights) -> None:
    """Its own path: BGR in 0 … 255, the four phases of 2×2 pixels end to end, the weights as they are in the file."""
    image = families.image().permute(2, 0, 1)[None].float()
    bgr = image.flip(1)
    phases = [bgr[..., row::2, column::2] for row, column in ((0, 0), (1, 0), (0, 1), (1, 1))]
    original = small_yolox(shared)["backbone.backbone.stem.conv.conv.weight"]
    expected = F.conv2d(torch.cat(phases, 1), original, padding=1)
    model = model_of_weights(yolox, "given")
    focus = model.model[0]
    seen: list[Tensor] = []
    focus.conv.conv.register_forward_hook(lambda *given: seen.append(given[2]))  # type: ignore[union-attr, operator]
    with torch.no_grad():
        focus(image / 255)
    assert (seen[0] - expected).abs().max() < 1e-5 * expected.abs().max()
    brought = yolox.state_dict["model.0.conv.conv.weight"].unflatten(1, (4, 3))
    assert torch.equal(brought.flip(2).flatten(1, 2), original * 255)


@pytest.mark.parametrize("depth", [1, 3])
def test_a_yolox_of_another_size_is_rebuilt_from_its_tensors(depth: int, shared: Path, tmp_path: Path) -> None:
    """An eighth of YOLOX-l's width, and a third or all of its depth."""
    weights = load_weights(save(tmp_path / "x.pth", {"model": small_yolox(shared, depth=depth)}))
    multiples = weights.model_yaml["depth_multiple"], weights.model_yaml["width_multiple"]
    assert weights.model_yaml["name"] == "yolox" and multiples == (pytest.approx(depth / 3), 0.125)
    model = model_of_weights(weights, "given")
    assert model.model[0].conv.conv.out_channels == 8  # type: ignore[union-attr]
    assert [len(model.model[i].m) for i in (2, 4, 6, 9)] == [depth, 3 * depth, 3 * depth, depth]  # type: ignore[union-attr, arg-type]


# Missing, surplus and impossible tensors

V9_MIDDLE = "12.conv2.0.bottleneck.0.conv1.conv1.conv.weight"
BINS = "22.heads.0.anc2vec.anc2vec.weight"


def without(name: str) -> Callable[[Tensors], object]:
    return lambda t: t.pop(name)


def put(name: str, make: Callable[[Tensor], Any]) -> Callable[[Tensors], object]:
    """A change of one tensor."""
    return lambda t: t.update({name: make(t.get(name, torch.zeros(1)))})


def classes(nc: int) -> Callable[[Tensors], object]:
    """`nc` classes of one number each"""
    return put(LAST, lambda _: torch.zeros(nc, 1, 1, 1))


# What is done to the tensors of a sound file, and words of the message.
YOLOX: dict[str, tuple[Callable[[Tensors], object], tuple[str, ...]]] = {
    "a tensor in the middle is missing": (
        without(MIDDLE),
        ("YOLOX", "model.6.m.0.cv1.conv.weight is not in the checkpoint", "train from it"),
    ),
    "a tensor of which the size is read is missing": (without(LAST), (f"unsupported YOLOX file: it has no {LAST}",)),
    "one tensor more": (put("head.masks.0.weight", lambda x: x), ("'head.masks.0.weight' has no place in YOLOX",)),
    "a name that a terminal obeys": (put("head.\x1b[2J" + "x" * 5000, lambda x: x), (r"\x1b[2J", "has no place")),
    "a first convolution of five sides": (put(STEM, lambda x: x[..., None]), (STEM, "(8, 12, 3, 3, 1)", "4 non-empty")),
    "one number for all": (
        put(MIDDLE, lambda x: torch.zeros(1, 1, 1, 1).expand(x.shape)),
        ("damaged", "(32, 32, 1, 1)", "1 elements"),
    ),
    "tensors over each other": (
        lambda t: t.update(dict.fromkeys([n for n in t if t[n].ndim == 4][9:90], torch.zeros(400_000))),
        ("YOLOX", "share their storages"),
    ),
    "not a number": (put(MIDDLE, lambda x: with_at(x, float("nan"))), ("YOLOX", MIDDLE, "not finite")),
    "a variance below 0": (
        lambda t: t.update({n: -x for n, x in t.items() if n.endswith("running_var")}),
        ("YOLOX", "variance below 0"),
    ),
    "whole numbers": (put(MIDDLE, lambda x: x.to(torch.int32)), (MIDDLE, "int32", "floating point")),
    "complex numbers": (put(MIDDLE, lambda x: x.to(torch.complex64)), ("ComplexFloatStorage", "no checkpoint needs")),
    "a million classes of no width": (classes(10**6), (LAST, "(1000000, 1, 1, 1)", "(1000000, 32, 1, 1)")),
    "a width that the deep layers do not have": (
        put(STEM, lambda _: torch.zeros(4000, 12, 3, 3)),
        ("dark5.0.conv.weight", "(64000, 32000, 3, 3)"),
    ),
    "bottlenecks without an end": (
        lambda t: t.update({f"backbone.backbone.dark2.1.m.{i}.conv1.conv.weight": torch.zeros(1) for i in range(900)}),
        ("first stage", "at most 11"),
    ),
    "bottlenecks with a gap": (
        put("backbone.backbone.dark2.1.m.7.conv1.conv.weight", lambda x: x),
        ("first stage has the bottlenecks 0, 7",),
    ),
    "more tensors than any model": (
        lambda t: t.update({f"{i}": t[LAST] for i in range(100_000)}),
        ("YOLOX", "tensors, more than any model"),
    ),
}
YOLOV9: dict[str, tuple[Callable[[Tensors], object], tuple[str, ...]]] = {
    "a tensor in the middle is missing": (without(V9_MIDDLE), ("YOLOv9", "model.12.cv2.0.m.0.cv1.cv1.conv.weight")),
    "a tensor of which the size is read is missing": (without("0.conv.weight"), ("it has no 0.conv.weight",)),
    "one tensor more": (put("12.conv9.weight", lambda x: x), ("YOLOv9", "model.12.conv9.weight", "has no place")),
    "a name that a terminal obeys": (put("12.\x1b[2J" + "x" * 5000, lambda x: x), ("YOLOv9", r"\x1b[2J")),
    "a name without a layer": (put("hat.weight", lambda x: x), ("'hat.weight' has no place in YOLOv9",)),
    "other distances": (put(BINS, lambda x: x * 2), (BINS, "not 0, 1, 2")),
    "a stem of another size": (
        put("0.conv.weight", lambda _: torch.zeros(24, 3, 3, 3)),
        ("24 channels", "16 (YOLOv9-t)"),
    ),
    "bins that no side has": (put("22.heads.0.anchor_conv.2.weight", lambda x: x[:63]), ("63 channels", "4 to 256")),
    "a million classes of no width": (
        put("22.heads.0.class_conv.2.weight", lambda _: torch.zeros(10**6, 1, 1, 1)),
        ("(1000000, 1, 1, 1)", "(1000000, 128, 1, 1)"),
    ),
    "a width that the next layer does not have": (
        put("22.heads.0.class_conv.0.conv.weight", lambda _: torch.zeros(9000, 64, 1, 1)),
        ("22.heads.0.class_conv.1.conv.weight", "(9000, 9000, 3, 3)"),
    ),
}


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize(("family", "case"), [*(("YOLOX", c) for c in YOLOX), *(("YOLOv9", c) for c in YOLOV9)])
def test_invalid_tensors(family: str, case: str, shared: Path, tmp_path: Path) -> None:
    change, words = (YOLOX if family == "YOLOX" else YOLOV9)[case]
    change(tensors := small_yolox(shared) if family == "YOLOX" else v9_t(shared))
    text = refusal(save(tmp_path / "file.pt", {"model": tensors}))
    assert all(word in text for word in words), text
