"""The benchmark beside other trainers, with small programs in their place."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.benchmarks import peers
from tests.system.tiny import make_data

PROGRAM = """#!{python}
import csv, json, sys, time
from pathlib import Path
words = sys.argv[1:]
if "=" in words[-1]:
    flags = dict(word.split("=", 1) for word in words if "=" in word)
else:
    flags = {{name[2:]: value for name, value in zip(words[::2], words[1::2])}}
with open({log!r}, "a") as file:
    file.write(json.dumps([{name!r}, flags]) + "\\n")
print({says!r}, flush=True)
if {broken!r}:
    sys.exit("no such thing")
run = Path(flags["project"]) / flags["name"]
run.mkdir()
with (run / "results.csv").open("w", newline="") as file:
    for row in [{columns!r}, *([str(epoch), f"0.{{1 + epoch % 2}}"] for epoch in range(int(flags["epochs"])))]:
        file.write(",".join(row) + "\\n")
        file.flush()
        time.sleep(0.06)
"""


def test_all_get_the_same_and_each_is_read_by_its_own_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def program(place: str, says: str, column: str, *, broken: bool = False) -> None:
        path = tmp_path / place
        path.parent.mkdir(exist_ok=True)
        values = {"python": sys.executable, "log": str(tmp_path / "log"), "name": place, "columns": ["epoch", column]}
        path.write_text(PROGRAM.format(**values, says=says, broken=broken))
        path.chmod(0o755)

    program("tessera/train.py", "", "metrics/mAP_0.5:0.95")
    program("yolov5/train.py", "", "", broken=True)
    program("bin/yolo", "Ultralytics 8.4.0 torch-2.9 CPU", "metrics/mAP50-95(B)")
    monkeypatch.setattr(peers, "ROOT", tmp_path / "tessera")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    data = str(make_data(tmp_path, train=4, val=2))
    given = ["--data", data, "--epochs", "3", "--imgsz", "64", "--rounds", "2", "--yolov5", str(tmp_path / "yolov5")]
    monkeypatch.setattr(sys, "argv", ["peers.py", *given, "--yolov5-python", sys.executable])
    peers.main()
    lines = capsys.readouterr().out.splitlines()
    starts = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    interleaved = ["tessera/train.py", "tessera/train.py", *4 * ["bin/yolo"]]
    assert [name for name, _ in starts if name != "yolov5/train.py"] == 2 * interleaved
    same = {(f["data"], f.get("img", f.get("imgsz")), f["epochs"], f["device"], f["workers"]) for _, f in starts}
    assert len(same) == 1 and {f.get("batch-size", f.get("batch")) for _, f in starts} == {"16"}
    assert not Path(starts[0][1]["data"]).exists()  # a copy, which is gone
    assert lines[0] == "YOLOv5, yolov5n: exit code 1, 0 rows of results.csv" and "no such thing" in lines
    rows = [line for line in lines if line.endswith("0.2000 (0.2000 to 0.2000)")]
    rivals = [f"Ultralytics, {name}" for name in ("yolov5n", "yolov8n", "yolo11n", "yolo26n")]
    assert [line[:24].strip() for line in rows] == ["Tessera, tessera-n", "Tessera, yolov5n", *rivals]
    assert "Ultralytics: Ultralytics 8.4.0 torch-2.9 CPU" in lines
