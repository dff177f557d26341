"""What class weights and balanced sampling give on a long-tailed set, and pictures without objects on a small one.

OMP_NUM_THREADS=1 uv run python -m tests.benchmarks.balance plain weighted balanced
OMP_NUM_THREADS=1 uv run python -m tests.benchmarks.balance negatives0 negatives10 negatives50

All are of the photographs of cards, fine-tuned. The first three: pictures with a jack, queen or king are left out of
the training until a tenth of these cards remains; validated on all. The others: photographs of raccoons without labels
are added to the training, so many per cent of its pictures; validated on the cards alone, and among raccoons that it
has not seen.
"""

from __future__ import annotations

import argparse
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import yaml

import tessera
from tessera.utils.config import load_hyp
from tessera.utils.types import Metrics

NAMES = ("nine", "ten", "jack", "queen", "king", "ace")
RARE = (2, 3, 4)
HYP = "hyp.tessera-short.yaml"


def objects(image: Path) -> Counter[int]:
    """How many objects of each class a picture has."""
    label = image.parents[2] / "labels" / image.parent.name / f"{image.stem}.txt"
    return Counter(int(row.split()[0]) for row in label.read_text().splitlines())


def without_most(images: Sequence[Path], rare: Sequence[int], share: float) -> list[Path]:
    """Those of `images` that are left where only `share` of the objects of the rare classes may remain."""
    all_objects: Counter[int] = sum(map(objects, images), Counter())
    left: Counter[int] = Counter()
    kept = []
    for number in np.random.default_rng(0).permutation(len(images)).tolist():
        found = Counter({c: n for c, n in objects(images[number]).items() if c in rare})
        if all(left[c] + n <= share * all_objects[c] for c, n in found.items()):
            left += found
            kept.append(images[number])
    return sorted(kept)


def write_set(path: Path, train: Sequence[Path], val: Sequence[Path]) -> Path:
    """A dataset YAML with two lists of pictures beside it."""
    content: dict[str, object] = {"names": list(NAMES)}
    for split, images in (("train", train), ("val", val)):
        listed = path.with_name(f"{path.stem}-{split}.txt")
        listed.write_text("".join(f"{image}\n" for image in images))
        content[split] = str(listed)
    path.write_text(yaml.safe_dump(content))
    return path


def pictures(folder: Path, split: str) -> list[Path]:
    """The pictures of a split, sorted."""
    return sorted((folder / "images" / split).resolve().iterdir())


def unlabelled(images: Sequence[Path], folder: Path) -> list[Path]:
    """Links to `images` in a folder without labels."""
    folder.mkdir(parents=True, exist_ok=True)
    links = [folder / image.name for image in images]
    for link, image in zip(links, images, strict=True):
        link.unlink(missing_ok=True)
        link.symlink_to(image)
    return links


def long_tailed(given: argparse.Namespace, arm: str, seed: int) -> str:
    """A training on the long-tailed set, in words."""
    train, val = (pictures(given.shared / "cards", split) for split in ("train", "val"))
    data = write_set(given.project / f"{arm}-{seed}.yaml", without_most(train, RARE, 0.1), val)
    hyp = given.project / f"{arm}-{seed}-hyp.yaml"
    hyp.write_text(yaml.safe_dump({**load_hyp(HYP).as_dict(), "class_weights": "auto" if arm == "weighted" else ""}))
    sampling = "balanced" if arm == "balanced" else "shuffled"
    metrics = trained(given, f"{arm}-{seed}", data=str(data), seed=seed, hyp=str(hyp), sampling=sampling)
    maps = np.array(metrics.class_maps())
    rare, common = maps[list(RARE)].mean(), np.delete(maps, RARE).mean()
    return f"mAP50-95 {metrics.map:.3f}, of the rare {rare:.3f}, of the common {common:.3f}"


def with_negatives(given: argparse.Namespace, arm: str, seed: int) -> str:
    """A training on cards and raccoons without labels, in words."""
    train, val = (pictures(given.shared / "cards", split) for split in ("train", "val"))
    folder = given.project / f"{arm}-{seed}-others" / "images"
    others, unseen = (
        unlabelled(pictures(given.shared / "raccoon", split), folder / split) for split in ("train", "val")
    )
    added = others[: round(int(arm.removeprefix("negatives")) / 100 * len(train))]
    data = write_set(given.project / f"{arm}-{seed}.yaml", [*train, *added], val)
    among = write_set(given.project / f"{arm}-{seed}-among.yaml", train, [*val, *unseen])
    alone = trained(given, f"{arm}-{seed}", data=str(data), seed=seed)
    best = given.project / f"{arm}-{seed}" / "weights" / "best.pt"
    measured = {"imgsz": given.imgsz, "project": str(given.project), "name": f"{arm}-{seed}-among", "workers": 1}
    both = tessera.val(weights=str(best), data=str(among), **measured)
    return f"{len(added)} added, mAP50-95 {alone.map:.3f}, among unseen raccoons {both.map:.3f}"


ARMS: Mapping[str, Callable[[argparse.Namespace, str, int], str]] = {
    **dict.fromkeys(("plain", "weighted", "balanced"), long_tailed),
    **dict.fromkeys(("negatives0", "negatives10", "negatives50"), with_negatives),
}


def trained(given: argparse.Namespace, name: str, **flags: object) -> Metrics:
    """The metrics of a training, of its last epoch."""
    common = {"imgsz": given.imgsz, "epochs": given.epochs, "cfg": "yolov5n-free.yaml", "hyp": HYP, "patience": 0}
    common |= {"weights": str(given.shared / "weights" / "yolov5n.pt"), "project": str(given.project), "name": name}
    common |= {"noval": True, "noplots": True, "loggers": "none", "exist_ok": True, "workers": 1}
    metrics = tessera.train(**{**common, **flags})
    assert metrics is not None
    return metrics


def main() -> None:
    """The command line."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("arms", nargs="+", choices=ARMS)
    flags.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    flags.add_argument("--epochs", type=int, default=16)
    flags.add_argument("--imgsz", type=int, default=160)
    flags.add_argument("--shared", type=Path, default=Path("../shared"), help="folder of the sets and weights; read")
    flags.add_argument("--project", type=Path, default=Path("runs/balance"), help="folder of runs")
    given = flags.parse_args()
    given.project = given.project.absolute()
    given.project.mkdir(parents=True, exist_ok=True)
    for seed, arm in itertools.product(given.seeds, given.arms):
        print(f"{arm}, seed {seed}: {ARMS[arm](given, arm, seed)}", flush=True)


if __name__ == "__main__":
    main()
