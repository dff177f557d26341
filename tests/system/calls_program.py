"""Several calls in one job: `calls_program.py DATA PROJECT`; in the first attempt rank 1 is killed in the third.

Each rank prints the result of each call as a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys

from tessera.commands import train, val
from tessera.utils.engine.step import TrainStep
from tessera.utils.types import Metrics
from tests.system.fault_program import faulty

KILLED_AT = 3  # optimizer step of the third call, of which two are saved


def print_call(call: str, metrics: Metrics | None) -> None:
    """Print the result of a call in one write, so that lines of ranks do not mix."""
    line = {"call": call, "rank": os.environ["RANK"], "attempt": os.environ["TORCHELASTIC_RESTART_COUNT"]}
    sys.stdout.write(json.dumps({**line, "found": metrics and metrics.map}) + "\n")
    sys.stdout.flush()


def main() -> None:
    data, project = sys.argv[1:]
    where = {"data": data, "project": project, "device": "cpu", "imgsz": 64}
    flags = {**where, "cfg": "yolov5n.yaml", "workers": 0, "noplots": True, "loggers": "none", "batch_size": -1}
    print_call("train", train.run(**flags, epochs=1, save_steps=1))
    print_call("val", val.run(**where, weights=f"{project}/exp/weights/best.pt", name="val"))
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        TrainStep.__call__ = faulty(TrainStep.__call__, KILLED_AT, "kill", 1)  # type: ignore[method-assign]
    print_call("same", train.run(**flags, epochs=1, save_steps=1))
    for call in ("auto", "again"):  # the second one finds the run done
        print_call(call, train.run(**{**flags, "batch_size": 8}, epochs=1, name="auto", resume="auto"))
    print_call("search", train.run(**{**flags, "batch_size": 8, "project": f"{project}/evolve"}, epochs=1, evolve=1))


if __name__ == "__main__":
    main()
