"""A label file for each image, under a name of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tessera.utils.evaluation.label_files import output_stems, save_txt
from tessera.utils.types import Detections


def detections(n: int = 2) -> Detections:
    boxes = torch.tensor([[10.0, 20.0, 30.0, 60.0], [0.0, 0.0, 100.0, 200.12345]])[:n]
    return Detections(boxes, torch.tensor([0.875, 0.1234567])[:n], torch.tensor([3, 0])[:n])


@pytest.mark.parametrize(
    ("paths", "stems"),
    [
        ([], []),
        (["/a/1.jpg", "/b/2.jpg"], ["1", "2"]),
        (
            ["/data/cam1/0001.jpg", "/data/cam2/0001.jpg", "/data/x/../cam2/7.v2.png"],
            ["cam1/0001", "cam2/0001", "cam2/7.v2"],
        ),
        (["/d/1.jpg", "/d/1.png"], ["1.jpg", "1.png"]),
        (["/d/a/IMG.jpg", "/d/b/img.jpg"], ["a/IMG", "b/img"]),
        (["/d/a/1.jpg", "/d/A/1.jpg", "/d/a/1.jpg"], ["a/1.jpg", "A/1.jpg-2", "a/1.jpg-3"]),
    ],
)
def test_output_stems(paths: list[str], stems: list[str]) -> None:
    assert output_stems([Path(path) for path in paths]) == stems


def test_rows_are_fractions_of_the_image_and_replace_those_before(tmp_path: Path) -> None:
    target = save_txt(tmp_path / "labels", "img", detections(), (200, 100), save_conf=True)
    assert target == tmp_path / "labels" / "img.txt"
    assert target.read_text() == "3 0.2 0.2 0.2 0.2 0.875\n0 0.5 0.500309 1 1.00062 0.123457\n"
    save_txt(tmp_path / "labels", "img", detections(1), (200, 100), save_conf=False)
    assert target.read_text() == "3 0.2 0.2 0.2 0.2\n"
    save_txt(tmp_path / "labels", "img", detections(0), (200, 100), save_conf=False)
    assert target.read_text() == ""
