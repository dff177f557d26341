"""val.py: metrics and `--find-errors` do not depend on batch size, ranks or file format; the published metrics."""

from __future__ import annotations

import csv
import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from tessera import Detector
from tessera.commands import export, train, val
from tessera.commands.val import ignored_flags
from tessera.data.labels.coco import COCO_NAMES
from tessera.deploy.runtime.exported import BARE, Description, exported_network
from tessera.models.detector import DetectionModel
from tessera.utils import extensions
from tessera.utils.checkpoints.weights import Weights
from tessera.utils.engine.precision import Precision
from tessera.utils.errors import ConfigError, UserError
from tessera.utils.evaluation.evaluation_data import evaluation_imgsz, read_dataset
from tessera.utils.evaluation.network import fused_copy, network_of, network_of_weights
from tessera.utils.flags.val import ValConfig
from tessera.utils.machine.accelerator import Accelerator
from tests.analysis.planted import plant
from tests.deploy.exporting.made import ANCHORED, FREE, checkpoint, dataset
from tests.system.launch import ROOT, Command, Outcome, torchrun
from tests.system.tiny import describe_coco128, flags, make_data

VAL = ROOT / "val.py"


def printed_metrics(outcome: Outcome) -> list[str]:
    assert outcome.code == 0, outcome.said
    (line,) = [line for line in outcome.out.splitlines() if line.split()[:1] == ["all"]]
    return line.split()[1:]


def errors_in(run: Path) -> list[tuple[object, ...]]:
    rows = [json.loads(line) for line in (run / "errors.jsonl").read_text().splitlines()]
    return sorted((row["image"], row["kind"], row["predicted"] or "", row["line"] or 0) for row in rows)


@pytest.fixture(scope="module")
def coco128(tmp_path_factory: pytest.TempPathFactory, shared: Path) -> Path:
    """The YAML of coco128 where it lies."""
    return describe_coco128(tmp_path_factory.mktemp("coco128"), shared)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("trained")
    data = make_data(folder, train=8, val=4)
    assert train.main(flags(data, folder / "runs", "--epochs", "1", "--imgsz", "64", "96")) == 0
    weights = folder / "runs" / "exp" / "weights" / "best.pt"
    args = ["--data", str(data), "--weights", str(weights), "--device", "cpu", "--workers", "0"]
    return [*args, "--save-json", "--max-det", "20"]


@pytest.mark.slow
def test_four_images_measure_the_same_on_five_ranks(trained: list[str], tmp_path: Path, command: Command) -> None:
    args = [*trained, "--project", str(tmp_path)]
    alone = command(val.main, *args, "--name", "alone", "--imgsz", "64", "96")
    own = args[2:]  # the dataset and the size are the checkpoint's own
    together = torchrun(VAL, *own, "--name", "together", ranks=5)
    assert printed_metrics(alone) == printed_metrics(together)
    assert "Evaluating at 64x96 px (--imgsz): best.pt (after 1 epoch) was trained at 64x96." in alone.err, alone.said
    assert together.err.count("Evaluating at 64x96 px: best.pt (after 1 epoch) was trained at 64x96.") == 1, (
        together.said
    )
    assert together.err.count(f"{args[0]} {args[1]}: the dataset that {args[3]} was trained on.") == 1, (
        "the checkpoint's own --data"
    )
    one, many = (json.loads((tmp_path / name / "predictions.json").read_text()) for name in ("alone", "together"))
    assert [row["image_id"] for row in one] == [row["image_id"] for row in many]
    assert errors_in(tmp_path / "alone") == errors_in(tmp_path / "together") != []
    counts = [(tmp_path / name / "images.csv").read_text() for name in ("alone", "together")]
    assert counts[0] == counts[1] and counts[0].count("\n") == 5


def test_tiles_have_the_detections_of_detect_in_tiles(trained: list[str], tmp_path: Path) -> None:
    """Images of 96 pixels in tiles of 64."""
    tiles = ["--tile", "64", "--overlap", "0.3", "--conf", "1e-5"]
    assert val.main([*trained, *tiles, "--project", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "exp" / "predictions.json").read_text())
    detector = Detector(
        trained[3], imgsz=(64, 96), conf_thres=1e-5, iou_thres=0.6, max_det=20, tile=64, overlap=0.3, device="cpu"
    )
    found = []
    for result in detector(Path(trained[1]).parent / "shapes" / "images" / "val"):
        found += [[box.x1, box.y1, box.x2 - box.x1, box.y2 - box.y1, box.score] for box in result]
    assert found and len(rows) == len(found)
    seen = np.array([[*row["bbox"], row["score"]] for row in rows])
    apart = np.abs(seen[:, None] - np.array(found)[None]).max(2)
    assert max(apart.min(0).max(), apart.min(1).max()) < 0.05, "pixels"


@pytest.mark.parametrize("raw", [False, True])
def test_an_export_of_a_height_and_a_width_has_the_metrics_of_its_checkpoint(
    trained: list[str], raw: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The bare network takes this one shape, as the checkpoint does where its shape is fixed."""
    for package in ("onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    common = {"data": trained[1], "workers": 0, "device": "cpu", "max_det": 20, "project": str(tmp_path)}
    size = {"imgsz": (64, 96)} if raw else {}  # else as trained
    (path,) = export.run(weights=trained[3], output=str(tmp_path), raw=raw, max_drop=1e-9, data=trained[1], **size)
    found = val.run(weights=str(path), imgsz=96, **common)
    assert f"{path.name} was exported for another size; using 64x96." in caplog.text
    assert path.name == ("best-raw-64x96.onnx" if raw else "best.onnx")
    state = torch.load(trained[3], weights_only=True)
    assert state["imgsz"] == state["config"]["imgsz"] == [64, 96]
    if not raw:
        expected = val.run(weights=trained[3], **common)
        assert found.map == pytest.approx(expected.map, abs=1e-9) and found.map50 == pytest.approx(expected.map50)


def test_without_what_surrounds_the_core_only_the_metrics_are_printed(
    trained: list[str], tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(extensions.EXTENSIONS, "validation report", "tessera.gone")
    outcome = command(val.main, *trained, "--project", str(tmp_path))
    assert len(printed_metrics(outcome)) == 6 and "lacks the validation report" in outcome.err, outcome.said
    assert not (tmp_path / "exp" / "report.html").exists()
    monkeypatch.setattr(extensions, "EXTENSIONS", dict.fromkeys(extensions.EXTENSIONS, "tessera.gone"))
    for args in (["--tile", "64"], ["--find-errors"], ["--save-json"], ["--weights", "best.onnx"]):
        assert command(val.main, *trained, *args).code == 1


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory, shared: Path) -> dict[str, Any]:
    """The description of 24 images of coco128."""
    folder = tmp_path_factory.mktemp("few")
    described: dict[str, Any] = yaml.safe_load(describe_coco128(folder, shared).read_text())
    images = sorted((shared / "coco128" / "images" / "train2017").iterdir())[:24]
    (folder / "few.txt").write_text("\n".join(map(str, images)))
    return {**described, "train": str(folder / "few.txt"), "val": str(folder / "few.txt")}


def test_some_classes_in_another_order_have_the_ap_they_have_among_all(
    few: dict[str, Any], shared: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where `--max-det` is reached by the others; a class that the weights lack has an AP of 0."""

    def measured(**described: Any) -> tuple[dict[str, tuple[float, ...]], str]:
        data = tmp_path / "data.yaml"
        data.write_text(yaml.safe_dump({**few, **described}))
        caplog.clear()
        with caplog.at_level(logging.INFO):
            weights = str(shared / "weights" / "yolov5n.pt")
            common = {"imgsz": 160, "max_det": 30, "workers": 0, "device": "cpu", "project": str(tmp_path)}
            metrics = val.run(weights=weights, data=str(data), **common)
        maps = dict(zip(metrics.names, metrics.class_maps(), strict=True))
        return {name: (maps[name], metrics.map) for name in metrics.names}, caplog.text

    chosen = ["zebra", "person", "elephant", "dog", "car"]
    (every, plain), (some, said) = measured(), measured(classes=chosen)
    assert [some[name][0] for name in chosen] == [every[name][0] for name in chosen] and some["person"][0] > 0
    assert "known by name" not in plain
    assert "5 of 5 classes of" in said and "detections of the model's other 75 are ignored." in said
    names = {**dict(enumerate(few["names"])), 0: "somebody"}
    other, said = measured(names=names, classes=["somebody", "dog"])
    assert other["dog"] == (every["dog"][0], every["dog"][0] / 2) and other["somebody"][0] == 0
    assert "1 of 2 classes of" in said and "(an AP of 0 in the mean for each with labels): somebody." in said


def test_errors_are_those_at_the_given_confidence_or_without_objects_at_that_of_the_weights(
    tmp_path: Path, command: Command
) -> None:
    weights, data = checkpoint(tmp_path / "best.pt", ANCHORED), dataset(tmp_path / "data", val=3)
    args = ["--weights", str(weights), "--data", str(data), "--workers", "0", "--device", "cpu", "--imgsz", "96"]
    args += ["--project", str(tmp_path), "--exist-ok"]
    given = command(val.main, *args, "--conf-thres", "0.6")
    assert "At confidence 0.600: " in given.out and "best F1" not in given.out, given.said
    page = (tmp_path / "exp" / "report.html").read_text()
    assert '<dd class="small">--conf-thres</dd>' in page and "0.600, that of <span" in page
    for labels in (tmp_path / "data").rglob("*.txt"):
        labels.write_text("")
    empty = command(val.main, *args)
    images = [str(path) for path in sorted((tmp_path / "data").rglob("images/val/*"))]
    found = [len(result) for result in Detector(weights, imgsz=96, iou_thres=0.6, max_det=300, device="cpu")(images)]
    said = (
        f"Images without objects: {sum(found)} false positives at confidence 0.375, in {sum(map(bool, found))} of 3 im"
    )
    assert sum(found) > 1 and said in empty.out, empty.said
    with (tmp_path / "exp" / "images.csv").open() as file:
        assert [int(row["background"]) for row in csv.DictReader(file)] == found


def test_weights_that_know_none_of_the_classes_are_refused_or_taken_by_number(
    trained: list[str], tmp_path: Path, command: Command
) -> None:
    content = yaml.safe_load(Path(trained[1]).read_text())
    other = tmp_path / "other.yaml"
    args = [*trained, "--data", str(other), "--project", str(tmp_path)]
    count = len(content["names"])
    other.write_text(yaml.safe_dump({**content, "names": [f"other{number}" for number in range(count + 1)]}))
    done = command(val.main, *args)
    found = f"knows {count} classes, but {other} has {count + 1}, none of them by the same name. Give the YAML"
    assert done.code == 1 and found in done.err, done.said
    other.write_text(yaml.safe_dump({**content, "names": [f"other{number}" for number in range(count)]}))
    done = command(val.main, *args)
    assert done.code == 0 and "has other names (0 is" in done.err, done.said


def test_the_dataset_of_a_checkpoint_is_not_there_or_not_known(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"(?s)gone\.yaml: no such .*best\.pt was trained on"):
        read_dataset("", "best.pt", str(tmp_path / "gone.yaml"))
    with pytest.raises(ConfigError, match=r"--data: .*yolov5n\.pt does not say"):
        read_dataset("", "yolov5n.pt", "")


@pytest.mark.parametrize(("trained", "asked", "size"), [(None, 0, 640), (96, 0, 96), (96, 40, 64), (None, 320, 320)])
def test_an_imgsz_is_one_size_for_checkpoints_and_exported_files(
    trained: int | None, asked: int, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the stride is below 32; and val.py takes by default what detect.py takes."""
    weights = Weights({}, {}, (), "best.pt", imgsz=trained)
    model = DetectionModel(FREE)
    network = network_of_weights(model, weights, Accelerator())
    stored = {"format": BARE, "names": '["box"]', "imgsz": str(trained or 640), "stride": str(model.stride)}
    made_for = Description.read(stored, Path("a.torchscript"))
    exported = exported_network(made_for, "TorchScript", Accelerator(), np.asarray)
    with caplog.at_level(logging.INFO):
        found = [evaluation_imgsz(each, ValConfig(imgsz=asked)) for each in (network, exported)]
    assert model.stride == 16 and found == [size] * 2
    why = f"was trained at {trained}" if trained else "does not say at which size it was trained"
    assert f"Evaluating at {size} px{' (--imgsz)' * bool(asked)}: best.pt {why}." in caplog.text


def test_half_precision_holds_its_weights_in_16_bits() -> None:
    class Half(Accelerator):
        half_dtype = torch.bfloat16

    model, images = DetectionModel(FREE), torch.rand(2, 3, 64, 64)
    network = network_of_weights(
        model, Weights({}, {}, (), "best.pt"), Half(), precision=Precision(Half(), torch.bfloat16)
    )
    cast_in_each = network_of(fused_copy(model, Half()), 64, Half(), Precision(Half(), torch.bfloat16))
    assert torch.equal(network(images), cast_in_each(images)) and network.describe(64) == cast_in_each.describe(64)


@pytest.mark.parametrize(
    ("argv", "idle"),
    [
        ("--save-conf", "--save-conf: without effect, no label files are written. Give --save-txt too."),
        ("--save-conf --save-txt --iou-thres 0.5 --conf 0.1", ""),
        ("--end2end --iou 0.6", "--iou-thres: without effect, --end2end runs no NMS."),
        ("--end2end", ""),
        ("--task speed --conf 0.1", "--conf-thres and --iou-thres: without effect, --task speed uses"),
    ],
)
def test_flags_without_effect_beside_others(argv: str, idle: str) -> None:
    given = ValConfig.from_args(argv.split())
    found = ignored_flags(ValConfig(**given), given)
    assert len(found) == bool(idle) and "".join(found).startswith(idle)


@pytest.mark.slow
def test_official_weights_measure_the_same_in_every_batch_and_on_three_ranks(
    coco128: Path, shared: Path, tmp_path: Path, command: Command
) -> None:
    args = ["--weights", str(shared / "weights" / "yolov5n.pt"), "--data", str(coco128), "--device", "cpu"]
    args += ["--project", str(tmp_path), "--verbose"]
    published_weights = printed_metrics(command(val.main, *args, "--imgsz", "640"))
    assert float(published_weights[-1]) == pytest.approx(0.367, abs=0.003)
    assert float(published_weights[-2]) == pytest.approx(0.563, abs=0.004)
    args += ["--imgsz", "320"]
    outcomes = [command(val.main, *args, "--batch", batch) for batch in ("1", "32")]
    outcomes.append(torchrun(VAL, *args, ranks=3, timeout=600))
    assert float(printed_metrics(outcomes[0])[-1]) > 0.25
    tables = [re.findall(r"^ +\S.*$", outcome.out, re.M) for outcome in outcomes]
    assert all(table == tables[0] for table in tables[1:]), "every class's line is the same"


def test_the_yaml_of_coco_has_its_names() -> None:
    for name in ("coco.yaml", "coco128.yaml"):
        assert tuple(yaml.safe_load((ROOT / "data" / name).read_text())["names"].values()) == COCO_NAMES


CPU = {"device": "cpu", "workers": 0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "imgsz", "known", "runtime"),
    [("yolov5n.pt", 320, 0.287, "openvino"), ("yolox_nano.pth", 416, 0.338, "onnx")],
)
def test_official_weights_have_the_same_map_on_coco128_in_a_runtime(
    name: str, imgsz: int, known: float, runtime: str, shared: Path, tmp_path: Path
) -> None:
    for package in ("onnxscript", "onnxruntime", "openvino"):
        pytest.importorskip(package)
    source, data = tmp_path / name, describe_coco128(tmp_path, shared)
    source.write_bytes((shared / "weights" / name).read_bytes())
    (written,) = export.run(weights=str(source), include=[runtime], imgsz=imgsz, device="cpu")
    expected, metrics = (
        val.run(weights=str(path), data=str(data), imgsz=imgsz, project=str(tmp_path / "val"), save_json=True, **CPU)
        for path in (source, written)
    )
    assert expected.map == pytest.approx(known, abs=0.003) and expected.images == 128
    assert metrics.map == pytest.approx(expected.map, abs=1e-3)
    assert metrics.map50 == pytest.approx(expected.map50, abs=1e-3)
    assert (metrics.images, metrics.objects) == (expected.images, expected.objects)
    assert len(list((tmp_path / "val").glob("*/predictions.json"))) == 2


def test_an_exported_file_is_matched_to_a_dataset_by_the_names_of_its_classes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Three of the dataset's six classes, in another order: as the checkpoint that it was made from."""
    data = make_data(tmp_path, train=1, val=4)
    content = yaml.safe_load(data.read_text())
    data.write_text(yaml.safe_dump({**content, "names": content["names"][::-1]}))
    path = checkpoint(tmp_path / "best.pt", ANCHORED, data=str(data))
    (script,) = export.run(weights=str(path), include=["torchscript"], imgsz=96, device="cpu")
    found = []
    for weights in (path, script):
        caplog.clear()
        found.append(val.run(weights=str(weights), trust_file=True, project=str(tmp_path / "val"), imgsz=96, **CPU))
        assert sum(f"3 of 6 classes of {data} known by name" in line for line in caplog.messages) == 1
    assert found[0].map50 > 0 and found[1].map50 == pytest.approx(found[0].map50, abs=1e-3)


@pytest.fixture(scope="module")
def with_copies(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags of val.py: a run of one epoch, on data that has a few labels twice."""
    folder = tmp_path_factory.mktemp("trained")
    data = make_data(folder, train=16, val=9)
    for split in ("train", "val"):
        plant(folder / "shapes" / "labels" / split, 0.1, 6, kinds=["duplicate"])
    assert train.main(flags(data, folder / "runs", "--epochs", "1")) == 0
    weights = folder / "runs" / "exp" / "weights" / "best.pt"
    return ["--weights", str(weights), "--device", "cpu", "--workers", "0"]


def listed(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "label_errors.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_label_errors_are_a_list_and_a_page_and_the_same_on_two_ranks(
    with_copies: list[str], tmp_path: Path, command: Command
) -> None:
    args = [*with_copies, "--find-errors", "--project", str(tmp_path)]
    done = command(val.main, *args, "--name", "alone")
    assert done.code == 0, done.said
    rows = listed(tmp_path / "alone")
    duplicates = [row for row in rows if row["kind"] == "duplicate"]
    scores = [float(str(row["score"])) for row in rows]
    assert len(duplicates) >= 3 and scores == sorted(scores, reverse=True)
    for row in duplicates:
        lines = Path(str(row["label"])).read_text().splitlines()
        own, other = (lines[int(str(row[key])) - 1].split()[0] for key in ("line", "other_line"))
        assert own == other
    assert f"Label errors: {len(rows)} suspects" in done.out
    page = (tmp_path / "alone" / "label_errors.html").read_text()
    assert page.count("<li data-kind=") == min(len(rows), 140) and len(page) < 5_000_000
    assert page.count('data-kind="duplicate"') == len(duplicates) and "<script>" in page

    together = torchrun(VAL, *args, "--name", "together", "--batch", "2")
    assert together.code == 0, together.said
    names = "label_errors.jsonl", "label_errors.html"
    one, many = ([(tmp_path / run / name).read_bytes() for name in names] for run in ("alone", "together"))
    assert one[0] == many[0]
