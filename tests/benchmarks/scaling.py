"""What a step costs on many GPUs, on paper: bytes, latencies and what they need from the machine.

    uv run python -m tests.benchmarks.scaling --cfg yolov5s.yaml --batch 16 --step-ms 25

A ring all-reduce of S bytes over N ranks moves 2 (N − 1) / N · S through every link and takes 2 (N − 1) hops; NCCL's
tree takes 2 log2 N. The smaller of both counts. SyncBatchNorm sends two small messages a layer, one after the other.
"""

from __future__ import annotations

import argparse
import math

from torch import nn

from tessera.models.detector import DetectionModel
from tessera.utils.config import Hyp


def all_reduce_ms(size: float, ranks: int, gigabytes: float, hop_us: float) -> float:
    """Milliseconds of an all-reduce of `size` bytes."""
    hops = min(2 * (ranks - 1), 2 * math.ceil(math.log2(ranks)))
    return 1000 * 2 * (ranks - 1) / ranks * size / (gigabytes * 1e9) + hops * hop_us / 1000


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--cfg", default="yolov5s.yaml")
    flags.add_argument("--batch", type=int, default=16, help="images of a GPU")
    flags.add_argument("--step-ms", type=float, default=25, help="forward and backward of a GPU's batch")
    flags.add_argument("--nvlink", type=float, default=300, help="GB/s of a GPU within a host of 8")
    flags.add_argument("--network", type=float, default=25, help="GB/s of a GPU between hosts")
    flags.add_argument("--hop-us", type=float, default=8, help="latency of a hop between hosts; a quarter within one")
    flags.add_argument("--image-kb", type=float, default=165, help="mean size of a JPEG file: COCO's")
    flags.add_argument("--loader", type=float, default=90, help="samples/s of a core, from files")
    given = flags.parse_args()
    model = DetectionModel(given.cfg, names=[str(i) for i in range(80)])
    gradient = 4 * sum(p.numel() for p in model.parameters())
    norms = [m.num_features for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    backward = given.step_ms * 2 / 3
    print(f"{given.cfg}: gradient {gradient / 1e6:.1f} MB, {len(norms)} BatchNorm layers; {given.batch} images a GPU")
    print("| | 8 GPUs | 64 GPUs | 512 GPUs |\n| --- | --- | --- | --- |")
    rows: dict[str, list[str]] = {}

    def add(name: str, value: str) -> None:
        rows.setdefault(name, []).append(value)

    for ranks in (8, 64, 512):
        bandwidth, hop = (given.nvlink, given.hop_us / 4) if ranks == 8 else (given.network, given.hop_us)
        reduced = all_reduce_ms(gradient, ranks, bandwidth, hop)
        counts = all_reduce_ms(28, ranks, bandwidth, hop)
        sync_bn = 2 * sum(all_reduce_ms(8 * channels, ranks, bandwidth, hop) for channels in norms)
        # The last bucket, of up to 25 MB, overlaps with nothing; nor do BatchNorm's running statistics.
        exposed = max(reduced - 0.9 * backward, reduced * min(25e6 / gradient, 1))
        statistics = all_reduce_ms(8 * sum(norms), ranks, bandwidth, hop)
        plain, synced = given.step_ms + exposed + statistics, given.step_ms + exposed + sync_bn
        rate = ranks * given.batch / plain * 1000
        add("global batch", str(ranks * given.batch))
        add(f"of the nominal {Hyp.nominal_batch:g}", f"{ranks * given.batch / Hyp.nominal_batch:g} x")
        add("gradients through each link", f"{2 * (ranks - 1) / ranks * gradient / 1e6:.0f} MB")
        add("all-reduce of gradients", f"{reduced:.2f} ms")
        add("of it not overlapped with the backward", f"{exposed:.2f} ms")
        add("all-reduce of counts and flags, during the forward", f"{counts:.3f} ms")
        add("--sync-bn, between layers", f"{sync_bn:.1f} ms")
        add(
            "efficiency without, with --sync-bn",
            f"{given.step_ms / plain:.0%}, {given.step_ms / synced:.0%}",
        )
        add("images/s", f"{rate:.0f}")
        add("files read by a host", f"{min(ranks, 8) / ranks * rate * given.image_kb / 1e6:.2f} GB/s")
        add("files read in all", f"{rate * given.image_kb / 1e6:.1f} GB/s")
        add("loader cores a GPU", f"{rate / ranks / given.loader:.1f}")
    for name, values in rows.items():
        print(f"| {name} | {' | '.join(values)} |")


if __name__ == "__main__":
    main()
