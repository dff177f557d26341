"""The views that a training asks for."""

from __future__ import annotations

from tessera.utils.config import TrainConfig
from tessera.utils.training.data import views_asked_for
from tests.data.made_index import make_index


def test_labels_are_kept_by_the_size_that_is_trained_at() -> None:
    """Boxes of 4 pixels in pictures of 100: 1.3 at 33 pixels, 2.6 at 64."""
    pictures = make_index([(100, 100)], classes=[[0]])
    pictures.boxes_xyxy[:] = [10, 10, 14, 14]
    rounded, exact = (views_asked_for(pictures, TrainConfig(tile=64, imgsz=imgsz)) for imgsz in (33, 64))
    assert rounded.content_hash() == exact.content_hash()
