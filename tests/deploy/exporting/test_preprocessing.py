"""Tests of the ONNX preprocessing: pixels equal those of a validation at any size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tessera.deploy.exporting.detector_graph import Nodes, preprocess, typed_value
from tessera.deploy.runtime.pipeline import letterbox_image
from tests.deploy.exporting.conftest import session_of
from tests.deploy.exporting.made import picture

IMGSZ, STRIDE = 96, 32


def graph_of(imgsz: int) -> Any:
    """Pictures (B, H, W, 3) to what the network reads, in ONNX Runtime."""
    nodes = Nodes("before")
    pictures = typed_value("pictures", np.uint8, ["b", "h", "w", 3])
    images = preprocess(nodes, pictures, imgsz, STRIDE).images
    return session_of(nodes, [pictures], [typed_value("images", np.float32, [None] * 4, images)])


@pytest.fixture(scope="module")
def small() -> Any:
    return graph_of(IMGSZ)


def difference(session: Any, image: np.ndarray, imgsz: int) -> tuple[float, float]:
    """Largest difference in levels, and the share of values that differ at all."""
    expected, _ = letterbox_image(image, imgsz, STRIDE)
    (found,) = session.run(None, {"pictures": image[None]})
    assert found.dtype == np.float32
    levels = np.abs(found[0].transpose(1, 2, 0) * 255 - expected.astype(np.float32))
    return float(levels.max()), float((levels > 0.5).mean())


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
def test_pixels_equal_the_pipelines(small: Any, height: int, width: int, gray: bool, seed: int) -> None:
    most, share = difference(small, picture(height, width, seed, gray=gray), IMGSZ)
    # Values a millionth beside a half may round otherwise: that many, and by one level, where sides are tiny.
    assert most < 1.01, "levels"
    assert share <= 0.05
