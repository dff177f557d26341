"""Hostile output conditions of detect.py: name collisions, size limits, full disks, foreign folders."""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

from tessera.commands import detect
from tessera.utils.machine.opencv import cv2
from tessera.utils.startup import protect_streams
from tests.deploy.exporting.made import made_image
from tests.hostile.campaign import may_mount
from tests.hostile.damages import named
from tests.hostile.detections import found, require_whole, weights, write_video
from tests.system.launch import ROOT

CASES, FAST_CASES = 300, 3
TIME_LIMIT_S = 120
MEMORY = 4 * 2**30

_FLAGS = ("save_txt", "save_conf", "save_csv", "save_json", "save_crop", "nosave", "hide_labels", "hide_conf")
_STEMS = ("a", "a_0", "a_1", "a_2", "A", "a_0_0", "a-2", "a.jpg", "a_1.mp4", "b", "labels", "crops")


_ON_DISK = """
import json, sys
from pathlib import Path
from tests.hostile.outputs import found, judged
flags = json.loads(sys.argv[1])
print(judged(found(**flags), Path(flags["project"])))
"""


def prepare() -> None:
    weights()


def trial(rng: random.Random, folder: Path) -> str:
    make_sources(rng, folder / "in")
    kind = rng.choice([*_KINDS])
    return kind + _KINDS[kind](rng, folder)


def make_sources(rng: random.Random, folder: Path) -> None:
    for number in range(rng.randint(2, 6)):
        path = folder / rng.choice(("", "", "sub", "labels", "crops/circle")) / rng.choice(_STEMS)
        path = path.with_name(path.name + rng.choice((".jpg", ".png", ".mp4", ".mp4")))
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".mp4":
            write_video(path, [made_image(32, 48, number + n) for n in range(rng.randint(1, 4))])
        else:
            cv2.imwrite(str(path), made_image(40, 32, number))


def _flags(rng: random.Random) -> dict[str, Any]:
    return {name: rng.random() < 0.6 for name in _FLAGS if name != "nosave"} | {"nosave": rng.random() < 0.2}


def _mixed(rng: random.Random, folder: Path) -> str:
    flags = _flags(rng)
    outcome = found(
        source=str(folder / "in"), project=str(folder / "runs"), line_thickness=rng.choice((0, 1, 200)), **flags
    )
    assert not isinstance(outcome, str) and not outcome.failures, outcome
    if outcome.folder is None:
        return ", nothing"
    counts = require_whole(outcome.folder)
    assert counts["labels"] == (outcome.images if flags["save_txt"] else 0)
    assert counts["crops"] == (outcome.detections if flags["save_crop"] else 0)
    assert counts["rows"] == (outcome.detections if flags["save_csv"] else 0)
    assert counts["images"] + counts["frames"] == (0 if flags["nosave"] else outcome.images)
    return ""


def _limited(rng: random.Random, folder: Path) -> str:
    """No file may be larger than so much; the system says so to whoever writes."""
    most = rng.choice((1, 40, 300, 1000, 2000, 4096, 10_000, 50_000))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    protect_streams()  # as every command does: what is printed here goes to a file too
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        outcome = found(source=str(folder / "in"), project=str(folder / "runs"), **_flags(rng))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return judged(outcome, folder / "runs")


def _full_disk(rng: random.Random, folder: Path) -> str:
    """A file system of a few pages."""
    disk = folder / "disk"
    disk.mkdir()
    size = rng.choice((4, 8, 16, 32, 64, 128, 256))
    if not may_mount():
        return ", not here"
    flags = json.dumps({**_flags(rng), "source": str(folder / "in"), "project": str(disk), "weights": weights()})
    command = f'mount -t tmpfs -o size={size}k,nr_inodes={rng.choice((10, 30, 1000))} tmpfs {disk} && exec "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command, "sh", sys.executable, "-c", _ON_DISK, flags],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return done.stdout.splitlines()[-1]


def judged(outcome: detect.DetectionSummary | str, runs: Path) -> str:
    """All is there, or it is said that something is not; what is there is whole."""
    for run in runs.glob("*/"):
        require_whole(run)
    if isinstance(outcome, str):
        assert "cannot be" in outcome, outcome
        return ", refused"
    assert not outcome.failures, outcome
    return ", enough"


def _unwritable(rng: random.Random, folder: Path) -> str:
    """Something else lies where results should."""
    run = folder / "runs" / "exp"
    what = rng.choice(("labels", "crops", "predictions.csv", "predictions.jsonl", ".", "crops/circle"))
    run.parent.mkdir()
    if what == ".":
        run.write_text("x")
    elif what.startswith("predictions"):
        (run / what).mkdir(parents=True)
    else:
        (run / what).parent.mkdir(parents=True, exist_ok=True)
        (run / what).write_text("x")
    outcome = found(source=str(folder / "in"), project=str(folder / "runs"), exist_ok=True, **_flags(rng))
    if isinstance(outcome, str):
        assert "cannot be" in outcome, outcome
        return ", refused"
    return ", not met"


_KINDS = named(_mixed, _limited, _full_disk, _unwritable)
