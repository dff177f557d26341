"""What is said of names that come near a published file's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessera.utils.checkpoints.resolve import resolve_weights
from tessera.utils.errors import UserError

YOLOX = "Published ones of YOLOX: yolox_tiny.pth, yolox_s.pth, yolox_m.pth, yolox_l.pth, yolox_x.pth."
YOLOV9 = "Published ones of YOLOv9: v9-t.pt, v9-s.pt, v9-m.pt, v9-c.pt."


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("yolox", YOLOX),
        ("yolox_z.pth", YOLOX),
        ("yolox_nano.pth", f"YOLOX-nano is a model that is not read here. {YOLOX}"),
        ("YOLOX-Nano", f"YOLOX-nano is a model that is not read here. {YOLOX}"),
        ("YOLOX_S.PTH", "Did you mean 'yolox_s.pth'?"),
        ("yoloxs", "Did you mean 'yolox_s.pth'?"),
        ("yolox-s.yaml", "Did you mean 'yolox_s.pth'?"),
        ("yolox_tinny.pth", "Did you mean 'yolox_tiny.pth'?"),
        ("yolov9t", "Did you mean 'v9-t.pt'?"),
        ("yolov9t.pt", "Did you mean 'v9-t.pt'?"),
        ("yolov9_t", "Did you mean 'v9-t.pt'?"),
        ("v9t.pt", "Did you mean 'v9-t.pt'?"),
        ("V9-C.pt", "Did you mean 'v9-c.pt'?"),
        ("v9-e", f"YOLOv9-e is a model that is not read here. {YOLOV9}"),
        ("yolov9-e.pt", f"YOLOv9-e is a model that is not read here. {YOLOV9}"),
        ("yolov9", YOLOV9),
        ("yolov5-s", "Did you mean 'yolov5s.pt'?"),
        ("yolov8n.pt", ""),  # of a family that is not known here
    ],
)
def test_a_name_that_begins_like_a_family_gets_names_of_that_family_alone(
    typed: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for other in ("yolov5x.pt", "mine.pt"):  # the user's own
        (tmp_path / other).write_bytes(b"x")
    with pytest.raises(UserError) as caught:
        resolve_weights(typed)
    hint = str(caught.value).partition(f"weights/{typed}.")[2].partition("Expected a checkpoint")[0].strip()
    assert hint == said


def test_a_classifiers_body_is_no_detector() -> None:
    with pytest.raises(
        UserError, match=r"imagenet: that is the body of a classifier, which only train\.py begins with"
    ):
        resolve_weights("imagenet")
