"""A label file for each image, under a name of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from tessera.utils.evaluation.label_files import output_stems, save_txt
from tessera.utils.types import Detections


def detections(n: int = 2) -> Detections:
    boxes = torch.tensor([[10.0, 20.0, 30.0, 60.0], [0.0, 0.0, 100.0, 200.12345]])[:n]
    return Detections(boxes, torch.tensor([0.875, 0.1234567])[:n], torch.tensor([3, 0])[:n])


class TestOutputStems:
    def test_stems_where_they_differ(self) -> None:
        assert output_stems([Path("/a/1.jpg"), Path("/b/2.jpg")]) == ["1", "2"]
        assert output_stems([]) == []

    def test_folders_where_stems_meet(self) -> None:
        paths = [Path("/data/cam1/0001.jpg"), Path("/data/cam2/0001.jpg"), Path("/data/x/../cam2/7.v2.png")]
        assert output_stems(paths) == ["cam1/0001", "cam2/0001", "cam2/7.v2"]

    def test_suffixes_where_folders_meet(self) -> None:
        assert output_stems([Path("/d/1.jpg"), Path("/d/1.png")]) == ["1.jpg", "1.png"]

    def test_case_counts_as_equal(self) -> None:
        assert output_stems([Path("/d/a/IMG.jpg"), Path("/d/b/img.jpg")]) == ["a/IMG", "b/img"]


class TestSaveTxt:
    def test_rows_are_shares_of_the_image(self, tmp_path: Path) -> None:
        target = save_txt(tmp_path / "labels", "img", detections(), (200, 100), save_conf=True)
        assert target == tmp_path / "labels" / "img.txt"
        first, second = target.read_text().splitlines()
        assert first == "3 0.2 0.2 0.2 0.2 0.875"
        assert second.split()[0] == "0" and second.split()[-1] == "0.123457"
        np.testing.assert_allclose([float(x) for x in second.split()[1:5]], [0.5, 0.5, 1, 1], atol=1e-3)

    def test_replaced_not_appended(self, tmp_path: Path) -> None:
        save_txt(tmp_path, "img", detections(), (200, 100), save_conf=True)
        target = save_txt(tmp_path, "img", detections(1), (200, 100), save_conf=False)
        assert target.read_text() == "3 0.2 0.2 0.2 0.2\n"
        save_txt(tmp_path, "img", detections(0), (200, 100), save_conf=False)
        assert target.read_text() == ""
