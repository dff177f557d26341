"""Where the time of a run goes from the command to the first step, and from the last step to the prompt.

    uv run python -m tests.benchmarks.start_and_end --images 48

"First" is a run with empty caches (index, list of fonts), "then" the medians of further runs, with the least and the
most. Seconds of the processor are those of the process itself; "all" has its workers too.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tests.benchmarks.rounds import machine, parser
from tests.system.launch import ROOT
from tests.system.tiny import make_data

TURNS = Path(__file__).with_name("turns.py")
Times = dict[str, tuple[float, float]]  # of each part: seconds, seconds of the processor


def run(flags: list[str], folder: Path, environment: Mapping[str, str]) -> Times:
    """One training; its parts in their order."""
    turns, began = folder / "turns.json", time.time()
    command, quiet = [sys.executable, str(TURNS), str(turns), *flags], subprocess.DEVNULL
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=quiet, stderr=quiet)
    _, status, used = os.wait4(process.pid, 0)
    ended = time.time()
    assert os.waitstatus_to_exitcode(status) == 0, flags
    times: Times = {}
    clock, processor = began, 0.0
    for name, at, spent in json.loads(turns.read_text()):
        times[name] = at - clock, spent - processor
        clock, processor = at, spent
    times["end of the process"] = ended - clock, 0.0
    times["all"] = ended - began, used.ru_utime + used.ru_stime
    return times


def main() -> None:
    """Print the table."""
    asked = parser(__doc__, images=(48, "that are trained on"), imgsz=64, epochs=1, rounds=5).parse_args()
    with tempfile.TemporaryDirectory(prefix="tessera-start-") as home:
        folder = Path(home)
        data = make_data(folder, train=asked.images, val=max(asked.images // 4, 1))
        flags = ["--data", str(data), "--imgsz", str(asked.imgsz), "--epochs", str(asked.epochs), "--device", "cpu"]
        flags += ["--project", str(folder / "runs"), "--log", "none"]
        caches = {"TESSERA_CACHE": str(folder / "cache"), "MPLCONFIGDIR": str(folder / "fonts")}
        environment = {**os.environ, **caches, "PYTHONPATH": str(ROOT)}
        first = run(flags, folder, environment)
        others = [run(flags, folder, environment) for _ in range(asked.rounds)]
    print(machine())
    print(f"{'part':28}{'first: s':>10}{'CPU s':>8}{'then: s':>10}{'CPU s':>8}   least to most CPU s")
    for name, (seconds, spent) in first.items():
        wall, processor = ([times[name][which] for times in others] for which in (0, 1))
        row = f"{name:28}{seconds:10.2f}{spent:8.2f}{statistics.median(wall):10.2f}{statistics.median(processor):8.2f}"
        print(f"{row}   {min(processor):.2f} to {max(processor):.2f}")


if __name__ == "__main__":
    main()
