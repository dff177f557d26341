"""Predictions equal to those of the families' own code, for every way of loading a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tessera.data.source.decode import read_image
from tessera.deploy.exporting.flags import ExportConfig
from tessera.deploy.exporting.formats import write_onnx
from tessera.deploy.exporting.job import ExportJob
from tessera.deploy.runtime.pipeline import letterbox_image, network_input
from tessera.deploy.runtime.runtimes import open_exported
from tessera.models.detector import DetectionModel
from tessera.utils.boxes import xyxy_to_cxcywh
from tessera.utils.checkpoints.weights import load_weights, model_of_weights
from tessera.utils.errors import UserError
from tessera.utils.evaluation.network import Network, open_model
from tessera.utils.machine.accelerator import accelerator_of
from tessera.utils.ranks.world import World
from tests import families
from tests.deploy.foreign.made import save

each_family = pytest.mark.parametrize("reference", families.FILES)


@pytest.fixture
def image() -> Tensor:
    """The image as the model gets it, float32 (1, 3, 160, 224)."""
    return families.image().permute(2, 0, 1)[None].float() / 255


def opened(path: Path) -> DetectionModel:
    return model_of_weights(load_weights(path), str(path)).eval()


def expected_rows(shared: Path, reference: str, *, has_objectness: bool) -> Tensor:
    """(735, 84) or with objectness (735, 85): the family's rows as this program has them, with centre and size."""
    rows = torch.from_numpy(families.rows(shared, reference))
    if reference.startswith("yolov9"):  # these are corners
        return torch.cat((xyxy_to_cxcywh(rows[:, :4]), rows[:, 4:]), 1)
    return rows if has_objectness else torch.cat((rows[:, :4], rows[:, 4:5] * rows[:, 5:]), 1)


def assert_rows(decoded: Tensor, expected: Tensor) -> None:
    assert decoded.shape == (1, *expected.shape)
    error = (decoded[0] - expected).abs().amax(0) / expected.abs().amax(0)
    assert float(error.max()) < families.RELATIVE


@each_family
def test_rows_of_the_import_and_of_the_fused_model(
    reference: str, family_files: Callable[[str], Path], shared: Path, image: Tensor
) -> None:
    model = opened(family_files(reference))
    expected = expected_rows(shared, reference, has_objectness=model.head.has_objectness)
    with torch.no_grad():
        assert_rows(model(image)[0], expected)
        assert_rows(model.fuse()(image)[0], expected)
        assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in model.modules())


def test_rows_of_the_published_graph_of_yolox_nano(family_files: Callable[[str], Path], shared: Path) -> None:
    graph = pytest.importorskip("onnxruntime").InferenceSession(shared / "reference/permissive/yolox_nano.onnx")
    canvas = letterbox_image(read_image(next((shared / "coco128").rglob("*009.jpg"))), 416, 32, (416, 416))[0]
    image = network_input(canvas, torch.device("cpu"))
    expected = torch.from_numpy(graph.run(None, {"images": (image.flip(1) * 255).numpy()})[0])[0]
    model = opened(family_files(families.NANO))
    for network in (lambda: model, model.fuse):
        with torch.no_grad():
            offsets, *logits = network()(image)[1]
        assert_rows(torch.cat((offsets, *(x.sigmoid() for x in logits)), 2), expected)


def test_separable_convolutions_of_another_width(family_files: Callable[[str], Path], tmp_path: Path) -> None:
    nano = torch.load(family_files(families.NANO))["model"]
    wide = {n: torch.ones([2 * s if s >= 16 and s != 80 else s for s in t.shape]) for n, t in nano.items()}
    assert opened(save(tmp_path / "wide.pth", {"model": wide})).model[1].pconv.conv.out_channels == 64
    wide["backbone.backbone.dark5.1.conv2.conv.weight"] = torch.ones(512, 512, 1, 1)
    with pytest.raises(UserError, match=r"dark5.1.conv2.conv.weight' is .*, expected \(512, 1024, 1, 1\)"):
        opened(save(tmp_path / "wrong.pth", {"model": wide}))


@pytest.mark.parametrize("reference", ["yolox_tiny", "yolov9-t"])
def test_rows_of_the_pipeline(reference: str, family_files: Callable[[str], Path], shared: Path) -> None:
    backend = open_model(str(family_files(reference)), World(accelerator=accelerator_of(torch.device("cpu"))))
    backend.size_hw = families.SIZE_HW  # without the padding that validation adds around an image
    assert_pipeline(backend, expected_rows(shared, reference, has_objectness=backend.has_objectness))


@pytest.mark.slow
@pytest.mark.parametrize("reference", ["yolox_tiny", "yolov9-t", "yolov9-c"])
def test_rows_of_the_exported_onnx(
    reference: str, family_files: Callable[[str], Path], shared: Path, tmp_path: Path
) -> None:
    config = ExportConfig(weights=str(family_files(reference)), raw=True, imgsz=families.SIZE_HW)
    path = tmp_path / "raw.onnx"
    write_onnx(ExportJob.read(config), path)
    backend = open_exported(str(path), accelerator_of(torch.device("cpu")))
    assert isinstance(backend, Network)
    assert_pipeline(backend, expected_rows(shared, reference, has_objectness=backend.has_objectness))


def assert_pipeline(backend: Network, expected: Tensor) -> None:
    """Compare the rows of the image in a pipeline, before NMS."""
    pixels = families.image().numpy()
    canvas, _ = letterbox_image(pixels, max(families.SIZE_HW), backend.stride, backend.size_hw)
    assert_rows(backend(network_input(canvas, backend.accelerator.device)), expected)
