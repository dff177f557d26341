"""Models beside yolov5n: parameters, GFLOPs, and the time of a training step.

    uv run python -m tests.benchmarks.family                                    # the tessera models, on the CPU
    uv run python -m tests.benchmarks.family tessera-n yolov5s mine.yaml --data coco128.yaml
    uv run python -m tests.benchmarks.family small --data coco128.yaml          # sizes n, t and s of all families

A model and yolov5n make a step each by turns, in processes of their own: the factor is of medians in one run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import torch

from tessera.models.detector import DetectionModel
from tessera.models.summary import count_gflops, count_parameters
from tessera.utils.environment import Launch
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.machine.choose import choose_accelerator
from tessera.utils.types import Batch
from tests.benchmarks.rounds import Apart, indexed, machine, parser, rounds
from tests.benchmarks.step import Case, made_batch, our_step

BASELINE = "yolov5n"
FAMILY = tuple(f"tessera-{size}" for size in "nsmlx")
SMALL = ("yolov5s", "tessera-n", "tessera-s", "yolox-tiny", "yolox-s", "yolov9-t", "yolov9-s")
GROUPS = {"tessera": FAMILY, "small": SMALL}
SIZES = ((80, 640), (3, 320))  # classes, pixels


def cost(cfg: str) -> str:
    """Parameters and GFLOPs of a model at `SIZES`; nothing is computed."""
    columns = []
    for nc, imgsz in SIZES:
        with torch.device("meta"):
            model = DetectionModel(cfg, nc=nc)
        columns.append(f"{count_parameters(model) / 1e6:8.2f} M{count_gflops(model, imgsz):8.2f} G")
    return "".join(columns)


class Steps:
    """Training steps of any model on the same batch.

    Args:
        batch: the one that every step trains on.
        names: of its classes.
        imgsz: side of its images in pixels.
        accelerator: where they compute.
        count: steps of a round.
    """

    def __init__(self, batch: Batch, names: tuple[str, ...], imgsz: int, accelerator: Accelerator, count: int) -> None:
        self._batch, self._names, self._imgsz = batch, names, imgsz
        self._accelerator, self._count = accelerator, count

    @contextmanager
    def of(self, cfg: str, dtype: torch.dtype) -> Iterator[Callable[[], int]]:
        """A round of `cfg`; on a CPU in a process of its own, which ends with the context."""
        torch.manual_seed(0)
        model = DetectionModel(cfg, names=self._names)
        case = Case(model, self._batch, self._imgsz, self._accelerator, self._count)
        if self._accelerator.kind != "cpu":
            yield our_step(case, dtype)
            return
        with closing(Apart(our_step, case, dtype)) as apart:
            yield apart

    def compare(self, cfg: str, baseline: Callable[[], int], dtype: torch.dtype, count: int) -> str:
        """Milliseconds of a step, and how many of the baseline's those are, over `count` rounds."""
        with self.of(cfg, dtype) as rival:
            rates = rounds({"baseline": baseline, "model": rival}, count)
        milliseconds = 1000 / rates["model"] * len(self._batch)
        return f"{milliseconds:9.0f} ms{rates['baseline'] / rates['model']:6.2f} x"


def main() -> None:
    """Print the table, a line a model as soon as it is measured."""
    flags = parser(__doc__, data="shapes.yaml", rounds=7, imgsz=320, batch=16, device="cpu", steps=1)
    named = "model YAMLs; tessera: those of this family, small: sizes n, t and s of all families"
    flags.add_argument("cfgs", nargs="*", default=("tessera",), help=f"{named} (default: tessera)")
    given = flags.parse_args()
    accelerator = choose_accelerator(given.device, Launch())
    index = indexed(given.data)
    batch = made_batch(index, given.batch, given.imgsz)
    steps = Steps(batch, tuple(index.names), given.imgsz, accelerator, given.steps)
    dtypes = tuple(dict.fromkeys((torch.float32, accelerator.native_dtype)))
    print(f"{machine()}; steps: {given.imgsz} px, batch {given.batch}, {len(index.names)} classes, over {BASELINE}'s")
    sizes = "".join(f"{f'{nc} classes, {imgsz} px':>20}" for nc, imgsz in SIZES)
    print(f"{'':24}{sizes}" + "".join(f"{str(dtype).removeprefix('torch.'):>20}" for dtype in dtypes))
    with ExitStack() as stack:
        baselines = {dtype: stack.enter_context(steps.of(BASELINE, dtype)) for dtype in dtypes}
        for cfg in (BASELINE, *(cfg for name in given.cfgs for cfg in GROUPS.get(name, (name,)))):
            times = [steps.compare(cfg, baselines[dtype], dtype, given.rounds) for dtype in dtypes]
            print(f"{Path(cfg).stem:24}{cost(cfg)}{''.join(times)}", flush=True)


if __name__ == "__main__":
    main()
