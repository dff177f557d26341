"""CPU seconds of a process between its last message and its end: as the commands end, and by sys.exit.

uv run python -m tests.benchmarks.ending
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.system.launch import ROOT
from tests.system.tiny import flags, make_data

PROGRAM = """
import os, sys, train
from tessera.utils.startup import end_process
code = train.main(sys.argv[2:])
times = os.times()
print("CPU", times.user + times.system + times.children_user + times.children_system, flush=True)
(end_process if sys.argv[1] == "at once" else sys.exit)(code)
"""


def ending_s(how: str, data: Path, folder: Path) -> float:
    """CPU seconds from the last message of a little training on."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", PROGRAM, how, *flags(data, folder, "--epochs", "1", "--workers", "0")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    said = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return total - float(said.rsplit("CPU ", 1)[1])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as home:
        data = make_data(Path(home), train=8, val=4)
        for how in ("sys.exit", "at once"):
            print(f"{how}: {ending_s(how, data, Path(home) / 'runs'):.2f} s of CPU from the last message to the end")
