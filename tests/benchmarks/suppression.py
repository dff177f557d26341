"""Memory that the candidates of one image take where every class of every box is one, as early in training.

uv run python -m tests.benchmarks.suppression

"At once" is the same work on all scores of the image together.
"""

from __future__ import annotations

import time
from unittest import mock

import torch

from tessera.models.suppression import Suppression, non_max_suppression, strongest_candidates, suppress_candidates
from tessera.utils.types import Detections
from tests.benchmarks.gathering import watch_peak
from tests.benchmarks.rounds import machine
from tests.benchmarks.val import untrained

RULES = Suppression(0.001, 0.6)


def on_host(decoded: torch.Tensor) -> Detections:
    return non_max_suppression(decoded, RULES)[0]


def with_queue(decoded: torch.Tensor) -> Detections:
    return suppress_candidates(strongest_candidates(decoded, RULES)[0], RULES)


def main() -> None:
    print(machine())
    for classes in (80, 1203):
        decoded = untrained(1, 640, classes)
        for find in (on_host, with_queue):
            find(decoded[:, :50])
            said, found = [], []
            for scores_at_once in (2**40, 2**22):
                with mock.patch("tessera.models.suppression._SCORES_AT_ONCE", scores_at_once):
                    peak, started = watch_peak(), time.process_time()
                    found.append(find(decoded))
                said.append((peak() / 2**20, time.process_time() - started))
            assert torch.equal(found[0].boxes_xyxy, found[1].boxes_xyxy)
            assert torch.equal(found[0].scores, found[1].scores) and torch.equal(found[0].classes, found[1].classes)
            (plain, plain_s), (ours, our_s) = said
            memory = f"{plain:7.0f} MiB at once {ours:7.0f} MiB {plain / ours:6.1f} x"
            print(f"  {classes:>5} classes, {find.__name__:<11}{memory}   {plain_s:5.2f} and {our_s:5.2f} s of CPU")


if __name__ == "__main__":
    main()
