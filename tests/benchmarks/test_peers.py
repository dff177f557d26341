"""The benchmark beside other trainers, with little programs in their places."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.benchmarks import peers
from tests.system.tiny import make_data

# What results.csv of each looks like, and the line in which it says what it is.
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
    for row in [{columns!r}, *([str(epoch), f"0.{{epoch + 1}}"] for epoch in range(int(flags["epochs"])))]:
        file.write(",".join(row) + "\\n")
        file.flush()
        time.sleep(0.06)
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with programs of all three; `log` in it has a line for each start."""

    def program(place: str, says: str, column: str, *, broken: bool = False) -> None:
        path = tmp_path / place
        path.parent.mkdir(exist_ok=True)
        columns = ["   epoch", f"  {column}"]
        values = {"python": sys.executable, "log": str(tmp_path / "log"), "name": place}
        path.write_text(PROGRAM.format(**values, says=says, columns=columns, broken=broken))
        path.chmod(0o755)

    program("tessera/train.py", "", "metrics/mAP_0.5:0.95")
    program("yolov5/train.py", "\x1b[34m\x1b[1mYOLOv5 \x1b[0m\U0001f680 v7.0 torch-2.9 CPU", "metrics/mAP_0.5:0.95")
    program("bin/yolo", "Ultralytics 8.4.0 torch-2.9 CPU", "metrics/mAP50-95(B)")
    program("broken/train.py", "", "", broken=True)
    monkeypatch.setattr(peers, "ROOT", tmp_path / "tessera")
    return tmp_path


def table(
    programs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *flags: str
) -> list[str]:
    data = str(make_data(programs, train=4, val=2))
    monkeypatch.setattr(sys, "argv", ["peers.py", "--data", data, "--epochs", "2", *flags])
    peers.main()
    return capsys.readouterr().out.splitlines()


def test_all_get_the_same_and_each_is_read_by_its_own_columns(
    programs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(programs / "bin"))
    given = ("--yolov5", str(programs / "yolov5"), "--yolov5-python", sys.executable, "--imgsz", "64", "--rounds", "2")
    lines = table(programs, monkeypatch, capsys, *given)
    starts = [json.loads(line) for line in (programs / "log").read_text().splitlines()]
    by_turns = ["tessera/train.py", "tessera/train.py", "yolov5/train.py", "bin/yolo", "bin/yolo"]
    assert [name for name, _ in starts] == 2 * by_turns
    same = {(f["data"], f.get("img", f.get("imgsz")), f["epochs"], f["device"], f["workers"]) for _, f in starts}
    assert len(same) == 1 and {f.get("batch-size", f.get("batch")) for _, f in starts} == {"16"}
    assert not Path(starts[0][1]["data"]).exists()  # a copy, which is gone
    names = [
        "Tessera, tessera-n",
        "Tessera, yolov5n",
        "YOLOv5, yolov5n",
        "Ultralytics, yolov5n",
        "Ultralytics, yolo11n",
    ]
    rows = [line for line in lines if line.startswith(tuple(names))]
    assert [line[:24].strip() for line in rows] == names
    assert all(line.endswith("0.2000 (0.2000 to 0.2000)") for line in rows)
    assert "YOLOv5: YOLOv5 v7.0 torch-2.9 CPU" in lines and "Ultralytics: Ultralytics 8.4.0 torch-2.9 CPU" in lines


def test_what_is_missing_is_a_line_and_what_fails_is_left_out(
    programs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(programs))
    given = ("--yolov5", str(programs / "broken"), "--yolov5-python", sys.executable, "--rounds", "1")
    lines = table(programs, monkeypatch, capsys, *given)
    assert lines[0] == "Ultralytics: not installed here: name the command by --yolo, such as ~/venv/bin/yolo"
    assert lines[1] == "YOLOv5, yolov5n: exit code 1, 0 rows of results.csv" and "no such thing" in lines
    assert [line[:18].strip() for line in lines[-2:]] == ["Tessera, tessera-n", "Tessera, yolov5n"]
