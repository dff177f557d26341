"""How far the weights of two ranks are from those of one after an epoch on the same batches, with --sync-bn.

    uv run python -m tests.benchmarks.parity --data coco128.yaml                 # yolov5n.pt, tessera-n, yolox-tiny
    uv run python -m tests.benchmarks.parity tessera-n yolox-tiny --hyp hyp.short.yaml   # with AdamW instead of SGD

Weights are trained on; a name without a suffix is a model from scratch. A figure is the largest relative difference of
a tensor after the last step. Beside it stands that of one rank from itself where the processor's other instructions are
used: what rounding alone makes of the same epoch. Pools: places where a max-pool chose another pixel, so that the
gradient took another way: of two that were equal but for rounding, at first.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tessera.data.source.index import build_index
from tessera.data.source.spec import load_spec
from tests.system.launch import run_python, torchrun
from tests.system.test_parity import PROGRAM, furthest

MODELS = ("yolov5n.pt", "tessera-n", "yolox-tiny")
OTHER_INSTRUCTIONS = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}
LIMIT_S = 3600
Result = dict[str, Any]  # of parity_program.py


def results(model: str, asked: argparse.Namespace, home: Path) -> Iterator[Result]:
    """What one rank made of an epoch, then two ranks, then one rank with other instructions."""
    steps = math.ceil(len(build_index(load_spec(asked.data), "train")) / asked.batch)
    start = f"--weights {model}" if Path(model).suffix else f"--cfg {model}.yaml"
    numbers = f"--imgsz {asked.imgsz} --batch {asked.batch} --seed {asked.seed} --steps {steps} --workers 1"
    flags = f"{start} --hyp {asked.hyp} {numbers}"
    for run, env in ((run_python, {}), (torchrun, {}), (run_python, OTHER_INSTRUCTIONS)):
        out = home / "result.pt"
        done = run(PROGRAM, asked.data, str(out), *flags.split(), "--device=cpu", "--sync-bn", timeout=LIMIT_S, env=env)
        assert done.code == 0, done.said
        yield torch.load(out, weights_only=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS, metavar="MODEL")
    parser.add_argument("--data", default="coco128.yaml")
    parser.add_argument("--imgsz", type=int, default=160)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hyp", default="hyp.scratch-low.yaml")
    asked = parser.parse_args()
    print(f"{'':<14}{'2 ranks':>9}{'pools':>7}{'other instructions':>21}{'pools':>7}", flush=True)
    for model in asked.models:
        columns = ""
        with tempfile.TemporaryDirectory() as home:
            one, *others = results(model, asked, Path(home))
        for other, width in zip(others, (9, 21), strict=True):
            _, apart = furthest(one["states"][-1], other["states"][-1])
            pools = zip(one["pools"], other["pools"], strict=True)
            chosen = sum(int((mine != theirs).sum()) for (_, mine), (_, theirs) in pools)
            columns += f"{apart:>{width}.1e}{chosen:>7}"
        print(f"{Path(model).name:<14}{columns}", flush=True)


if __name__ == "__main__":
    main()
