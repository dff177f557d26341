"""detect.py: the detections of val.py in every kind of file, unreadable sources, videos."""

from __future__ import annotations

import csv
import json
import signal
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

import tessera
from tessera.commands import detect, val
from tessera.utils.bit_depth import PixelRule
from tessera.utils.errors import UserError
from tests.deploy.exporting.made import ANCHORED, NAMES, checkpoint, made_image
from tests.deploy.inference.sources.made_sources import REFUSE, events, frames, items, mjpeg_server
from tests.hostile.detections import weights_with
from tests.layers import ROOT
from tests.system.jobs import Job
from tests.system.launch import python_command

SIZES = ((90, 120), (33, 140), (128, 40), (11, 300), (300, 200), (60, 60))


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("weights") / "best.pt", ANCHORED)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six images with labels; one has 16 bits."""
    for number, size_hw in enumerate(SIZES):
        path = tmp_path / "set" / "images" / "val" / f"{number:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = made_image(*size_hw, seed=number)
        cv2.imwrite(str(path), pixels[..., ::-1].astype(np.uint16) * 200 if number == 5 else pixels[..., ::-1])
        label = tmp_path / "set" / "labels" / "val" / f"{number:03}.txt"
        label.parent.mkdir(parents=True, exist_ok=True)
        label.write_text("0 0.5 0.5 0.5 0.5\n")
    return tmp_path / "set" / "images" / "val"


def run(weights: Path, folder: Path, **flags: Any) -> detect.DetectionSummary:
    given = {
        "weights": str(weights),
        "source": str(folder),
        "device": "cpu",
        "project": str(folder.parents[2] / "runs"),
    }
    return detect.run(**{**given, **flags})


def lines_of(summary: detect.DetectionSummary) -> list[dict[str, Any]]:
    assert summary.folder is not None
    return [json.loads(line) for line in (summary.folder / "predictions.jsonl").read_text().splitlines()]


def test_a_folder_gives_what_a_validation_writes(weights: Path, folder: Path, tmp_path: Path) -> None:
    """Byte for byte, where the network sees the same batches: one image each."""
    yaml = folder.parents[2] / "set.yaml"
    yaml.write_text(
        f"path: {folder.parents[1]}\nval: images/val\nnames: {list(NAMES)}\npixels: {{range: [0, 51000]}}\n"
    )
    flags = {"conf_thres": 0.3, "iou_thres": 0.5, "max_det": 40, "imgsz": 96, "save_json": True}
    runs = str(folder.parents[2] / "runs")
    val.run(
        weights=str(weights), data=str(yaml), batch_size=1, workers=0, device="cpu", project=runs, name="val", **flags
    )
    expected = (Path(runs) / "val" / "predictions.json").read_text()

    content = torch.load(weights, weights_only=True)
    ruled = tmp_path / "ruled.pt"  # as trained on this set
    torch.save({**content, "pixels": PixelRule("range", 0, 51000).as_dict()}, ruled)
    summary = run(ruled, folder, nosave=True, **flags)
    assert summary.images == len(SIZES) and summary.failures == () and summary.folder is not None
    header, *lines = lines_of(summary)
    assert header["schema"] == "tessera-detections 1" and header["names"] == list(NAMES)
    assert header["tessera_version"] == tessera.__version__
    assert (header["conf"], header["iou"], header["max_det"], header["imgsz"]) == (0.3, 0.5, 40, 96)
    converted = [
        {
            "image_id": int(Path(line["source"]).stem),
            "category_id": row["class"],
            "bbox": [round(v, 5) for v in _xywh(row["box_xyxy"])],
            "score": row["score"],
        }
        for line in lines
        for row in line["detections"]
    ]
    assert converted == json.loads(expected) and len(converted) > 20


def _xywh(box_xyxy: list[float]) -> list[float]:
    x1, y1, x2, y2 = (float(np.float32(v)) for v in box_xyxy)
    return [x1, y1, x2 - x1, y2 - y1]


def test_every_kind_of_file(weights: Path, folder: Path) -> None:
    files = dict.fromkeys(("save_txt", "save_conf", "save_csv", "save_crop", "save_json"), True)
    summary = run(weights, folder, **files)
    results = list(detect.Detector(weights, device="cpu")(folder))
    assert summary.folder is not None and summary.detections == sum(map(len, results)) > 10
    out = summary.folder
    for result in results:
        name = Path(result.source).name
        drawn = cv2.imread(str(out / name))
        np.testing.assert_array_equal(drawn[..., ::-1], result.draw())
        rows = [line.split() for line in (out / "labels" / name).with_suffix(".txt").read_text().splitlines()]
        assert [(int(row[0]), len(row)) for row in rows] == [(c, 6) for c in result.classes]
        for number, box in enumerate(result):
            assert (out / "crops" / box.name / f"{Path(name).stem}_{number}.jpg").is_file()
    with (out / "predictions.csv").open(newline="") as file:
        header, *table = csv.reader(file)
    assert header[:3] == ["Image Name", "Prediction", "Confidence"] and len(table) == summary.detections
    assert [line["source"] for line in lines_of(summary)[1:]] == [result.source for result in results]
    assert run(weights, folder).folder == out.with_name("exp2")


def test_auto_labels_are_those_above_the_confidence_of_each_class(weights: Path, folder: Path) -> None:
    summary = run(weights, folder, auto_label=True, nosave=True, save_json=True)
    assert summary.folder is not None and summary.detections > 3
    assert lines_of(summary)[0]["class_confs"] == list(
        detect.Detector(weights, device="cpu", conf_thres="auto").rules.class_confs
    )
    labels = summary.folder / "labels"
    header, *lines = (json.loads(line) for line in (labels / "auto_labels.jsonl").read_text().splitlines())
    assert header.pop("git") is None or (ROOT / ".git").exists()
    said = {"weights": str(weights), "names": list(NAMES), "tessera_version": tessera.__version__}
    assert header == {"schema": "tessera-auto-labels 1", **said}
    assert [line["labels"] for line in lines] == [f"{number:03}.txt" for number in range(len(SIZES))]
    for line in lines:
        assert len((labels / line["labels"]).read_text().splitlines()) == len(line["scores"])
    for flag in ("save_conf", "track"):
        with pytest.raises(detect.ConfigError, match="--auto-label with --"):
            run(weights, folder, auto_label=True, **{flag: True})


def test_the_page_shows_the_keys_that_are_written(weights: Path, folder: Path) -> None:
    (folder / "000.png").write_bytes(b"\xff\xd8\xff broken")
    written = lines_of(run(weights, folder, save_json=True, nosave=True))
    page = (Path(__file__).resolve().parents[2] / "docs" / "detect.md").read_text()
    shown = [json.loads(line) for line in page.splitlines() if line.startswith("{")]
    failed, found = (next(line for line in written[1:] if key in line) for key in ("event", "detections"))
    assert [[*line] for line in shown] == [[*line] for line in (written[0], found, failed)]
    assert [*shown[1]["detections"][0]] == [*found["detections"][0]]


def test_without_outputs_nothing_is_written(weights: Path, folder: Path) -> None:
    summary = run(weights, folder, nosave=True)
    assert summary.folder is None and summary.images == len(SIZES)
    assert not list((folder.parents[2] / "runs").iterdir())


def test_the_rest_goes_on_and_the_exit_code_is_3(
    weights: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "002.png").write_bytes(b"\xff\xd8\xff broken")
    flags = ["--weights", str(weights), "--source", str(folder), "--device", "cpu", "--project", str(tmp_path / "r")]
    assert detect.main([*flags, "--save-json"]) == 3
    said = capsys.readouterr()
    assert said.err.count("002.png") == 1 and "1 failure to read a source" in said.err
    assert "5 images: " in said.out and "ms inference" in said.out and "Traceback" not in said.err
    lines = [json.loads(line) for line in (tmp_path / "r" / "exp" / "predictions.jsonl").read_text().splitlines()]
    assert [line.get("event") for line in lines].count("unreadable") == 1 and len(lines) == 1 + len(SIZES)
    assert detect.main([*flags, "--classes", "circle"]) == 3
    capsys.readouterr()
    single = [*flags, "--source", str(folder / "002.png"), "--name", "single"]  # whose directory stays empty
    assert detect.main(single) == 3 and "Results in" not in capsys.readouterr().out
    assert not (tmp_path / "r" / "single").exists()
    (folder / "002.png").unlink()
    assert detect.main(flags) == 0


def test_several_processes_are_refused(weights: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = type("Ranks", (), {"size": 2})()
    with pytest.raises(UserError, match=r"detect\.py runs as one process"):
        detect.detect(detect.DetectConfig(weights=str(weights), source=(str(folder),)), world)


def test_two_classes_of_one_name_are_counted_together(folder: Path, tmp_path: Path) -> None:
    outcome = run(
        Path(weights_with(["car", "car", "bus"], tmp_path / "names.pt")), folder, conf_thres="0.05", save_json=True
    )
    found = [row["class"] for line in lines_of(outcome)[1:] for row in line["detections"]]
    assert outcome.detections == len(found) and outcome.per_class["car"] == len(found) - found.count(2) > 0
    assert {0, 1} <= set(found)


@pytest.mark.slow
def test_a_stream_until_it_is_interrupted(weights: Path, tmp_path: Path) -> None:
    """It breaks and returns; after Ctrl-C all files are complete, and no output holds the password of the URL."""
    given = ["--weights", str(weights), "--project", str(tmp_path / "runs"), "--device", "cpu", "--save-json"]
    path = tmp_path / "runs" / "exp" / "predictions.jsonl"
    with mjpeg_server([50], REFUSE, [100_000], pause_s=0.01) as server:
        url = server.url.replace("://", "://me:secret@")
        with Job(python_command("detect.py", *given, "--source", url), tmp_path / "said") as job:
            job.until(lambda: path.exists() and '"detections"' in path.read_text().partition('"reconnected"')[2])
            job.process.send_signal(signal.SIGINT)
            outcome = job.wait()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    seen = [row["event"] for row in rows if "event" in row]
    assert outcome.code == 130 and list(dict.fromkeys(seen)) == ["opened", "gap", "reconnected"], outcome.said
    assert "Results in " in outcome.out and "secret" not in outcome.said + path.read_text()
    (video,) = path.parent.glob("*.mp4")
    assert events(items(video))[-1].kind == "ended" and len(frames(items(video))) > 1
