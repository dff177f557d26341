from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from utils.errors import UserError
from utils.evaluation.coco import COCO_IDS, COCO_NAMES, coco_category_ids
from utils.report.results import (
    RESULT_COLUMNS,
    TABLE_COLUMNS,
    CocoRows,
    ResultsTable,
    class_table,
    coco_image_ids,
    coco_results,
    interval_line,
    output_stems,
    read_results,
    save_coco_results,
    save_txt,
    speed_line,
    table_header,
    table_lines,
    validation_line,
)
from utils.types import Detections, Metrics

METRICS = Metrics(
    precision=0.71234,
    recall=0.5,
    map50=0.6,
    map=0.4,
    class_ids=np.array([0, 2]),
    per_class=np.array([[0.9, 0.6, 0.8, 0.5], [0.52468, 0.4, 0.4, 0.3]]),
    images_per_class=np.array([3, 0, 2]),
    objects_per_class=np.array([7, 0, 2]),
    images=5,
    objects=9,
    confidence=0.3,
)


def detections(n: int = 2) -> Detections:
    boxes = torch.tensor([[10.0, 20.0, 30.0, 60.0], [0.0, 0.0, 100.0, 200.12345]])[:n]
    return Detections(boxes, torch.tensor([0.875, 0.1234567])[:n], torch.tensor([3, 0])[:n])


def row(epoch: int, value: float = 0.5) -> Mapping[str, float]:
    return {column: epoch if column == "epoch" else value for column in RESULT_COLUMNS}


def test_class_table() -> None:
    table = class_table(METRICS, ["cat", "unused", "a name that is far too long to stand"])
    assert tuple(table.columns) == TABLE_COLUMNS
    assert table.iloc[0].tolist() == ["all", 5, 9, 0.71234, 0.5, 0.6, 0.4]
    assert table.iloc[2].tolist() == ["a name that is far too long to stand", 2, 2, 0.52468, 0.4, 0.4, 0.3]
    assert len(table) == 3


def test_lines_are_aligned() -> None:
    table = class_table(METRICS, ["cat", "unused", "a name that is far too long to stand"])
    header, lines = table_header(), table_lines(table)
    assert header.split() == list(TABLE_COLUMNS)
    assert lines[0] == validation_line(METRICS)
    assert lines[0].split() == ["all", "5", "9", "0.712", "0.5", "0.6", "0.4"]
    assert lines[2].split()[-6:] == ["2", "2", "0.525", "0.4", "0.4", "0.3"] and "..." in lines[2]
    assert {len(line) for line in lines} == {len(header)}


def test_speed_and_interval_lines() -> None:
    assert speed_line((0.54, 3.2, 0.9), (32, 3, 640, 640)) == (
        "Speed: 0.5 ms preparation, 3.2 ms inference, 0.9 ms NMS per image at shape (32, 3, 640, 640)"
    )
    assert interval_line(METRICS, 0.351, 0.449) == (
        "mAP50-95 0.400, 95 % interval 0.351 to 0.449 (bootstrap over 5 images)"
    )


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

    def test_a_path_of_its_own_kind_of_collision(self) -> None:
        """ "1.jpg" is the stem of one image and the name that another would get."""
        stems = output_stems([Path("/d/1.jpg"), Path("/d/1.png"), Path("/d/1.jpg.png")])
        assert len(set(stems)) == 3


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

    def test_same_stem_in_two_folders(self, tmp_path: Path) -> None:
        stems = output_stems([Path("/d/cam1/1.jpg"), Path("/d/cam2/1.jpg")])
        written = [save_txt(tmp_path, stem, detections(n), (200, 100), False) for n, stem in enumerate(stems, start=1)]
        assert [len(path.read_text().splitlines()) for path in written] == [1, 2]


class TestCoco:
    def test_ids(self) -> None:
        assert len(COCO_NAMES) == len(COCO_IDS) == len(set(COCO_NAMES)) == 80
        assert COCO_IDS[0] == 1 and COCO_IDS[-1] == 90
        ids = dict(zip(COCO_NAMES, COCO_IDS, strict=True))
        known = {"stop sign": 13, "backpack": 27, "suitcase": 33, "bowl": 51, "tv": 72, "toothbrush": 90, "book": 84}
        assert {name: ids[name] for name in known} == known
        assert coco_category_ids(COCO_NAMES) == COCO_IDS
        assert coco_category_ids(COCO_NAMES[::-1]) == tuple(range(80))
        assert coco_category_ids(["cat", "dog"]) == (0, 1)

    def test_image_ids(self) -> None:
        assert coco_image_ids(["000000000139", "7"]) == [139, 7]
        assert coco_image_ids(["000000000139", "cam1/7", "x"]) == [139, "cam1/7", "x"]
        assert coco_image_ids(["1", "01"]) == ["1", "01"]
        assert coco_image_ids(["²", "-3"]) == ["²", "-3"]

    def test_rows(self) -> None:
        rows = CocoRows.collect({1: detections(1), 0: detections(), 2: detections(0)})
        assert list(coco_results(rows, [139, "x", "y"], COCO_NAMES)) == [
            {"image_id": 139, "category_id": 4, "bbox": [10, 20, 20, 40], "score": 0.875},
            {"image_id": 139, "category_id": 1, "bbox": [0, 0, 100, 200.123], "score": 0.12346},
            {"image_id": "x", "category_id": 4, "bbox": [10, 20, 20, 40], "score": 0.875},
        ]

    def test_file_does_not_depend_on_the_ranks(self, tmp_path: Path) -> None:
        found = {i: detections(i % 3) for i in range(7)}
        ids = coco_image_ids([str(i) for i in range(7)])
        texts = set()
        for ranks in (1, 2, 9):
            gathered = [CocoRows.collect({i: d for i, d in found.items() if i % ranks == r}) for r in range(ranks)]
            save_coco_results(tmp_path / "predictions.json", gathered, ids, ["a", "b", "c", "d"])
            texts.add((tmp_path / "predictions.json").read_text())
        assert len(texts) == 1
        assert len(json.loads(texts.pop())) == sum(len(d) for d in found.values())

    def test_no_detections_are_valid_json(self, tmp_path: Path) -> None:
        save_coco_results(tmp_path / "p.json", [CocoRows.collect({}), CocoRows.collect({3: detections(0)})], [], ["a"])
        assert json.loads((tmp_path / "p.json").read_text()) == []


class TestResultsTable:
    def test_columns_are_plain(self, tmp_path: Path) -> None:
        table = ResultsTable(tmp_path / "results.csv")
        table.append(row(0, 0.123456789))
        header, line = table.path.read_text().splitlines()
        assert header.startswith("epoch,train/box_loss,train/obj_loss,train/cls_loss,metrics/precision,")
        assert header.endswith(",x/lr0,x/lr1,x/lr2,time/epoch_s,time/data_wait,images_per_s")
        assert line.startswith("0,0.123457,")

    def test_read(self, tmp_path: Path) -> None:
        table = ResultsTable(tmp_path / "results.csv")
        assert read_results(table.path).empty
        table.append(row(0))
        table.append({**row(1), "val/box_loss": float("nan")})
        frame = read_results(table.path)
        assert tuple(frame.columns) == RESULT_COLUMNS
        assert frame["epoch"].tolist() == [0, 1] and pd.api.types.is_integer_dtype(frame["epoch"])
        assert np.isnan(frame["val/box_loss"][1]) and frame["images_per_s"].tolist() == [0.5, 0.5]
        pd.testing.assert_frame_equal(pd.read_csv(table.path), frame)

    def test_resume_repeats_no_row(self, tmp_path: Path) -> None:
        table = ResultsTable(tmp_path / "results.csv")
        for epoch in range(5):
            table.append(row(epoch, 0.1))
        resumed = ResultsTable(table.path, start_epoch=3)
        resumed.append(row(3, 0.2))
        frame = read_results(table.path)
        assert frame["epoch"].tolist() == [0, 1, 2, 3]
        assert frame["x/lr0"].tolist() == [0.1, 0.1, 0.1, 0.2]

    def test_a_new_run_starts_empty(self, tmp_path: Path) -> None:
        ResultsTable(tmp_path / "results.csv").append(row(0))
        ResultsTable(tmp_path / "results.csv")
        assert read_results(tmp_path / "results.csv").empty

    @pytest.mark.parametrize("tail", ["2,0.5,0.", "2", "\0\0\0\0", ",".join(["2"] * len(RESULT_COLUMNS))])
    def test_a_torn_last_line_is_dropped(self, tmp_path: Path, tail: str) -> None:
        table = ResultsTable(tmp_path / "results.csv")
        table.append(row(0))
        table.append(row(1))
        whole = table.path.read_bytes()
        table.path.write_bytes(whole + tail.encode())
        assert read_results(table.path)["epoch"].tolist() == [0, 1]
        ResultsTable(table.path, start_epoch=7).append(row(7))
        assert read_results(table.path)["epoch"].tolist() == [0, 1, 7]

    @pytest.mark.parametrize("content", [b"", b"epoch,train/bo"])
    def test_a_torn_header(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "results.csv").write_bytes(content)
        ResultsTable(tmp_path / "results.csv", start_epoch=2).append(row(2))
        assert read_results(tmp_path / "results.csv")["epoch"].tolist() == [2]

    def test_windows_line_ends_and_byte_order_mark(self, tmp_path: Path) -> None:
        table = ResultsTable(tmp_path / "results.csv")
        table.append(row(0))
        table.path.write_bytes(b"\xef\xbb\xbf" + table.path.read_bytes().replace(b"\n", b"\r\n"))
        assert read_results(table.path)["epoch"].tolist() == [0]

    def test_another_table_is_refused_and_kept(self, tmp_path: Path) -> None:
        path = tmp_path / "results.csv"
        path.write_text("epoch,loss\n0,1\n")
        with pytest.raises(UserError, match=r"results.csv:1: found the columns 'epoch, loss', expected"):
            ResultsTable(path)
        assert path.read_text() == "epoch,loss\n0,1\n"

    @pytest.mark.parametrize("bad", ["1,2", "1" + ",x" * 16, "nan" + ",1" * 16, "0.5" + ",1" * 16])
    def test_a_bad_line_is_named(self, tmp_path: Path, bad: str) -> None:
        table = ResultsTable(tmp_path / "results.csv")
        table.append(row(0))
        table.path.write_text(table.path.read_text() + bad + "\n" + table.path.read_text().splitlines()[1] + "\n")
        with pytest.raises(UserError, match=r"results\.csv:3: found .* expected 17 numbers"):
            read_results(table.path)

    def test_wrong_keys_are_a_defect(self, tmp_path: Path) -> None:
        with pytest.raises(AssertionError, match="extra"):
            ResultsTable(tmp_path / "results.csv").append({**row(0), "extra": 1})
