"""results.csv through crashes and resumes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tessera.analysis.charts import read_results
from tessera.utils.errors import UserError
from tessera.utils.report.results_csv import ResultsTable, result_columns

NAMES = ("box", "obj", "cls")
RESULT_COLUMNS = result_columns(NAMES)


def row(epoch: int, value: float = 0.5) -> Mapping[str, float]:
    return {column: epoch if column == "epoch" else value for column in RESULT_COLUMNS}


class TestResultsTable:
    def test_written_and_read(self, tmp_path: Path) -> None:
        table = ResultsTable(tmp_path / "results.csv", NAMES)
        assert read_results(table.path).empty
        table.append(row(0, 0.123456789))
        table.append({**row(1), "val/box_loss": float("nan")})
        header, line, _ = table.path.read_text().splitlines()
        assert header.startswith("epoch,train/box_loss,train/obj_loss,train/cls_loss,metrics/precision,")
        assert header.endswith(",x/lr0,x/lr1,x/lr2,time/epoch_s,time/data_wait,images_per_s")
        assert line.startswith("0,0.123457,")
        frame = read_results(table.path)
        assert frame["epoch"].tolist() == [0, 1] and pd.api.types.is_integer_dtype(frame["epoch"])
        assert np.isnan(frame["val/box_loss"][1])
        pd.testing.assert_frame_equal(pd.read_csv(table.path), frame)

    def test_a_resume_repeats_no_row_and_a_new_run_starts_empty(self, tmp_path: Path) -> None:
        table = ResultsTable(tmp_path / "results.csv", NAMES)
        for epoch in range(5):
            table.append(row(epoch, 0.1))
        ResultsTable(table.path, NAMES, start_epoch=3).append(row(3, 0.2))
        frame = read_results(table.path)
        assert frame["epoch"].tolist() == [0, 1, 2, 3]
        assert frame["x/lr0"].tolist() == [0.1, 0.1, 0.1, 0.2]
        ResultsTable(table.path, NAMES)
        assert read_results(table.path).empty

    @pytest.mark.parametrize("tail", ["2,0.5,0.", "2", "\0\0\0\0", ",".join(["2"] * len(RESULT_COLUMNS))])
    def test_a_torn_last_line_is_dropped(self, tmp_path: Path, tail: str) -> None:
        table = ResultsTable(tmp_path / "results.csv", NAMES)
        table.append(row(0))
        table.append(row(1))
        whole = table.path.read_bytes()
        table.path.write_bytes(whole + tail.encode())
        assert read_results(table.path)["epoch"].tolist() == [0, 1]
        ResultsTable(table.path, NAMES, start_epoch=7).append(row(7))
        assert read_results(table.path)["epoch"].tolist() == [0, 1, 7]

    @pytest.mark.parametrize("content", [b"", b"epoch,train/bo"])
    def test_a_torn_header(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "results.csv").write_bytes(content)
        ResultsTable(tmp_path / "results.csv", NAMES, start_epoch=2).append(row(2))
        assert read_results(tmp_path / "results.csv")["epoch"].tolist() == [2]

    @pytest.mark.parametrize("change", ["empty", "no line end", "gone", "a link"])
    def test_a_file_that_was_changed_during_the_run_loses_no_epoch(self, tmp_path: Path, change: str) -> None:
        table = ResultsTable(tmp_path / "results.csv", NAMES)
        table.append(row(0))
        (other := tmp_path / "other").write_text("mine")
        table.path.write_bytes(b"" if change == "empty" else table.path.read_bytes().rstrip())
        if change in ("gone", "a link"):
            table.path.unlink()
        if change == "a link":
            table.path.symlink_to(other)
        table.append(row(1))
        assert read_results(table.path)["epoch"].tolist() == [0, 1] and other.read_text() == "mine"

    def test_line_ends_and_byte_order_mark_of_an_editor(self, tmp_path: Path) -> None:
        table = ResultsTable(tmp_path / "results.csv", NAMES)
        table.append(row(0))
        table.path.write_bytes(b"\xef\xbb\xbf" + table.path.read_bytes().replace(b"\n", b"\r\n") + b"\r\n")
        assert read_results(table.path)["epoch"].tolist() == [0]

    def test_another_table_is_refused_and_kept(self, tmp_path: Path) -> None:
        path = tmp_path / "results.csv"
        path.write_text("epoch,loss\n0,1\n")
        with pytest.raises(UserError, match=r"results.csv:1: found 'loss' as column 2, expected"):
            ResultsTable(path, NAMES)
        assert path.read_text() == "epoch,loss\n0,1\n"

    @pytest.mark.parametrize("bad", ["1,2", "1" + ",x" * 16, "nan" + ",1" * 16, "0.5" + ",1" * 16])
    def test_a_bad_line_is_named(self, tmp_path: Path, bad: str) -> None:
        table = ResultsTable(tmp_path / "results.csv", NAMES)
        table.append(row(0))
        table.path.write_text(table.path.read_text() + bad + "\n" + table.path.read_text().splitlines()[1] + "\n")
        with pytest.raises(UserError, match=r"results\.csv:3: found .* expected 17 numbers"):
            read_results(table.path)

    @pytest.mark.parametrize("content", [bytes(range(256)) * 40, b"x" * 200_000 + b"\n", b"epoch\r\r,\n\xff\xfe\n"])
    def test_what_is_no_table_is_one_short_message(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "results.csv"
        path.write_bytes(content)
        for read in (lambda: read_results(path), lambda: ResultsTable(path, NAMES, start_epoch=1)):
            with pytest.raises(
                UserError, match=r"results\.csv(:\d+)?: .* Move (it|the file) away; a new one"
            ) as caught:
                read()
            assert len(str(caught.value)) < 1500 and path.read_bytes() == content

    def test_a_fifo_is_named(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "results.csv")
        with pytest.raises(UserError, match="it is a FIFO, expected a plain file"):
            ResultsTable(tmp_path / "results.csv", NAMES, start_epoch=1)
