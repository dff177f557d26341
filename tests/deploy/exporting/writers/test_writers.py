"""Tests of all installed export formats: metadata, dynamic sizes, safetensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tessera.commands import export
from tessera.deploy.exporting.parity.file_content import precision_of
from tessera.deploy.runtime.runtimes import open_exported
from tessera.utils.checkpoints.weights import load_weights, model_of_weights
from tessera.utils.errors import UserError
from tessera.utils.evaluation.network import ImageDetector, Network
from tessera.utils.machine.accelerator import Accelerator
from tests.deploy.exporting.made import NAMES

pytestmark = pytest.mark.slow  # five exports, and each tried on a score of images

INCLUDED = ("openvino", "torchscript", "safetensors")


@pytest.fixture(scope="module")
def written(made_pt: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The files by suffix; that each detects what the checkpoint detects is checked by the export itself."""
    for package in ("onnx", "onnxscript", "openvino", "safetensors"):
        pytest.importorskip(package)
    source = tmp_path_factory.mktemp("writers") / "best.pt"
    source.write_bytes(made_pt.read_bytes())
    return {path.suffix: path for path in export.run(weights=str(source), include=INCLUDED, imgsz=96, device="cpu")}


def test_each_says_what_it_is(written: dict[str, Path]) -> None:
    assert {path.name for path in written.values()} == {"best.xml", "best.torchscript", "best.safetensors"}
    for suffix in (".xml", ".torchscript"):
        opened = open_exported(written[suffix], Accelerator(), trust_file=True)
        assert isinstance(opened, ImageDetector if suffix == ".xml" else Network)
        assert (opened.names, opened.stride, opened.confidence) == (NAMES, 16, 0.375)
        assert opened.imgsz == 96 and opened.class_confidences == (0.25, 0.375, 0.5)
        assert precision_of(written[suffix]).startswith("float32")


def test_networks_take_any_number_of_images_of_any_size(written: dict[str, Path], made_pt: Path) -> None:
    weights = load_weights(made_pt)
    model = model_of_weights(weights, "best.pt").eval()
    for suffix in (".torchscript",):
        opened = open_exported(written[suffix], Accelerator(), trust_file=True)
        for shape in ((1, 3, 32, 96), (3, 3, 64, 48)):
            images = torch.rand(shape)
            with torch.no_grad():
                rows = model(images)[0]
            expected = torch.cat((rows[..., :4], rows[..., 5:] * rows[..., 4:5]), -1)
            torch.testing.assert_close(opened(images), expected, rtol=1e-3, atol=2e-3)  # type: ignore[operator]


def test_safetensors_are_weights_as_the_checkpoints(written: dict[str, Path], made_pt: Path) -> None:
    found, before = load_weights(written[".safetensors"]), load_weights(made_pt)
    assert found._replace(state_dict={}, source="") == before._replace(state_dict={}, source="", checkpoint=None)
    assert found.state_dict.keys() == before.state_dict.keys()
    assert all(torch.equal(found.state_dict[name], tensor) for name, tensor in before.state_dict.items())


def test_safetensors_that_are_damaged_or_of_another_program(written: dict[str, Path], tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    cut, other = tmp_path / "cut.safetensors", tmp_path / "other.safetensors"
    cut.write_bytes(written[".safetensors"].read_bytes()[:900])
    with pytest.raises(UserError, match=r"cut\.safetensors: not a valid safetensors file"):
        load_weights(cut)
    safetensors.save_file({"a": torch.zeros(2)}, other)
    with pytest.raises(UserError, match=r"other\.safetensors: found format None, .*another program"):
        load_weights(other)
