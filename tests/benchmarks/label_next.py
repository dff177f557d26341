"""Whether it pays to label the pictures that `--label-next` chooses, against as many taken at random.

OMP_NUM_THREADS=1 nice -n 19 uv run python -m tests.benchmarks.label_next --seeds 0 1 2

Of the photographs of cards, 30 are labelled; three times 30 more are chosen among those that are not, by the detector
that was trained on what is labelled so far, and get the labels that people gave them. Both arms of a seed begin with
the same 30 and the same detector; each training goes on from the weights of the round before, for as many steps.
How many of 30 have a card that are chosen among cards and photographs of raccoons is told too.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

import tessera
from tests.benchmarks.balance import pictures, unlabelled, write_set

ARMS = ("random", "next")


def trained(given: argparse.Namespace, name: str, chosen: list[Path], seed: int, weights: str) -> float:
    """mAP50-95 on all validation pictures of the last epoch of a training on `chosen` from `weights`."""
    data = write_set(given.project / f"{name}.yaml", sorted(chosen), pictures(given.shared / "cards", "val"))
    steps_an_epoch = -(-len(chosen) // given.batch_size)
    metrics = tessera.train(
        data=str(data),
        weights=weights,
        epochs=round(given.steps / steps_an_epoch),
        imgsz=given.imgsz,
        batch_size=given.batch_size,
        seed=seed,
        project=str(given.project),
        name=name,
        exist_ok=True,
        patience=0,
        noval=True,
        noplots=True,
        loggers="none",
        workers=1,
        device=given.device,
    )
    assert metrics is not None
    return metrics.map


def last_of(given: argparse.Namespace, name: str) -> str:
    """The checkpoint of run `name`."""
    return str(given.project / name / "weights" / "last.pt")


def chosen_next(given: argparse.Namespace, name: str, pool: list[Path]) -> list[Path]:
    """What `--label-next` chooses of `pool` by the detector of run `name`."""
    links = unlabelled(pool, given.project / f"{name}-pool")
    summary = tessera.detect(
        weights=last_of(given, name),
        source=[str(link) for link in links],
        label_next=given.more,
        project=str(given.project),
        name=f"{name}-next",
        exist_ok=True,
        device=given.device,
    )
    listed = (summary.folder / "label_next.txt").read_text().splitlines()
    return [Path(line).resolve() for line in listed]


def run_seed(given: argparse.Namespace, seed: int) -> dict[str, list[float]]:
    """mAP of each arm by round, of one seed."""
    rng = np.random.default_rng(seed)
    everything = [path.resolve() for path in pictures(given.shared / "cards", "train")]
    first = [everything[int(i)] for i in rng.permutation(len(everything))[: given.more]]
    start = trained(given, f"start-{seed}", first, seed, given.weights)
    print(f"seed {seed}: {len(first)} pictures: mAP50-95 {start:.3f}", flush=True)
    rest = set(everything) - set(first)
    mixed = [*sorted(rest), *(path.resolve() for path in pictures(given.shared / "raccoon", "train"))]
    cards = len(rest.intersection(chosen_next(given, f"start-{seed}", mixed)))
    expected = given.more * len(rest) / len(mixed)
    print(f"seed {seed}: of {len(mixed)} with raccoons {cards} of {given.more} have cards, {expected:.1f} by chance")
    found: dict[str, list[float]] = {}
    for arm in given.arms:
        labelled, name, found[arm] = list(first), f"start-{seed}", []
        for number in range(1, given.rounds + 1):
            pool = sorted(set(everything) - set(labelled))
            if arm == "random":
                labelled += [pool[int(i)] for i in rng.permutation(len(pool))[: given.more]]
            else:
                labelled += chosen_next(given, name, pool)
            before, name = name, f"{arm}-{seed}-{number}"
            found[arm].append(trained(given, name, labelled, seed, last_of(given, before)))
            print(f"seed {seed}, {arm}: {len(labelled)} pictures: mAP50-95 {found[arm][-1]:.3f}", flush=True)
    return found


def main() -> None:
    """The command line."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    flags.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    flags.add_argument("--rounds", type=int, default=3)
    flags.add_argument("--more", type=int, default=30, help="pictures to begin with, and to label in each round")
    flags.add_argument("--steps", type=int, default=150, help="of each training")
    flags.add_argument("--batch-size", type=int, default=16)
    flags.add_argument("--imgsz", type=int, default=160)
    flags.add_argument("--device", default="")
    flags.add_argument("--weights", default="../shared/weights/yolov5n.pt")
    flags.add_argument("--shared", type=Path, default=Path("../shared"), help="folder of the sets; read")
    flags.add_argument("--project", type=Path, default=Path("runs/label_next"), help="folder of runs")
    given = flags.parse_args()
    given.project = given.project.absolute()
    given.project.mkdir(parents=True, exist_ok=True)
    seeds = [run_seed(given, seed) for seed in given.seeds]
    for number in range(given.rounds if set(given.arms) == set(ARMS) else 0):
        differences = np.array([found["next"][number] - found["random"][number] for found in seeds])
        error = differences.std(ddof=1) / len(differences) ** 0.5 if len(differences) > 1 else float("nan")
        print(f"{(number + 2) * given.more} pictures: {differences.mean():+.3f} ± {error:.3f} (standard error)")


if __name__ == "__main__":
    main()
