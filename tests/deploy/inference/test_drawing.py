"""Images with boxes: grids, labels, class colours and fonts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tessera.deploy.inference import drawing
from tessera.deploy.inference.drawing import (
    MAX_SIDE,
    Annotations,
    _free_place,
    class_colour,
    class_text,
    drawable,
    grid,
    text_colour,
)

NAMES = ["person", "traffic light", "汽车", "a class whose name is longer than any image could ever be wide " * 3]


def grey(count: int, height: int, width: int) -> NDArray[np.uint8]:
    return np.full((count, height, width, 3), 128, np.uint8)


def marks(boxes: list[list[float]], classes: list[int], scores: list[float] | None = None) -> Annotations:
    return Annotations(
        np.array(boxes, np.float32).reshape(-1, 4),
        np.array(classes, np.int64),
        None if scores is None else np.array(scores, np.float32),
    )


def luminance(colour: tuple[int, int, int]) -> float:
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in (c / 255 for c in colour)]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))


def test_a_box_is_drawn_in_its_class_colour_where_it_lies() -> None:
    image = grid(grey(1, 640, 640), [marks([[100, 200, 300, 400]], [1])], NAMES, [])
    assert image.shape == (640, 640, 3)
    for x, y in ((100, 300), (300, 300), (200, 200), (200, 400)):
        assert tuple(image[y, x]) == class_colour(1)
    assert tuple(image[300, 200]) == (128, 128, 128)


def test_an_ignored_region_is_white_in_black_and_has_no_label() -> None:
    plain, marked = (grid(grey(1, 640, 640), [marks([[100, 200, 300, 400]] * n, [-1] * n)], NAMES, []) for n in (0, 1))
    changed = np.argwhere((plain != marked).any(-1))
    assert (changed.min(0) > (190, 90)).all() and (changed.max(0) < (410, 310)).all()
    assert marked[200, 200].tolist() == [255] * 3 and marked[204, 200].tolist() == [0] * 3


def test_boxes_shrink_with_their_image_in_a_grid() -> None:
    annotations = [marks([], []) for _ in range(16)]
    annotations[6] = marks([[0, 320, 320, 639]], [0])  # second row, third column of 4 x 4
    image = grid(grey(16, 640, 640), annotations, NAMES, [])
    assert image.shape == (1920, 1920, 3)
    left, top = 2 * 480, 480
    assert tuple(image[top + 350, left + 240]) == class_colour(0)
    coloured = np.argwhere((image == class_colour(0)).all(-1))
    assert (coloured.min(0) >= (top, left)).all() and (coloured.max(0) < (top + 480, left + 480)).all()


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 20), height=st.integers(1, 700), width=st.integers(1, 700))
def test_any_batch_fits_the_grid(count: int, height: int, width: int) -> None:
    image = grid(grey(count, height, width), [marks([], [])] * min(count, 16), NAMES, [])
    assert max(image.shape[:2]) <= MAX_SIDE
    assert min(image.shape[:2]) >= 1


def test_images_of_several_sizes_share_a_scale_and_lie_in_the_middle_of_their_places() -> None:
    images = [*grey(2, 480, 640), *grey(1, 640, 320)]
    annotations = [marks([], []), marks([], []), marks([[-50, 100, 700, 300]], [1])]
    image = grid(images, annotations, NAMES, [])
    assert image.shape == (1280, 1280, 3)
    lies = np.argwhere((image[640:, :640] != 255).any(-1))
    assert lies.min(0).tolist() == [0, 160] and lies.max(0).tolist() == [638, 478]  # a white seam ends each image
    green = np.argwhere((image == class_colour(1)).all(-1))
    assert green.min(0)[1] >= 160 and green.max(0)[1] < 480  # cut at the border of its own image


def test_an_image_on_which_nothing_was_found_says_so() -> None:
    plain = grid(grey(1, 320, 320), [marks([], [])], NAMES, [])  # labels alone have no confidence
    for mark, says in ((marks([[10, 10, 50, 50]], [1], [0.9]), False), (marks([], [], []), True)):
        image = grid(grey(1, 320, 320), [mark], NAMES, [])
        assert np.array_equal(image[140:180, 80:240], plain[140:180, 80:240]) is not says


def test_small_images_are_enlarged_until_labels_are_legible() -> None:
    assert grid(grey(4, 64, 64), [marks([], [])] * 4, NAMES, []).shape == (640, 640, 3)


@settings(max_examples=200, deadline=None)
@given(
    box=st.tuples(*[st.integers(0, 319)] * 4),
    label=st.tuples(st.integers(8, 24), st.integers(10, 160)),
    taken=st.lists(st.tuples(*[st.integers(0, 320)] * 4), max_size=5),
)
def test_labels_lie_in_the_image_and_on_no_other(
    box: tuple[int, ...], label: tuple[int, int], taken: list[tuple[int, int, int, int]]
) -> None:
    x1, x2 = sorted((box[0], box[2]))
    y1, y2 = sorted((box[1], box[3]))
    place = _free_place([x1, y1, x2, y2], label, (320, 320), taken, 2)
    if place is None:
        assert taken  # an empty image has room for every label
        return
    x, y = place
    assert 0 <= x <= 320 - label[1] and 0 <= y <= 320 - label[0]
    for left, top, right, bottom in taken:
        apart = x >= right or y >= bottom or x + label[1] <= left or y + label[0] <= top
        assert apart


def test_what_cannot_be_drawn_well_is_still_drawn_without_an_error() -> None:
    boxes = [[-50, -50, 700, 700], [10, 10, 10, 10], [630, 630, 640, 640], [700, 700, 800, 800], [0, 0, 5, 5]]
    image = grid(grey(1, 640, 640), [marks(boxes, [3, 2, 1, 0, 99])], NAMES, ["ü" * 300])
    assert (image != 128).any()


def test_text_is_readable_on_every_class_colour() -> None:
    for class_id in range(30):
        colour = class_colour(class_id)
        light, dark = sorted((luminance(colour), luminance(text_colour(colour))), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5  # WCAG 2.1, level AA


def test_text_is_one_line_of_characters_that_a_font_has() -> None:
    assert drawable("a\n\tb") == "a b"
    assert drawable("Größe 5 €") == "Größe 5 €"
    assert drawable("x" * 50, 10) == "x" * 9 + "…"
    assert drawable("\U0010fffd") == "?"


def test_a_class_whose_characters_no_font_has_is_shown_by_its_number(caplog: pytest.LogCaptureFixture) -> None:
    for cached in (drawing.class_text, drawing._warn_of_fonts):
        cached.cache_clear()
    names = ["cat", "\U0010fffd", "a\U0010fffdb", "\U0010fffc"]
    assert [class_text(number, name) for number, name in enumerate(names)] == ["cat", "1 ?", "2 a?b", "3 ?"]
    assert caplog.text.count("Install Noto fonts, such as fonts-noto-cjk") == 1
