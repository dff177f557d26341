"""Budget of a training step on H100 GPUs, counted without one; `gpu.py` prints it beside what it measures.

    uv run python -m tests.benchmarks.budget                                          # four models, 1, 8 and 64 GPUs
    uv run python -m tests.benchmarks.budget --cfg tessera-n.yaml --batch 16

The step of train.py runs in bfloat16 on tensors without memory (torch's FakeTensor). An operator reads its inputs and
writes its outputs once, as fast as FLOPs or memory allow, and is one kernel, a convolution's backward one per gradient.
Operators on lists are as many as torch launches with CUDA 13. The host launches while the device computes.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from tessera.models.detector import DetectionModel
from tessera.utils.engine.profile import NoProfile
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.ranks.liveness import INTERVAL_S, Status
from tessera.utils.types import Batch
from tests.benchmarks.step import Case, train_step

FLOPS, BYTES = 800e12, 3e12  # a second of an H100: dense bfloat16, memory
LAUNCH_S = 5e-6, 8e-6  # of the host for a kernel
HOST, NVLINK, NETWORK = 8, 450e9, 50e9  # GPUs of a host; bytes a second of a ring inside it, and over 400 Gb/s
LOADER = 103, 167  # images a second of a core, from files and with --cache ram: docs/performance.md
EPOCH, OBJECTS = 118_287, 8  # images of COCO; objects of an image
# Tensors of a launch over 1, 2 … lists, its blocks, and the numbers of a block: ATen's MultiTensorApply.cuh
LISTED, BLOCKS, CHUNK = (770, 448, 336, 252, 210), 2240, 65536
WITHOUT_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "scalar_tensor", "_unsafe_view"}
OF_ROWS = {"index", "index_select", "embedding"}  # read as much as they write


@dataclasses.dataclass
class Cost:
    """What some operators take."""

    kernels: int = 0
    flops: float = 0
    bytes: float = 0
    seconds: float = 0  # on the device


class Counter(TorchDispatchMode, NoProfile):
    """Adds up operators by the stage of a step in which they run."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: dict[str, Cost] = defaultdict(Cost)
        self._part = "rest"

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        before, self._part = self._part, name
        yield
        self._part = before

    @property
    def total(self) -> Cost:
        return Cost(*(sum(numbers) for numbers in zip(*map(dataclasses.astuple, self.parts.values()), strict=True)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        by_host = self._part == "rest" and not any(isinstance(x, FakeTensor) for x in tree_leaves((args, out)))
        if self._part != "host" and not by_host and (kernels := launches(func, args, out)):
            count = flop_registry.get(func.overloadpacket)
            flops = float(count(*args, **(kwargs or {}), out_val=out)) if count else 0.0
            moved = _bytes(out) + _bytes(out if func.overloadpacket.__name__ in OF_ROWS else (args, kwargs))
            cost = self.parts[self._part]
            cost.kernels, cost.flops, cost.bytes = cost.kernels + kernels, cost.flops + flops, cost.bytes + moved
            cost.seconds += max(flops / FLOPS, moved / BYTES)
        return out


def launches(func: Any, args: Sequence[Any], out: Any) -> int:
    """Kernels that an operator launches."""
    name = func.overloadpacket.__name__
    if func.namespace != "aten" or func.is_view or name in WITHOUT_KERNEL:
        return 0
    if name == "convolution_backward":
        return sum(args[-1])
    if name.startswith(("_foreach", "_fused")):
        lists = [one for one in (*args, out) if isinstance(one, (list, tuple)) and one and isinstance(one[0], Tensor)]
        blocks = sum(-(-tensor.numel() // CHUNK) for tensor in lists[0])
        return max(-(-len(lists[0]) // LISTED[len(lists) - 1]), -(-blocks // BLOCKS))
    return 1


def _bytes(values: Any) -> int:
    tensors = [value for value in tree_leaves(values) if isinstance(value, Tensor)]
    return sum(min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in tensors)


class Modelled(Accelerator):
    """A device of tensors without memory, for which the host does not wait."""

    queue_depth = 1

    def __init__(self) -> None:
        super().__init__()
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)

    def _send(self, tensor: Tensor) -> Tensor:
        return self.mode.from_tensor(tensor)

    def read_back(self, tensor: Tensor) -> Callable[[], Tensor]:
        return lambda: torch.zeros(tensor.shape, dtype=tensor.dtype)


def count_step(model: DetectionModel, imgsz: int, images: int) -> Counter:
    """The operators of a step on `images` images."""
    device, counter = Modelled(), Counter()
    case = Case(model, _made_batch(images, imgsz, model.nc), imgsz, device)
    laid_out = copy.deepcopy(model).to(memory_format=device.memory_format).train()  # type: ignore[call-overload]
    with FakeCopyMode(device.mode):
        step = train_step(copy.deepcopy(laid_out), case, torch.bfloat16, counter)
    assign, batch = step._criterion.assign, dataclasses.replace(case.batch, images=device.send(case.batch.images))
    step([batch], 1)  # makes what later steps keep
    step._criterion.assign = lambda *given: counter.stage("host")(assign)(*given)  # type: ignore[method-assign]
    with counter:
        step([batch], 1)
    return counter


def _made_batch(images: int, imgsz: int, nc: int) -> Batch:
    """Objects with sides from a 40th to a half of the image."""
    start, side, label = torch.rand(3, images * OBJECTS, 2, generator=torch.Generator().manual_seed(0)) / 2
    owners, corners = torch.arange(images).repeat_interleave(OBJECTS)[:, None], start * imgsz
    targets = torch.cat((owners, (label[:, :1] * nc).floor(), corners, corners + imgsz / 2 * 0.0025**side), 1)
    pixels, nothing = torch.empty(images, imgsz, imgsz, 3, dtype=torch.uint8), torch.zeros(images, 2, dtype=torch.int64)
    return Batch(pixels, targets, torch.arange(images), nothing, torch.zeros(images, 4, dtype=torch.float64))


def rates(cost: Cost, images: int) -> dict[str, float]:
    """Images a second of one GPU that the device and the host allow."""
    return {"device": images / cost.seconds, "launches": images / (cost.kernels * LAUNCH_S[1])}


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--cfg", nargs="+", default=[*(f"tessera-{size}.yaml" for size in "nsm"), "yolov5s.yaml"])
    flags.add_argument("--imgsz", type=int, default=640)
    flags.add_argument("--batch", type=int, nargs="+", default=[16, 64], help="images of a GPU")
    given = flags.parse_args()
    for cfg in given.cfg:
        model = DetectionModel(cfg)
        for images in given.batch:
            counter = count_step(model, given.imgsz, images)
            print(f"{cfg} at {given.imgsz} px, {images} images a GPU: {described(counter)}")
            for gpus in (1, 8, 64):
                print(f"  {gpus:2} GPUs: {job(model, min(rates(counter.total, images).values()), images, gpus)}")


def described(counter: Counter) -> str:
    total, parts = counter.total, ", ".join(f"{part} {cost.kernels}" for part, cost in counter.parts.items())
    launch = " to ".join(f"{1000 * total.kernels * one:.1f}" for one in LAUNCH_S)
    work = f"{total.flops / 1e12:.2f} TFLOP, {total.bytes / 1e9:.1f} GB, {1000 * total.seconds:.1f} ms"
    return f"{work}; {total.kernels} kernels, {launch} ms ({parts})"


def job(model: DetectionModel, rate: float, images: int, gpus: int) -> str:
    """A job of several GPUs; the all-reduce of gradients in a ring is not hidden behind the backward pass."""
    gradients = 4 * sum(parameter.numel() for parameter in model.parameters())
    reduce_s = 2 * (gpus - 1) / gpus * gradients / (NVLINK if gpus <= HOST else NETWORK)
    every = gpus * images / (images / rate + reduce_s)
    cores = " to ".join(f"{every / one:.0f}" for one in reversed(LOADER))
    # Each rank writes a status, looks for a failure, and looks for and reads its neighbour's status.
    status = len(json.dumps(Status(10**4, 10**4, "host-0123456789", "training epoch 100", 10**6, "4026531836")))
    beats = f"{4 * gpus / INTERVAL_S:.0f} calls, {2 * status * gpus / INTERVAL_S / 1000:.1f} kB a second"
    reduced = f"{gradients / 1e6:.0f} MB all-reduced in {1000 * reduce_s:.2f} ms"
    return f"{reduced}, {every:.0f} images/s, {cores} workers, {EPOCH / every:.1f} s an epoch, store {beats}"


if __name__ == "__main__":
    main()
