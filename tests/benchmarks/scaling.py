"""What a step costs on many GPUs, on paper: bytes, latencies and what they need from the machine.

    uv run python -m tests.benchmarks.scaling --cfg yolov5s.yaml --batch 16 --step-ms 25

A ring all-reduce of S bytes over N ranks moves 2 (N − 1) / N · S through every link and takes 2 (N − 1) hops; NCCL's
tree takes 2 log2 N. The smaller of both counts. SyncBatchNorm sends two small messages a layer, one after the other.
"""

from __future__ import annotations

import math

from torch import nn

from tessera.models.detector import DetectionModel
from tessera.utils.config import Hyp
from tests.benchmarks.rounds import parser


def all_reduce_ms(size: float, ranks: int, gigabytes: float, hop_us: float) -> float:
    hops = min(2 * (ranks - 1), 2 * math.ceil(math.log2(ranks)))
    return 1000 * 2 * (ranks - 1) / ranks * size / (gigabytes * 1e9) + hops * hop_us / 1000


def main() -> None:
    given = parser(
        __doc__,
        cfg="yolov5s.yaml",
        batch=(16, "images of a GPU"),
        step_ms=(25.0, "forward and backward of a GPU's batch"),
        nvlink=(300.0, "GB/s of a GPU within a host of 8"),
        network=(25.0, "GB/s of a GPU between hosts"),
        hop_us=(8.0, "latency of a hop between hosts; a quarter within one"),
        image_kb=(165.0, "mean size of a JPEG file: COCO's"),
        loader=(90.0, "samples/s of a core, from files"),
    ).parse_args()
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
        add("efficiency without, with --sync-bn", f"{given.step_ms / plain:.0%}, {given.step_ms / synced:.0%}")
        add("images/s", f"{rate:.0f}")
        add("files read by a host", f"{min(ranks, 8) / ranks * rate * given.image_kb / 1e6:.2f} GB/s")
        add("files read in all", f"{rate * given.image_kb / 1e6:.1f} GB/s")
        add("loader cores a GPU", f"{rate / ranks / given.loader:.1f}")
    for name, values in rows.items():
        print(f"| {name} | {' | '.join(values)} |")


if __name__ == "__main__":
    main()
