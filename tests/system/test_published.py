"""A command with a published name: its file comes from a server, is reported, kept, and used again."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from tessera.commands import detect
from tessera.utils.errors import UserError
from tessera.utils.flags import model_zoo as table
from tessera.utils.flags.model_zoo import PUBLISHED
from tests.file_server import FileServer
from tests.utils.exporting.made import picture


def test_detect_downloads_once_and_finds_the_same_again(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = shared / "weights" / "yolov5n.pt"
    Image.fromarray(picture(90, 120)).save(tmp_path / "one.png")
    monkeypatch.chdir(tmp_path)

    def lines(weights: str, name: str) -> list[str]:
        words = f"--source one.png --imgsz 96 --device cpu --conf-thres 0.01 --save-json --nosave --name {name}"
        assert detect.main(["--weights", weights, *words.split()]) == 0
        return (tmp_path / "runs" / "detect" / name / "predictions.jsonl").read_text().splitlines()[1:]

    with FileServer(original.read_bytes()).running() as server, caplog.at_level(logging.INFO):
        monkeypatch.setattr(table, "PUBLISHED", tuple(replace(w, folder=server.folder) for w in PUBLISHED))
        expected = lines(str(original), "path")
        assert expected
        assert lines("yolov5n", "first") == expected and lines("yolov5n.pt", "second") == expected
        assert server.asked == ["/yolov5n.pt"]
        reported = [said for said in caplog.messages if "SHA-256" in said]
        assert len(reported) == 1 and "AGPL-3.0, SHA-256 4f180cf23ba0717ada0badd6c685026d" in reported[0]
        kept = tmp_path / "cache" / "weights" / "yolov5n.pt"
        kept.write_bytes(kept.read_bytes()[:-1])
        with pytest.raises(UserError, match=r"yolov5n\.pt .*published"):
            detect.run(weights="yolov5n", source="one.png", device="cpu", nosave=True)
        assert server.asked == ["/yolov5n.pt"]
