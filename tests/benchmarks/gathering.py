"""What joining a validation costs: bytes that a rank receives, and the memory it takes at most.

uv run python -m tests.benchmarks.gathering
uv run python -m tests.benchmarks.gathering --ranks 8 --images 20000 --detections 300 --classes 10000

The ranks are made up and take their turns in one process; what they send is pickled as between processes. Plain is:
every match with a byte a threshold and a dense confusion matrix, but no errors one by one, sent to every rank, joined
and sorted there at once. Memory is without what gloo holds while it sends: as much again in a gather to all, nothing in
Tessera's to one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import multiprocessing
import pickle
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tessera.utils.evaluation.average_precision import rank
from tessera.utils.evaluation.confusion import PairCounts
from tessera.utils.evaluation.curves import summarize
from tessera.utils.evaluation.match_state import Accumulator, LastHits
from tessera.utils.evaluation.matching import FALSE_KINDS, ImageMatches, Kind
from tessera.utils.evaluation.tally import Errors, WorstFinds, tally
from tessera.utils.types import Detections
from tests.benchmarks.rounds import machine, parser
from tests.data.made_index import make_index
from tests.utils.evaluation.plain_metrics import Plain, merge, plain_figures

CONFIDENCE = 0.25
SHARES = (0.1, 0.3, 0.1, 0.2, 0.3)  # of the kinds of false detections


class Job(NamedTuple):
    """How much is measured: detections are of an image."""

    ranks: int
    images: int
    detections: int
    classes: int


class Cost(NamedTuple):
    """Bytes received and peak bytes, on rank 0 and on the others; seconds of rank 0; and the figures found."""

    received: int
    received_elsewhere: int
    peak: int
    peak_elsewhere: int
    seconds: float
    figures: tuple[object, ...]


def matches_of(job: Job, number: int) -> Iterator[tuple[int, ImageMatches]]:
    """What a rank has found: most detections unsure and wrong, a few classes with most objects; seven an image."""
    rng = np.random.default_rng(number)
    frequency = 1 / np.arange(1.0, job.classes + 1)
    for image in range(number, job.images, job.ranks):
        scores = -np.sort(-(0.001 ** (1 - rng.random(job.detections) ** 4))).astype(np.float32)
        classes = np.searchsorted(np.cumsum(frequency), rng.random(job.detections) * frequency.sum()).astype(np.int32)
        quality = np.where(rng.random(job.detections) < 0.9 * scores, 0.45 + rng.random(job.detections) * 0.55, 0)
        correct = quality[:, None] > np.linspace(0.5, 0.95, 10)
        missed = rng.integers(0, job.classes, 2).astype(np.int32)
        objects = np.concatenate((classes[correct[:, 0]], missed))
        own = np.where(correct[:, 0], np.cumsum(correct[:, 0]) - 1, -1)
        kinds = np.where(own >= 0, Kind.CORRECT, rng.choice(FALSE_KINDS, job.detections, p=SHARES)).astype(np.uint8)
        about = np.where(kinds <= Kind.BADLY_PLACED, rng.integers(0, len(objects), job.detections), -1)
        about = np.where(own >= 0, own, about).astype(np.int8 if len(objects) < 127 else np.int32)
        in_regions = np.zeros(job.detections, np.uint8)
        yield image, ImageMatches(correct, scores, classes, objects, in_regions, kinds, about)


def pairs_of(job: Job, number: int) -> PairCounts:
    """Pairs of classes that a rank has counted, eight an image."""
    cells = np.random.default_rng(number).integers(0, (job.classes + 1) ** 2, 8 * job.images // job.ranks)
    return PairCounts(*np.unique(cells, return_counts=True))


def plain(job: Job) -> Cost:
    """Each rank receives everything."""

    def text_of(number: int) -> bytes:
        matrix = np.zeros((job.classes + 1) ** 2, np.int64)
        matrix[pairs_of(job, number).cells] = pairs_of(job, number).counts
        return pickle.dumps((Plain.of(matches_of(job, number)), matrix))

    peak = watch_peak()
    texts = [text_of(number) for number in range(job.ranks)]
    received = max(map(len, texts)) * (job.ranks - 1)
    started = time.perf_counter()
    shares = []
    while texts:
        shares.append(pickle.loads(texts.pop(0)))
    matrix = sum(share[1] for share in shares)
    found = plain_figures(merge([share[0] for share in shares]), job.classes)
    seconds = time.perf_counter() - started
    assert isinstance(matrix, np.ndarray)
    figures = (float(found.ap.mean()), found.confidence, digest(found.precision, found.recall), int(matrix.sum()))
    return Cost(received, received, peak(), peak(), seconds, figures)


def ours(job: Job) -> Cost:
    """Rank 0 receives what decides, the others the metrics."""

    # Errors need the boxes of objects: here all images have the same.
    empty = make_index([(64, 64)] * job.images, classes=[[]] * job.images)
    names, boxes = tuple(map(str, range(job.classes))), np.zeros((job.detections + 2, 4), np.float32)
    index = dataclasses.replace(empty, names=names, boxes_xyxy=boxes)

    def collected(number: int) -> tuple[Accumulator, WorstFinds]:
        found, worst = Accumulator(), WorstFinds()
        for image, matches in matches_of(job, number):
            found.add(image, matches)
            parts = boxes[: job.detections], matches.scores, matches.classes
            worst.add(image, matches, Detections(*map(torch.from_numpy, parts)))
        return found, worst

    hits = [pickle.dumps(collected(number)[0].last_hits()) for number in range(job.ranks)]
    peak = watch_peak()
    last_hits = LastHits.joined([pickle.loads(text) for text in hits])
    received = sum(map(len, hits[1:]))

    def text_of(number: int) -> bytes:
        found, worst = collected(number)
        errors = tally(found, worst, index, CONFIDENCE)._replace(pairs=pairs_of(job, number))
        return pickle.dumps((found.state(last_hits), errors))

    text_of(1)
    peak_elsewhere, peak = peak(), watch_peak()
    shares, seconds = [], 0.0
    for number in range(job.ranks):
        text = text_of(number)
        received += len(text) if number else 0
        started = time.perf_counter()
        shares.append(pickle.loads(text))
        seconds += time.perf_counter() - started
    started = time.perf_counter()
    metrics, curves = summarize(rank([share[0] for share in shares]), job.classes)
    errors = Errors.joined(CONFIDENCE, job.classes, [share[1] for share in shares])
    seconds += time.perf_counter() - started
    figures = (
        metrics.map,
        metrics.confidence,
        digest(curves.precision, curves.recall),
        int(errors.confusion.pairs().counts.sum()),
    )
    elsewhere = len(pickle.dumps(last_hits)) + len(pickle.dumps(metrics))
    return Cost(received, elsewhere, peak(), peak_elsewhere, seconds, figures)


def digest(*arrays: NDArray[np.float64]) -> str:
    """Of every bit."""
    state = hashlib.blake2b()
    for array in arrays:
        state.update(array)
    return state.hexdigest()


def watch_peak() -> Callable[[], int]:
    """From now on: how many bytes this process has held at most beyond what it holds now."""
    Path("/proc/self/clear_refs").write_text("5")
    before = status_kb("VmRSS")
    return lambda: (status_kb("VmHWM") - before) * 1024


def status_kb(field: str) -> int:
    """A line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def apart(work: Callable[[Job], Cost], job: Job) -> Cost:
    """In a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as pool:
        return pool.submit(work, job).result()


def compare(job: Job) -> None:
    """Print both, and check that they found the same."""
    print(f"{job.ranks} ranks, {job.images:,} images, {job.detections} detections each, {job.classes:,} classes")
    before, after = apart(plain, job), apart(ours, job)
    assert before.figures == after.figures, (before, after)
    rows = (
        ("received by rank 0", before.received, after.received),
        ("received by another rank", before.received_elsewhere, after.received_elsewhere),
        ("peak of rank 0", before.peak, after.peak),
        ("peak of another rank", before.peak_elsewhere, after.peak_elsewhere),
    )
    for name, plain_bytes, our_bytes in rows:
        ratio = plain_bytes / our_bytes
        print(f"  {name:<26}{plain_bytes / 1e6:10.1f} MB plain {our_bytes / 1e6:10.1f} MB  {ratio:8.1f} x")
    print(f"  {'seconds of rank 0':<26}{before.seconds:10.1f} s  plain {after.seconds:10.1f} s   the same figures")


def main() -> None:
    given = parser(__doc__, ranks=0, images=100_000, detections=100, classes=80).parse_args()
    print(machine())
    if given.ranks:
        compare(Job(given.ranks, given.images, given.detections, given.classes))
        return
    for job in (Job(512, 100_000, 100, 80), Job(8, 20_000, 100, 10_000)):
        compare(job)


if __name__ == "__main__":
    main()
