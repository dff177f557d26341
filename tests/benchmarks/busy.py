"""An epoch alone, and beside another job that uses all cores.

    uv run python -m tests.benchmarks.busy --data coco128.yaml

"OpenMP's default" spins for milliseconds at each barrier; "one thread" has none.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tessera.utils.machine.limits import usable_cpus
from tessera.utils.report.results import read_results
from tests.benchmarks.rounds import machine, parser
from tests.system.launch import ROOT

RIVALS: Mapping[str, Mapping[str, str]] = {
    "OpenMP's default": {"GOMP_SPINCOUNT": "300000"},
    "one thread": {"OMP_NUM_THREADS": "1"},
    "Tessera": {},
}


def epoch_s(data: str, imgsz: int, epochs: int, env: Mapping[str, str]) -> float:
    """Seconds of an epoch: the median of a run's epochs between the first and the last, which validates."""
    with tempfile.TemporaryDirectory(prefix="tessera-busy-") as folder:
        command = [sys.executable, str(ROOT / "train.py"), "--data", data, "--imgsz", str(imgsz), "--project", folder]
        command += ["--cfg", "yolov5n.yaml"]
        command += ["--epochs", str(epochs), "--noval", "--nosave", "--noplots", "--log", "none", "--device", "cpu"]
        subprocess.run(command, env={**os.environ, **env}, check=True, capture_output=True)
        return statistics.median(read_results(Path(folder) / "exp" / "results.csv")["time/epoch_s"][1:-1])


@contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """Another job, of `count` processes that compute without a pause."""
    others = [multiprocessing.get_context("spawn").Process(target=_compute, daemon=True) for _ in range(count)]
    for other in others:
        other.start()
    try:
        yield
    finally:
        for other in others:
            other.kill()


def _compute() -> None:
    while True:
        sum(range(10**6))


def main() -> None:
    """Print the table."""
    asked = parser(__doc__, data="shapes.yaml", imgsz=320, epochs=6).parse_args()
    print(machine())
    alone = {name: epoch_s(asked.data, asked.imgsz, asked.epochs, env) for name, env in RIVALS.items()}
    with busy_cores(usable_cpus()):
        beside = {name: epoch_s(asked.data, asked.imgsz, asked.epochs, env) for name, env in RIVALS.items()}
    for name in RIVALS:
        ratio = beside[name] / beside["one thread"]
        print(f"{name:18s} alone {alone[name]:6.2f} s, beside {beside[name]:6.2f} s: {ratio:.1f} × one thread")


if __name__ == "__main__":
    main()
