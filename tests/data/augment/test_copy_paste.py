"""Copy-paste: which objects are pasted, and pixels and labels compared with the oracle."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tessera.data.augment.geometry import CanvasLabels
from tessera.data.augment.pipeline import choose_copy_paste, draw_mosaic, render_scene
from tessera.utils.config import load_hyp
from tessera.utils.seeding import sample_rng
from tessera.utils.types import Sample
from tests.data.augment.made_scenes import ListSource, objects, share_outside, smooth_image, star
from tests.data.augment.mosaic_oracle import plain_scene

LOW = load_hyp("hyp.scratch-low.yaml")


def outlined_dataset(size: int = 96) -> ListSource:
    """Images with well separated polygons, so that some find a free place to be pasted."""
    rng = np.random.default_rng(8)
    samples = []
    for _ in range(5):
        boxes = np.array([[4, 4, 34, 40], [50, 44, 90, 90]], np.float32) + rng.uniform(-3, 3, (2, 1)).astype(np.float32)
        segments = [star(box, rng) for box in boxes]
        samples.append(Sample(smooth_image(size, size, rng), boxes, np.array([1, 2], np.int32), segments))
    return ListSource(samples)


@pytest.mark.parametrize("change", [{}, {"degrees": 20.0}, {"perspective": 0.0005}, {"flipud": 1.0, "fliplr": 1.0}])
def test_copy_paste_equals_the_plain_double_canvas(change: dict[str, float]) -> None:
    source = outlined_dataset()
    hyp = dataclasses.replace(LOW, **change)
    more = 0
    for seed in range(4):
        rng, twin = sample_rng(2, 0, seed), sample_rng(2, 0, seed)
        scene = draw_mosaic(seed % 5, range(5), (96, 96), hyp, rng)
        assert draw_mosaic(seed % 5, range(5), (96, 96), hyp, twin) == scene
        without = render_scene(scene, source.sample, 0.0, rng, np.empty((96, 96, 3), np.uint8))
        sample = render_scene(scene, source.sample, 0.6, rng, np.empty((96, 96, 3), np.uint8))
        expected, canvas = plain_scene(scene, [source.sample(i) for i in scene.indices], 0.6, twin)
        assert rng.random() == twin.random()
        assert sample.classes.tolist() == expected.classes.tolist()
        np.testing.assert_allclose(sample.boxes_xyxy, expected.boxes_xyxy, atol=0.8)
        assert share_outside(sample.image, canvas, scene.warp, tolerance=8) < 0.03
        more += len(sample.classes) - len(without.classes)
    assert more > 2


def test_pasted_objects_keep_clear_of_others() -> None:
    def outlined(*boxes: list[float]) -> CanvasLabels:
        return objects(*boxes, outlines=[[(x0, y0), (x1, y0), (x1, y1), (x0, y1)] for x0, y0, x1, y1 in boxes])

    rng = np.random.default_rng(0)
    free = choose_copy_paste(outlined([0, 0, 20, 20]), 1.0, 100, rng)
    assert free is not None
    assert free.boxes_xyxy.tolist() == [[80, 0, 100, 20]] and free.classes.tolist() == [0]
    assert free.points.tolist() == [[100, 0], [80, 0], [80, 20], [100, 20]] and free.counts.tolist() == [4]
    # The middle of the canvas mirrors onto itself.
    assert choose_copy_paste(outlined([40, 0, 60, 20]), 1.0, 100, rng) is None
    # 29 % of the existing box may be covered, 31 % may not.
    below, above = outlined([0, 0, 20, 20], [72.9, 0, 82.9, 20]), outlined([0, 0, 20, 20], [73.1, 0, 83.1, 20])
    first_below, first_above = choose_copy_paste(below, 1.0, 100, rng), choose_copy_paste(above, 1.0, 100, rng)
    assert first_below is not None and 0 in first_below.classes
    assert first_above is None or 0 not in first_above.classes
    # Two that overlap cannot both be pasted; the first is.
    pair = choose_copy_paste(outlined([0, 0, 20, 20], [5, 0, 25, 20]), 1.0, 100, rng)
    assert pair is not None and pair.classes.tolist() == [0]
    # Objects that are only boxes are never pasted.
    assert choose_copy_paste(objects([0, 0, 20, 20]), 1.0, 100, rng) is None
