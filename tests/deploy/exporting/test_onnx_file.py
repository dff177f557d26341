"""Tests of ONNX exports: detections equal those of the pipeline."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

import tessera
from tessera.commands import export
from tessera.data.source.decode import read_image
from tessera.deploy.exporting.flags import ExportConfig
from tessera.deploy.exporting.formats import write_onnx
from tessera.deploy.exporting.job import ExportJob
from tessera.deploy.exporting.verify import precision_of
from tessera.deploy.runtime.runtimes import open_onnx
from tessera.models.detector import DetectionModel
from tessera.models.nms import NmsSettings
from tessera.utils.checkpoints.weights import load_weights, model_of_weights
from tessera.utils.files import sha256
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.machine.opencv import cv2
from tests.deploy.exporting.conftest import open_session
from tests.deploy.exporting.made import FREE, NAMES, checkpoint, differing, made_image, pipeline, thresholds, unmatched

IMGSZ, IOU = 96, 0.45
CONF = 0.375  # of the checkpoint
# Heights and widths that real images are resized to; () = as they are.
REAL_SIZES: tuple[tuple[int, ...], ...] = (
    *((),) * 6,
    *((3000, 4000), (1080, 1920), (1213, 1800), (700, 300), (2000, 500), (200, 150), (64, 400), (641, 640), (1, 1)),
)


@pytest.fixture(scope="module")
def model(made_pt: Path) -> DetectionModel:
    return model_of_weights(load_weights(made_pt), "best.pt").eval().fuse()


def detections(session: Any, image: np.ndarray, conf: float, max_det: int = 300) -> dict[str, Any]:
    given = {"image": image, **thresholds(conf, IOU, max_det)}
    feeds = {value.name: given[value.name] for value in session.get_inputs()}
    return dict(zip(("boxes", "scores", "classes"), session.run(None, feeds), strict=True))


def assert_equal(
    session: Any, model: DetectionModel, image: np.ndarray, conf: float, max_det: int = 300, iou: float = IOU
) -> int:
    """The detections are those of the pipeline; returns their number."""
    rules = NmsSettings(conf, iou, max_det, has_objectness=model.head.has_objectness)
    expected = pipeline(model, image, IMGSZ, rules)
    found = detections(session, image, conf, max_det)
    assert differing(expected, found, conf) == 0
    height, width = image.shape[:2]
    assert (found["boxes"] >= 0).all() and (found["boxes"] <= [width, height, width, height]).all()
    assert (np.diff(found["scores"]) <= 0).all() and (found["scores"] > conf).all()
    return len(found["scores"])


# An untrained network makes pixels of a single level that differs. So sizes are those whose pixels are whole numbers
# before they are divided: on every processor they are the same. test_preprocessing.py has all the others.
SMALL = st.integers(1, IMGSZ)
SIZES = st.one_of(
    st.tuples(SMALL, SMALL),
    st.builds(
        lambda by, side, tall: (by * IMGSZ, by * side)[:: 1 if tall else -1], st.integers(2, 9), SMALL, st.booleans()
    ),
)


@given(size_hw=SIZES, gray=st.booleans(), conf=st.sampled_from([0.05, 0.2, 0.6]))
@example((1, 1), False, 0.2)
@example((3024, 4032), False, 0.4)
@example((96, 60), True, 0.05)
@settings(max_examples=15, deadline=None, derandomize=True)
def test_detections_equal_the_pipelines(
    session: Any, model: DetectionModel, size_hw: tuple[int, int], gray: bool, conf: float
) -> None:
    assert_equal(session, model, made_image(*size_hw, sum(size_hw), gray=gray), conf)


def test_thresholds_are_inputs_that_no_runtime_can_pass_over(session: Any, model: DetectionModel) -> None:
    image = made_image(120, 90)
    assert [value.name for value in session.get_inputs()] == ["image", "conf", "iou", "max_det"]
    assert session.get_overridable_initializers() == [], "onnxruntime-node, OpenVINO and OpenCV never replace one"
    assert assert_equal(session, model, image, 0.05) > 20
    assert assert_equal(session, model, image, 0.1, max_det=5) == 5
    with pytest.raises(ValueError, match="conf"):
        session.run(None, {"image": image})
    nothing = detections(session, image, conf=1)
    assert nothing["boxes"].shape == (0, 4) and nothing["classes"].shape == (0,)


def test_it_is_one_sound_file_of_standard_operators(made_onnx: Path) -> None:
    onnx.checker.check_model(str(made_onnx), full_check=True)
    content = onnx.load(str(made_onnx), load_external_data=False)
    assert {imported.domain for imported in content.opset_import} <= {"", "ai.onnx"} and not content.functions
    assert not any(tensor.external_data for tensor in content.graph.initializer)
    assert [made.name for made in content.graph.output] == ["boxes", "scores", "classes"]
    assert str(Path.cwd()).encode() not in made_onnx.read_bytes(), "paths of this machine"
    assert list(made_onnx.parent.glob("*.data")) == []


def test_it_says_what_it_is(made_onnx: Path, made_pt: Path) -> None:
    said = {entry.key: entry.value for entry in onnx.load(str(made_onnx)).metadata_props}
    assert json.loads(said["names"]) == list(NAMES)
    assert said["format"] == "tessera-detector 1" and said["color"] == "RGB"
    assert (said["imgsz"], said["stride"], said["end2end"]) == ("96", "16", "false")
    assert float(said["conf"]) == 0.375 and json.loads(said["conf_per_class"]) == [0.25, 0.375, 0.5]
    assert json.loads(said["metrics"])["map50"] == 0.75
    assert said["weights_sha256"] == sha256(made_pt)
    assert said["data"] == "shapes.yaml" and said["data_hash"] == "c0ffee"
    assert said["tessera_version"] == tessera.__version__ and "git" in said
    assert said["torch_version"] == torch.__version__ and "Apache-2.0" in said["license"]


def test_the_lines_in_the_file_run_and_the_runtime_has_no_remark(made_onnx: Path, session: Any, tmp_path: Path) -> None:
    (tmp_path / "best.onnx").write_bytes(made_onnx.read_bytes())
    Image.fromarray(made_image(120, 90)).save(tmp_path / "photo.jpg")
    code = onnx.load(str(made_onnx)).doc_string + "for row in boxes:\n    print(row)\n"
    command = [sys.executable, "-I", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, check=True, timeout=120, capture_output=True, text=True)
    image = np.asarray(Image.open(tmp_path / "photo.jpg"))
    assert len(done.stdout.splitlines()) == len(detections(session, image, conf=0.4)["scores"]) > 0
    assert done.stderr == ""


def test_a_file_of_an_earlier_export_whose_thresholds_have_defaults_still_runs(made_onnx: Path, tmp_path: Path) -> None:
    content, image = onnx.load(str(made_onnx)), made_image(120, 90)
    for name, value in thresholds(CONF).items():
        content.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    onnx.save(content, tmp_path / "best.onnx")
    for conf, max_det in ((0.1, 300), (0.1, 5), (0.6, 300)):
        rules = NmsSettings(conf, IOU, max_det)
        found = [
            open_onnx(path, Accelerator())(image, rules).detections for path in (made_onnx, tmp_path / "best.onnx")
        ]
        assert torch.equal(found[0].boxes_xyxy, found[1].boxes_xyxy) and len(found[0].scores) > 0


@pytest.mark.slow
@pytest.mark.parametrize("size_hw", [None, [64, 96]])
def test_the_bare_network(made_pt: Path, model: DetectionModel, size_hw: list[int] | None) -> None:
    (path,) = export.run(weights=str(made_pt), raw=True, device="cpu", **({"imgsz": size_hw} if size_hw else {}))
    assert path.name == ("best-raw-64x96.onnx" if size_hw else "best-raw.onnx")
    session = open_session(path)
    (taken,) = session.get_inputs()
    assert isinstance(taken.shape[0], str) and (taken.shape[2:] == size_hw or not size_hw)
    for batch, height, width in ((3, 64, 96),) if size_hw else ((1, 32, 32), (2, 96, 160), (5, 64, 32)):
        images = torch.rand(batch, 3, height, width)
        with torch.no_grad():
            decoded = model(images)[0]
        expected = torch.cat((decoded[..., :4], decoded[..., 4:5] * decoded[..., 5:]), -1)
        (found,) = session.run(["predictions"], {"images": images.numpy()})
        np.testing.assert_allclose(found, expected.numpy(), atol=1e-3, rtol=1e-4)
    said = session.get_modelmeta().custom_metadata_map
    assert said["format"] == "tessera-network 1" and json.loads(said["size_hw"]) == size_hw


@pytest.mark.slow
def test_a_batch_of_images(made_pt: Path, session: Any) -> None:
    (path,) = export.run(weights=str(made_pt), imgsz=IMGSZ, batched=True, device="cpu")
    assert path.name == "best-batched.onnx"
    batched = open_session(path)
    images = np.stack([made_image(150, 110, seed) for seed in range(3)])
    boxes, scores, classes, counts = batched.run(None, {"images": images, **thresholds(0.1)})
    assert counts.max() == boxes.shape[1] > 0
    for number, image in enumerate(images):
        alone = detections(session, image, conf=0.1)
        count = counts[number]
        np.testing.assert_array_equal(classes[number, :count], alone["classes"])
        np.testing.assert_allclose(scores[number, :count], alone["scores"], atol=1e-4)
        np.testing.assert_allclose(boxes[number, :count], alone["boxes"], atol=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("end2end", [False, True])
def test_the_anchor_free_head(tmp_path: Path, end2end: bool) -> None:
    path = checkpoint(tmp_path / "free.pt", FREE)
    (exported,) = export.run(weights=str(path), imgsz=IMGSZ, end2end=end2end, device="cpu")
    model = model_of_weights(load_weights(path), "free.pt")
    model.head.strip_for_inference(end2end=end2end)
    model = model.eval().fuse()
    kinds = {node.op_type for node in onnx.load(str(exported)).graph.node}
    assert ("NonMaxSuppression" in kinds) != end2end
    for size_hw in ((96, 96), (768, 288), (20, 50)):
        iou = 1.0 if end2end else IOU
        assert assert_equal(open_session(exported), model, made_image(*size_hw), 0.05, iou=iou) > 3


@pytest.mark.slow
def test_half_is_half_where_it_may_be(made_pt: Path, made_onnx: Path, model: DetectionModel, tmp_path: Path) -> None:
    # Without the command's verdict: in ten bits an untrained network may prefer another of two boxes.
    path = tmp_path / "best-half.onnx"
    write_onnx(ExportJob.read(ExportConfig(weights=str(made_pt), imgsz=IMGSZ, half=True)), path)
    assert precision_of(path).startswith("float16") and path.stat().st_size < made_onnx.stat().st_size
    expected = pipeline(model, made_image(96, 96), IMGSZ, NmsSettings(0.2, IOU))
    found = detections(open_session(path), made_image(96, 96), conf=0.2)
    # Ten bits of a feature: a hundredth of a score, a part of a pixel.
    assert len(unmatched(expected, found, px=2, score=0.02)) <= len(expected.scores) // 5


@pytest.mark.slow
def test_official_weights_on_real_images(shared: Path, tmp_path: Path) -> None:
    path = tmp_path / "yolov5n.pt"
    path.write_bytes((shared / "weights" / "yolov5n.pt").read_bytes())
    (exported,) = export.run(weights=str(path), device="cpu")
    session = open_session(exported)
    model = model_of_weights(load_weights(path), "yolov5n.pt").eval().fuse()
    files = sorted((shared / "coco128" / "images").rglob("*.jpg"))[: len(REAL_SIZES)]
    seen = 0
    for file, size_hw in zip(files, REAL_SIZES, strict=True):
        image = read_image(file)
        if size_hw:
            image = np.asarray(cv2.resize(image, size_hw[::-1], interpolation=cv2.INTER_CUBIC), np.uint8)
        expected = pipeline(model, image, 640, NmsSettings(0.25, 0.45))
        found = detections(session, image, conf=0.25)
        assert differing(expected, found, 0.25, margin=1e-3) == 0, (file.name, size_hw)
        seen += len(expected.scores)
    assert seen > 20
