"""Tests of the detector graph: pixels equal those of a validation at any size, detections those of models/nms.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tessera.deploy.exporting.detector_graph import Limits, Nodes, batch_detections, detect, preprocess, typed_value
from tessera.deploy.runtime.pipeline import letterbox_image
from tessera.models.nms import NmsSettings, non_max_suppression
from tessera.utils.image_size import SizeHw
from tests.deploy.exporting.conftest import session_of
from tests.deploy.exporting.made import made_image, thresholds, unmatched

IMGSZ, STRIDE = 96, 32


@pytest.fixture(scope="module", params=[IMGSZ, SizeHw(64, 96)])
def preprocessing(request: pytest.FixtureRequest) -> Any:
    """An image size, and images (B, H, W, 3) to what the network reads, in ONNX Runtime."""
    nodes = Nodes("before")
    given = typed_value("given", np.uint8, ["b", "h", "w", 3])
    images = preprocess(nodes, given, request.param, STRIDE).images
    return request.param, session_of(nodes, [given], [typed_value("images", np.float32, [None] * 4, images)])


SIDES = st.one_of(st.integers(1, 200), st.integers(1, 1500))


@given(height=SIDES, width=SIDES, gray=st.booleans(), seed=st.integers(0, 99))
@example(1, 1, False, 0)
@example(1, 1500, False, 0)
@example(1500, 1, True, 1)
@example(96, 96, False, 2)
@example(192, 192, False, 3)
@example(288, 192, False, 4)
@example(48, 96, False, 5)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_pixels_equal_the_pipelines(preprocessing: Any, height: int, width: int, gray: bool, seed: int) -> None:
    image = made_image(height, width, seed, gray=gray)
    imgsz, session = preprocessing
    expected, _ = letterbox_image(image, imgsz, STRIDE)
    (found,) = session.run(None, {"given": image[None]})
    assert found.dtype == np.float32
    levels = np.abs(found[0].transpose(1, 2, 0) * 255 - expected.astype(np.float32))
    # Values a millionth beside a half may round otherwise: that many, and by one level, where sides are tiny.
    assert levels.max() < 1.01 and (levels > 0.5).mean() <= 0.05


OUTPUTS = (("boxes", np.float32, 2), ("scores", np.float32, 1), ("classes", np.int64, 1), ("counts", np.int64, 1))


def graph_of(*, has_objectness: bool, suppress: bool, batched: bool = False) -> Any:
    nodes = Nodes("after")
    decoded = typed_value("decoded", np.float32, ["b", "a", "n"])
    limits = Limits(
        typed_value("conf", np.float32, [1]),
        typed_value("iou", np.float32, [1]) if suppress else None,
        typed_value("max_det", np.int64, [1]),
    )
    found = detect(nodes, decoded, limits, has_objectness=has_objectness)
    if batched:
        count = nodes.Slice(nodes.Shape(decoded), [0], [1])
        values = list(batch_detections(nodes, found, limits.max_det, count))
    else:
        values = [nodes.Slice(part, [0], limits.max_det) for part in found[:3]]
    outputs = [
        typed_value(name, dtype, [None] * (sides + batched * (name != "counts")), value)
        for value, (name, dtype, sides) in zip(values, OUTPUTS, strict=False)
    ]
    return session_of(nodes, [decoded, *(limit for limit in limits if limit is not None)], outputs)


@pytest.fixture(scope="module")
def graphs() -> dict[tuple[bool, bool], Any]:
    return {
        (objectness, suppress): graph_of(has_objectness=objectness, suppress=suppress)
        for objectness in (False, True)
        for suppress in (False, True)
    }


def predictions(rows: int, nc: int, objectness: bool, seed: int) -> torch.Tensor:
    """Boxes in clusters, so that some overlap; scores all different."""
    rng = np.random.default_rng(seed)
    middle = rng.uniform(0, 300, (max(rows // 8, 1), 2))[rng.integers(0, max(rows // 8, 1), rows)]
    centre = middle + rng.normal(0, 6, (rows, 2))
    scores = rng.uniform(0, 1, (rows, nc + objectness)) ** 2
    return torch.from_numpy(np.hstack([centre, rng.uniform(8, 60, (rows, 2)), scores]).astype(np.float32))[None]


@given(
    rows=st.integers(1, 200),
    nc=st.sampled_from([1, 3, 20]),
    objectness=st.booleans(),
    suppress=st.booleans(),
    conf=st.sampled_from([0.0, 0.1, 0.5, 0.999]),
    iou=st.sampled_from([0.2, 0.45, 0.7]),
    max_det=st.sampled_from([1, 7, 300]),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_detections_equal_the_suppressions(
    graphs: dict[tuple[bool, bool], Any],
    rows: int,
    nc: int,
    objectness: bool,
    suppress: bool,
    conf: float,
    iou: float,
    max_det: int,
    seed: int,
) -> None:
    decoded = predictions(rows, nc, objectness, seed)
    rules = NmsSettings(
        conf, iou if suppress else 1.0, max_det, multi_label=nc > 1, has_objectness=objectness, max_candidates=10**6
    )
    (expected,) = non_max_suppression(decoded, rules)
    found = run(graphs[objectness, suppress], decoded, conf, iou, max_det)
    assert (np.diff(found["scores"]) <= 0).all()
    assert len(found["scores"]) == len(expected.scores)
    assert unmatched(expected, found, px=1e-3, score=1e-6) == []


def run(session: Any, decoded: torch.Tensor, conf: float, iou: float, max_det: int) -> dict[str, np.ndarray]:
    values = {"decoded": decoded.numpy(), **thresholds(conf, iou, max_det)}
    feeds = {value.name: values[value.name] for value in session.get_inputs()}
    found = dict(zip((name for name, *_ in OUTPUTS), session.run(None, feeds), strict=False))
    assert found["classes"].dtype == np.int64
    return found


def test_no_detections(graphs: dict[tuple[bool, bool], Any]) -> None:
    for suppress in (False, True):
        found = run(graphs[True, suppress], predictions(50, 3, True, 0), 1.0, 0.5, 300)
        assert found["boxes"].shape == (0, 4) and found["scores"].shape == found["classes"].shape == (0,)
    batched = graph_of(has_objectness=False, suppress=False, batched=True)
    found = run(batched, predictions(20, 3, False, 0).repeat(2, 1, 1), 1.0, 0.5, 300)
    assert found["boxes"].shape == (2, 0, 4) and found["counts"].tolist() == [0, 0]


@pytest.mark.parametrize("max_det", [3, 300])
def test_images_of_a_batch_are_each_as_alone(graphs: dict[tuple[bool, bool], Any], max_det: int) -> None:
    batched = graph_of(has_objectness=True, suppress=True, batched=True)
    decoded = torch.cat([predictions(60, 3, True, seed) for seed in range(4)])
    decoded[1, :, 4] = 0  # nothing is found there
    found = run(batched, decoded, 0.3, 0.5, max_det)
    assert found["counts"].shape == (4,) and found["counts"][1] == 0
    assert found["boxes"].shape == (4, found["counts"].max(), 4)
    for number, count in enumerate(found["counts"]):
        alone = run(graphs[True, True], decoded[number : number + 1], 0.3, 0.5, max_det)
        assert len(alone["scores"]) == count <= max_det
        for name, part in alone.items():
            np.testing.assert_array_equal(found[name][number, :count], part)
        assert (found["classes"][number, count:] == -1).all() and not found["boxes"][number, count:].any()
