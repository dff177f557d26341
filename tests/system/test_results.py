"""Outputs of detect.py and val.py: no result is lost, and no file of the user is replaced."""

from __future__ import annotations

import csv
import io
import json
import logging
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from tessera.commands import detect, val
from tessera.utils.errors import ConfigError
from tessera.utils.files import sha256
from tests.deploy.exporting.made import ANCHORED, checkpoint, made_image
from tests.deploy.inference.sources.made_sources import write_video
from tests.hostile.detections import require_whole, weights_with
from tests.system.jobs import Job
from tests.system.launch import python_command

ALL = {"save_txt": True, "save_csv": True, "save_json": True, "save_crop": True}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(checkpoint(tmp_path_factory.mktemp("weights") / "best.pt", ANCHORED))


@pytest.fixture
def inside(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    cv2.imwrite(str(folder / "p.png"), made_image(40, 50))
    write_video(folder / "v.mp4", range(3))
    return folder


def run(weights: str, source: Any, tmp_path: Path, **flags: Any) -> detect.DetectionSummary:
    given = {"weights": weights, "device": "cpu", "imgsz": 64, "project": str(tmp_path / "runs"), "conf_thres": "0.3"}
    return detect.run(**{**given, "source": source, **flags})


@pytest.mark.parametrize("turned", [False, True])
def test_an_image_with_the_name_of_a_frame(weights: str, inside: Path, tmp_path: Path, turned: bool) -> None:
    for number in (0, 1):
        cv2.imwrite(str(inside / f"v_{number}.png"), made_image(40, 50, number))
    files = sorted(map(str, inside.iterdir()), reverse=turned)
    done = run(weights, files, tmp_path, **ALL)
    assert done.folder is not None and done.images == 6
    counts = require_whole(done.folder)
    assert counts["labels"] == counts["lines"] == 6 and counts["crops"] == counts["rows"] == done.detections > 6
    assert (counts["images"], counts["videos"], counts["frames"]) == (3, 1, 3)


@pytest.mark.parametrize("how", ["same", "above", "a link to it", "links from elsewhere", "over standard input"])
def test_results_replace_no_source(
    weights: str, inside: Path, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path: sha256(path) for path in inside.iterdir()}
    flags: dict[str, Any] = {**ALL, "exist_ok": True, "project": str(tmp_path), "name": "in"}
    source = str(inside)
    if how == "above":
        flags |= {"project": str(tmp_path.parent), "name": tmp_path.name}
    elif how == "a link to it":
        (tmp_path / "link").symlink_to(inside)
        flags["name"] = "link"
    elif how == "links from elsewhere":
        (tmp_path / "links").mkdir()
        (tmp_path / "links" / "p.png").symlink_to(inside / "p.png")
        source = str(tmp_path / "links")
    elif how == "over standard input":
        source = "-"
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(f"{inside}/p.png\n".encode())))
    with pytest.raises(ConfigError, match="--exist-ok"):
        run(weights, source, tmp_path, **flags)
    assert {path: sha256(path) for path in before} == before
    assert run(weights, str(inside), tmp_path, **{**flags, "exist_ok": False, "name": "other"}).images == 4
    assert run(weights, str(inside), tmp_path, **{**flags, "project": str(tmp_path / "r"), "name": "other"}).images == 4


@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to])
def test_results_are_not_written_through_links(weights: str, inside: Path, tmp_path: Path, link: Any) -> None:
    before = {path: sha256(path) for path in inside.iterdir()}
    (tmp_path / "runs" / "exp").mkdir(parents=True)
    for path in before:
        link(tmp_path / "runs" / "exp" / path.name, path)
    assert run(weights, str(inside), tmp_path, **ALL, exist_ok=True).images == 4
    assert {path: sha256(path) for path in before} == before


@pytest.mark.parametrize("glob", ["", "/**/*"])
def test_results_inside_the_source_twice(
    weights: str, inside: Path, tmp_path: Path, glob: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The second run skips what the first has written; a source inside the results is refused."""
    flags = {**ALL, "exist_ok": True, "project": str(inside / "out"), "name": "exp"}
    with caplog.at_level(logging.INFO):
        first = run(weights, f"{inside}{glob}", tmp_path, **flags)
        assert first.images == 4 and "of the run directory" not in caplog.text
        second = run(weights, f"{inside}{glob}", tmp_path, **flags)
    assert second == first and caplog.text.count("of the run directory") == 1
    for source in (inside / "out" / "exp", inside / "out" / "exp" / "p.png", inside / "out" / "exp" / "*.png"):
        with pytest.raises(ConfigError, match="output directory"):
            run(weights, str(source), tmp_path, **flags)


def test_bytes_over_standard_input_lie_in_no_folder(
    weights: str, inside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "-").write_text("a file that is called so is another one")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO((inside / "p.png").read_bytes())))
    done = run(
        weights, "-", tmp_path, **{**ALL, "exist_ok": True, "project": str(tmp_path.parent), "name": tmp_path.name}
    )
    assert done.images == 1 and (tmp_path / "stdin.jpg").is_file()


def test_labels_of_a_validation_replace_no_labels_of_its_dataset(weights: str, tmp_path: Path) -> None:
    images, labels = tmp_path / "set" / "images", tmp_path / "set" / "labels"
    images.mkdir(parents=True)
    labels.mkdir()
    cv2.imwrite(str(images / "a.png"), made_image(40, 50))
    (labels / "a.txt").write_text("0 0.5 0.5 0.5 0.5\n")
    yaml = tmp_path / "set.yaml"
    yaml.write_text(f"path: {tmp_path / 'set'}\nval: images\nnames: [circle, square, star]\n")
    flags = {"weights": weights, "data": str(yaml), "imgsz": 64, "device": "cpu", "workers": 0, "save_txt": True}
    with pytest.raises(ConfigError, match=r"a\.png: .*output directory"):
        val.run(**flags, project=str(tmp_path), name="set", exist_ok=True)
    assert (labels / "a.txt").read_text() == "0 0.5 0.5 0.5 0.5\n"


def test_names_that_are_not_utf_8(weights: str, inside: Path, tmp_path: Path) -> None:
    try:
        for path in list(inside.iterdir()):
            path.rename(inside / f"\udcff{path.name}")
    except OSError as error:
        pytest.skip(f"this file system takes no such name ({error})")
    done = run(weights, str(inside), tmp_path, project=str(tmp_path / "\udcfe"), **ALL)
    assert done.folder is not None and not done.failures
    counts = require_whole(done.folder)
    assert counts["labels"] == 4 and counts["videos"] == 1 and counts["frames"] == 3 and counts["images"] == 1
    assert (done.folder / "labels" / "\udcffp.txt").is_file()


def test_no_source_ends_the_run(weights: str, inside: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A name that leaves no room for an ending; a header whose boxes are empty; an image that no JPEG can hold."""
    for suffix in (".png", ".mp4"):
        long = inside / ("x" * (255 - len(suffix)) + suffix)
        long.write_bytes((inside / ("p.png" if suffix == ".png" else "v.mp4")).read_bytes())
    content = bytearray(write_video(inside / "damaged.mp4", range(12)).read_bytes())
    for box, offset, number in ((b"elst", -4, 8), (b"stsz", 16 + 4 * 4, 0x7FFFFFFF)):
        at = content.index(box) + offset
        content[at : at + 4] = number.to_bytes(4, "big")
    (inside / "damaged.mp4").write_bytes(content)
    cv2.imwrite(str(inside / "wide.jp2.png"), np.zeros((1, 70_000, 3), np.uint8))
    flags = ["--weights", weights, "--source", str(inside), "--device", "cpu", "--imgsz", "64", "--conf-thres", "0.3"]
    code = detect.main([*flags, "--project", str(tmp_path / "r"), "--save-crop", "--save-txt", "--save-json"])
    said = capsys.readouterr()
    assert code == 3 and "Traceback" not in said.err and said.err.count("damaged.mp4") == 1, said.err
    counts = require_whole(tmp_path / "r" / "exp")
    assert counts["images"] == 3 and counts["videos"] == 3 and counts["frames"] == 10 and counts["labels"] == 13


@pytest.mark.parametrize("stdin", [None, io.TextIOWrapper(io.BytesIO())])
def test_standard_input_that_is_closed_or_empty(
    weights: str, tmp_path: Path, stdin: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", stdin)
    flags = ["--weights", weights, "--source", "-", "--device", "cpu", "--project", str(tmp_path)]
    assert detect.main(flags) == 3
    said = capsys.readouterr().err
    assert "Traceback" not in said and sum(line.startswith("WARNING: -:") for line in said.splitlines()) == 1, said


def test_names_of_classes_reach_no_terminal(inside: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["\x1b[2J\x1b]0;title\x07", "=cmd", "\u202eright to left"]
    made = weights_with(names, tmp_path / "named.pt")
    flags = ["--source", str(inside), "--device", "cpu", "--imgsz", "64", "--conf-thres", "0.05"]
    assert detect.main([*flags, "--weights", made, "--project", str(tmp_path / "r"), "--save-csv"]) == 0
    said = capsys.readouterr()
    assert "\\x1b[2J" in said.out and not {"\x1b", "\x07", "\u202e"} & {*said.out, *said.err}
    result = next(detect.Detector(made, device="cpu", imgsz=64, conf_thres=0.05)(str(inside / "p.png")))
    assert len(result) and "\x1b" not in f"{result!r} {result.summary()}"
    with (tmp_path / "r" / "exp" / "predictions.csv").open(newline="") as file:
        assert {row[1] for row in csv.reader(file)} == {"Prediction", names[0], "'=cmd", names[2]}


@pytest.mark.slow
@pytest.mark.usefixtures("hangs_up")
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_whole_files(weights: str, inside: Path, tmp_path: Path, number: signal.Signals) -> None:
    """In the middle of a list that comes over standard input."""
    flags = f"--imgsz 64 --conf-thres 0.3 --device cpu --project {tmp_path / 'r'} --save-csv --save-json --save-txt"
    command = python_command("detect.py", "--weights", weights, "--source", "-", *flags.split())
    lines = tmp_path / "r" / "exp" / "predictions.jsonl"
    with Job(command, tmp_path / "said", stdin=subprocess.PIPE) as job:
        assert job.process.stdin is not None
        job.process.stdin.write(f"{inside}/p.png\n{inside}/v.mp4\n".encode())
        job.process.stdin.flush()
        job.until(lambda: lines.is_file() and b'"ended"' in lines.read_bytes(), 240)
        job.process.send_signal(number)
        outcome = job.wait()
    assert outcome.code == 128 + number, outcome.said
    assert "Traceback" not in outcome.err and number.name in outcome.err, outcome.said
    counts = require_whole(tmp_path / "r" / "exp")
    boxes = sum(len(json.loads(line).get("detections", ())) for line in lines.read_text().splitlines())
    assert counts["lines"] == counts["labels"] == 4 and counts["rows"] == boxes > 0 and counts["frames"] == 3
