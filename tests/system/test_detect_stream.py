"""detect.py on a stream that breaks and returns, until Ctrl-C: all files are complete."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from tests.system.jobs import Job
from tests.system.launch import python_command
from tests.utils.exporting.made import ANCHORED, checkpoint
from tests.utils.inference.sources.made_sources import events, frames, items
from tests.utils.inference.sources.mjpeg_server import REFUSE, mjpeg_server


@pytest.mark.slow
def test_a_stream_until_it_is_interrupted(tmp_path: Path) -> None:
    weights = checkpoint(tmp_path / "best.pt", ANCHORED)
    flags = ["--weights", str(weights), "--project", str(tmp_path / "runs")]
    flags += ["--imgsz", "64", "--device", "cpu", "--save-json"]
    with mjpeg_server([50], REFUSE, [100_000], pause_s=0.01) as server:
        address = server.url.replace("://", "://me:secret@")
        path = tmp_path / "runs" / "exp" / "predictions.jsonl"
        with Job(python_command("detect.py", *flags, "--source", address), tmp_path / "said") as job:
            job.until(lambda: path.exists() and _is_back(path.read_text()))
            job.process.send_signal(signal.SIGINT)
            outcome = job.wait()
    out, err = outcome.out, outcome.err
    assert outcome.code == 128 + signal.SIGINT, outcome.said
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    happened = [row["event"] for row in rows if "event" in row]  # a busy machine may see more than the one gap
    assert rows[0]["schema"] and list(dict.fromkeys(happened)) == ["opened", "gap", "reconnected"]
    numbers = [row["frame"] for row in rows if "detections" in row]
    assert numbers == sorted(set(numbers))  # they go on after the gap; which frames are dropped is the machine's speed
    assert re.search(r"^[\d,]+ images: ", out, flags=re.MULTILINE) and "Results in " in out
    assert "no frame arrives" in err and "reconnected after" in err and "Traceback" not in err
    assert "secret" not in out + err + path.read_text()
    (video,) = path.parent.glob("*.mp4")
    assert events(items(video))[-1].kind == "ended" and len(frames(items(video))) > 1


def _is_back(lines: str) -> bool:
    return '"detections"' in lines.partition('"reconnected"')[2]
