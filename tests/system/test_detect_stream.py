"""detect.py on a stream that breaks and returns, until Ctrl-C: all files are complete."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.system.launch import ROOT
from tests.utils.exporting.made import ANCHORED, checkpoint
from tests.utils.inference.sources.made_sources import events, frames, items
from tests.utils.inference.sources.mjpeg_server import REFUSE, mjpeg_server

PATIENCE_S = 120


def test_a_stream_until_it_is_interrupted(tmp_path: Path) -> None:
    weights = checkpoint(tmp_path / "best.pt", ANCHORED)
    flags = ["--weights", weights, "--imgsz", "64", "--device", "cpu", "--project", tmp_path / "runs", "--save-json"]
    with mjpeg_server([50], REFUSE, [100_000], pause_s=0.01) as server:
        address = server.url.replace("://", "://me:secret@")
        command = [sys.executable, ROOT / "detect.py", *flags, "--source", address]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            path, until = tmp_path / "runs" / "exp" / "predictions.jsonl", time.monotonic() + PATIENCE_S
            while not (path.exists() and _is_back(path.read_text())):
                assert process.poll() is None and time.monotonic() < until
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + signal.SIGINT, err
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    happened = [row["event"] for row in rows if "event" in row]  # a busy machine may see more than the one gap
    assert rows[0]["schema"] and list(dict.fromkeys(happened)) == ["opened", "gap", "reconnected"]
    numbers = [row["frame"] for row in rows if "detections" in row]
    assert numbers == sorted(set(numbers))  # they go on after the gap; which frames are dropped is the machine's speed
    assert re.search(r"^[\d,]+ pictures: ", out, flags=re.MULTILINE) and "Results in " in out
    assert "no frame comes" in err and "it is there again" in err and "Traceback" not in err
    assert "secret" not in out + err + path.read_text()
    (video,) = path.parent.glob("*.mp4")
    assert events(items(video))[-1].kind == "ended" and len(frames(items(video))) > 1


def _is_back(lines: str) -> bool:
    """Whether frames came after the gap."""
    return '"detections"' in lines.partition('"reconnected"')[2]
