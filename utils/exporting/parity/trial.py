"""Two pipelines on the same pictures, at two sets of thresholds: a file that ignores them is caught by the second."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

from tessera.models.nms import Suppression
from tessera.utils.bit_depth import Pixels
from tessera.utils.exporting.parity.difference import Difference, Tolerance, compare, joined
from tessera.utils.exporting.parity.ties import candidates_of, without_ties
from tessera.utils.runtime.model import Backend, PictureBackend
from tessera.utils.runtime.pipeline import Pipeline, suppression_of
from tessera.utils.types import Detections


class Round(NamedTuple):
    """Thresholds, on every picture or on every `step`-th."""

    conf: float
    iou: float
    max_det: int
    step: int = 1

    def rules(self, backend: Backend | PictureBackend) -> Suppression:
        """The suppression of a round."""
        return suppression_of(backend, conf=self.conf, iou=self.iou, max_det=self.max_det)


ROUNDS = (Round(0.05, 0.6, 300), Round(0.35, 0.3, 3, 2))
UNSURE_ROUNDS = (Round(0.001, 0.6, 300), Round(0.003, 0.3, 3, 2))  # of a model that is sure of nothing


class Findings(NamedTuple):
    """What a network found, round by round and picture by picture.

    Attributes:
        rounds: what was asked for.
        found: of each round, of each picture.
        milliseconds: that a picture of the last round took, the median.
    """

    rounds: tuple[Round, ...]
    found: tuple[tuple[Detections, ...], ...]
    milliseconds: float


def try_out(
    backend: Backend | PictureBackend, pictures: Sequence[Pixels], imgsz: int, rounds: tuple[Round, ...] = ROUNDS
) -> Findings:
    """Let a network find what it finds; its first round also compiles what it compiles for each shape.

    Raises:
        UserError: it cannot be computed.
    """
    pipeline, found_by_round, times = Pipeline(backend, imgsz), [], [0.0]
    for asked in rounds:
        found, times, rules = [], [], asked.rules(backend)
        for picture in pictures[:: asked.step]:
            started = time.perf_counter()
            found.append(pipeline(picture, rules).detections)
            times.append(1000 * (time.perf_counter() - started))
        found_by_round.append(tuple(found))
    return Findings(rounds, tuple(found_by_round), statistics.median(times))


def difference_of(
    reference: Findings, other: Findings, pictures: Sequence[Pixels], imgsz: int, allowed: Tolerance, network: Backend
) -> Difference:
    """How far two trials, of a network and of a file, are apart.

    Where it is more than `allowed`, the candidates of `network` tell whether the suppression had a choice.
    """
    parts = []
    for asked, expected, found in zip(reference.rounds, reference.found, other.found, strict=True):
        for picture, one, two in zip(pictures[:: asked.step], expected, found, strict=True):
            scale = imgsz / max(picture.shape[:2])
            limits = {"conf": asked.conf, "max_det": asked.max_det, "scale": scale, "margin": allowed.margin}
            compared = compare(one, two, **limits)
            if allowed.overlap is not None and compared.exceeds(allowed):
                rules = asked.rules(network)
                candidates = candidates_of(network, rules, imgsz, picture)
                untied = compare(*without_ties(one, two, candidates, rules, scale, allowed), **limits)
                compared = compared if untied.exceeds(allowed) else untied
            parts.append(compared)
    return joined(parts)
