"""Models at 640 px on a GPU: training steps against eager ones and a budget, what the loader feeds, and validation.

    uv run python -m tests.benchmarks.gpu --json gpu.json
    uv run python -m tests.benchmarks.gpu --cfg tessera-s.yaml

Data are drawn, weights are random: nothing is downloaded. Without a GPU it takes small sizes, to be tried out.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from tessera.data.feed.image_store import ImageStore
from tessera.data.feed.loader import build_train_loader, build_val_loader
from tessera.data.source.dataset_yaml import load_spec
from tessera.data.source.index import build_index
from tessera.models.detector import DetectionModel
from tessera.utils.config import load_hyp
from tessera.utils.engine.precision import Precision
from tessera.utils.environment import Launch
from tessera.utils.evaluation.evaluate import evaluate
from tessera.utils.evaluation.network import fused_copy, network_of
from tessera.utils.machine.accelerator import Accelerator, choose_accelerator
from tessera.utils.machine.host import usable_cpus
from tessera.utils.ranks.world import World
from tessera.utils.types import DatasetIndex
from tests.benchmarks.budget import count_step, rates
from tests.benchmarks.harness import machine, repeated, rounds
from tests.benchmarks.step import Case, made_batch, our_step, plain_step
from tests.data.made_run import made_run
from tests.system.tiny import make_data
from tests.utils.engine.trainer import TINY
from tests.utils.machine.stand_in import StandIn

HYP = "hyp.scratch-low.yaml"


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table: images a second, and the ratio to the first of its group."""

    group: str
    name: str
    images_per_s: float
    ratio: float


def training(model: DetectionModel, index: DatasetIndex, given: argparse.Namespace, device: Accelerator) -> list[Row]:
    """Steps on one batch, copied to the device beside the step before, as in a training."""
    case = Case(model, made_batch(index, given.batch, given.imgsz), given.imgsz, device, given.steps)
    half = device.half_dtype
    rivals = {
        f"eager, {_short(half)}, channels first": plain_step(case, half, torch.contiguous_format),
        f"eager, {_short(half)}, channels last": plain_step(case, half, torch.channels_last),
        f"Tessera, {_short(half)}": our_step(case, half),
        f"Tessera, {_short(device.native_dtype)}": our_step(case, device.native_dtype),
    }
    if given.compile:
        rivals[f"Tessera, {_short(device.native_dtype)}, --compile"] = our_step(case, device.native_dtype, compile=True)
    rows = _rows("training step", rivals, given.rounds)
    allowed = rates(count_step(model, given.imgsz, given.batch).total, given.batch)
    budget = [
        Row(rows[0].group, f"budget of an H100: {by}", one, one / rows[0].images_per_s) for by, one in allowed.items()
    ]
    return rows + budget


def feeding(index: DatasetIndex, given: argparse.Namespace) -> list[Row]:
    workers = given.workers
    run = made_run(load_hyp(HYP), imgsz=given.imgsz, batch_size=given.batch, epochs=10**6, workers=workers)
    with build_train_loader(run, ImageStore(index, given.imgsz, "linear")) as loader:
        stream = itertools.chain.from_iterable(map(loader.batches, itertools.count()))

        def some() -> int:
            return sum(len(batch) for batch in itertools.islice(stream, given.steps))

        return _rows("loader", {f"{workers} workers, from files": some}, given.rounds)


def validating(model: DetectionModel, index: DatasetIndex, given: argparse.Namespace, device: Accelerator) -> list[Row]:
    world = World(accelerator=device)
    fused = fused_copy(model, device)
    workers = given.workers
    with build_val_loader(
        ImageStore(index, given.imgsz, "area"), world, batch_size=given.batch, stride=32, workers=workers
    ) as loader:

        def measure(dtype: torch.dtype) -> Callable[[], int]:
            network = network_of(fused, given.imgsz, device, Precision(device, dtype))
            return lambda: evaluate(network, loader, world).metrics.images

        rivals = {f"Tessera, {_short(dtype)}": measure(dtype) for dtype in (torch.float32, device.half_dtype)}
        return _rows("validation", rivals, given.rounds)


def _rows(group: str, rivals: dict[str, Callable[[], int]], count: int) -> list[Row]:
    rates = rounds(rivals, count)
    first = next(iter(rates.values()))
    return [Row(group, name, rate, rate / first) for name, rate in rates.items()]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main(arguments: Sequence[str] | None = None) -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--stand-in", action="store_true", help="on the tests' stand-in for a GPU, in small sizes")
    flags.add_argument("--json", type=Path, help="write the table here too")
    flags.add_argument("--rounds", type=int)
    flags.add_argument("--steps", type=int, help="steps or batches a round")
    stand_in = flags.parse_known_args(arguments)[0].stand_in
    small = stand_in or not torch.cuda.is_available()
    flags.set_defaults(rounds=1 if small else 5, steps=2 if small else 10)
    flags.add_argument("--cfg", default="tiny" if stand_in else "yolov5n.yaml" if small else "yolov5s.yaml")
    flags.add_argument("--imgsz", type=int, default=64 if small else 640)
    flags.add_argument("--batch", type=int, default=4 if small else 64)
    flags.add_argument("--images", type=int, default=8 if small else 1024)
    flags.add_argument("--workers", type=int, default=0 if small else usable_cpus())
    flags.add_argument("--no-compile", dest="compile", action="store_false", default=not small)
    given = flags.parse_args(arguments)
    with ExitStack() as stack:
        measure(given, stack.enter_context(StandIn()) if given.stand_in else choose_accelerator("", Launch()))


def measure(given: argparse.Namespace, device: Accelerator) -> None:
    device.activate()
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    drawn = min(given.images, 256)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("TESSERA_CACHE", folder)
        spec = load_spec(str(make_data(Path(folder), train=drawn, val=drawn, size=given.imgsz)))
        indexes = [repeated(build_index(spec, split), given.images // drawn) for split in ("train", "val")]
        model = DetectionModel(TINY if given.cfg == "tiny" else given.cfg, names=indexes[0].names)
        rows = [
            *training(model, indexes[0], given, device),
            *feeding(indexes[0], given),
            *validating(model.to(device.device), indexes[1], given, device),
        ]
    print(f"{device.name}; {machine()}; {given.cfg} at {given.imgsz} px, {given.batch} images a batch")
    for row in rows:
        print(f"  {row.group:<16}{row.name:<36}{row.images_per_s:10.1f} images/s {row.ratio:6.2f} x")
    if given.json:
        about = {"device": device.name, "machine": machine(), "cfg": given.cfg, "imgsz": given.imgsz}
        content = {**about, "batch": given.batch, "rows": [dataclasses.asdict(row) for row in rows]}
        given.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
