"""What a long training costs and how its recipe behaves, on paper: by default tessera-n on COCO with 8 GPUs.

    uv run python -m tests.benchmarks.whole_run --cfg tessera-s.yaml --rate 400

Nothing is measured. The images a second of a GPU, the network, the disk and the loader are assumptions, given as flags;
the rest follows from the model, the recipe and the number of images. Activations are what autograd keeps for the
backward of one image, at two bytes a number; what the loss and the kernels need for a while is not counted.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from tessera.data.feed.sampler import batches_per_epoch
from tessera.models.detector import DetectionModel
from tessera.models.summary import count_gflops, count_parameters
from tessera.utils.config import Hyp, load_hyp
from tessera.utils.engine.ema import ema_decay
from tessera.utils.engine.schedule import Schedule, accumulation, nominal_batch
from tests.benchmarks.rounds import parser
from tests.benchmarks.scaling import all_reduce_ms
from tests.data.made_coco import IMAGES, OBJECTS

BATCHES = (64, 128, 256, 512)
_OBJECT_BYTES, _IMAGE_BYTES = 20, 24 + 50  # of an index: class and box; size, two offsets and a path


def kept_numbers(model: DetectionModel, imgsz: int) -> int:
    """Numbers that autograd keeps of an image in the forward of a training step; nothing is computed."""
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()._cdata
        if storage not in own and tensor.is_floating_point():
            kept[storage] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.train()(torch.zeros(1, model.channels, imgsz, imgsz, device="meta"))
    return sum(tensor.untyped_storage().nbytes() // tensor.element_size() for tensor in kept.values())


def rows(given: argparse.Namespace, hyp: Hyp, model: DetectionModel, batch: int) -> Iterator[tuple[str, str]]:
    """The table's rows, for batches of `batch` images over all GPUs."""
    schedule = Schedule(hyp, given.epochs, batches_per_epoch(given.images, batch), batch)
    steps, a_step = schedule.steps(), batch * accumulation(hyp, batch)
    images = schedule.iterations * batch
    closed = round(hyp.close_mosaic * given.epochs) * steps // given.epochs
    horizon = 1 / (1 - ema_decay(steps, hyp.ema_share))
    before = math.prod(ema_decay(n, hyp.ema_share) for n in range(steps - closed + 1, steps + 1))
    rate = given.gpus * given.rate
    reduced = all_reduce_ms(4 * count_parameters(model), given.gpus, given.nvlink, given.hop_us)
    yield "images a GPU", f"{batch / given.gpus:g}"
    yield "batches an epoch", f"{schedule.batches_per_epoch:,}"
    yield "optimizer steps of the run", f"{steps:,}"
    yield "warm-up, batches", f"{schedule.warmup_iterations:,}"
    yield "weight decay as applied", f"{hyp.weight_decay * a_step / nominal_batch(hyp, batch):g}"
    yield "`clip` that cuts off as at 64 images", f"{hyp.clip * a_step / nominal_batch(hyp, batch):g}"
    yield "EMA at the end", f"{horizon:,.0f} steps, {horizon * given.epochs / steps:.1f} epochs"
    yield "of it from before mosaic closes", f"{before:.0%}"
    yield "activations a GPU", f"{2 * kept_numbers(model, given.imgsz) * batch / given.gpus / 1e9:.1f} GB"
    yield "all-reduce of gradients", f"{reduced:.2f} of {1000 * batch / rate:.0f} ms a step"
    yield "images trained on", f"{images / 1e6:.1f} million"
    yield "FLOPs of the run", f"{3 * count_gflops(model, given.imgsz) * images / 1e9:.2f} × 10^18"
    yield "hours", f"{images / rate / 3600:.1f}"


def main() -> None:
    given = parser(
        __doc__,
        cfg="tessera-n.yaml",
        hyp="hyp.tessera-long.yaml",
        epochs=300,
        images=IMAGES,
        objects=OBJECTS,
        imgsz=640,
        gpus=(8, "of one host"),
        rate=(640.0, "images/s that a GPU trains on"),
        loader=(90.0, "samples/s of a core, from files"),
        image_kb=(165.0, "mean size of a JPEG file: COCO's"),
        aspect=(0.75, "short side of an image over its long one"),
        nvlink=(300.0, "GB/s of a GPU within the host"),
        hop_us=(2.0, "latency of a hop within the host"),
    ).parse_args()
    hyp = load_hyp(given.hyp)
    with torch.device("meta"):
        model = DetectionModel(given.cfg, nc=80)
    parameters, rate = count_parameters(model), given.gpus * given.rate
    index = _OBJECT_BYTES * given.objects + _IMAGE_BYTES * given.images
    cache = 3 * given.aspect * given.imgsz**2 * given.images
    print(
        f"{given.cfg}, {given.hyp}: {parameters / 1e6:.2f} M parameters: gradient {4 * parameters / 1e6:.1f} MB; with "
        f"weights, momentum and EMA {16 * parameters / 1e6:.0f} MB a GPU. {count_gflops(model, given.imgsz):.1f} GFLOPs"
        f" a forward of an image, three times that a step.\n"
        f"{given.gpus} GPUs × {given.rate:g} images/s: {rate:,.0f} images/s of the loaders, "
        f"{rate / given.gpus / given.loader:.1f} cores a GPU at {given.loader:g} samples/s of a core, "
        f"{rate * given.image_kb / 1e6:.2f} GB/s of files. Index {index / 1e6:.0f} MB, --cache {cache / 1e9:.0f} GB.\n"
    )
    columns = [dict(rows(given, hyp, model, batch)) for batch in BATCHES]
    print(f"| batch | {' | '.join(map(str, BATCHES))} |\n| --- |{' --- |' * len(BATCHES)}")
    for name in columns[0]:
        print(f"| {name} | {' | '.join(column[name] for column in columns)} |")


if __name__ == "__main__":
    main()
