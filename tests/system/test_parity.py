"""A run does not depend on how its batch is cut: three optimizer steps on 1, 2 and 4 ranks, compared tensor by tensor.

Two results agree where for every parameter and BatchNorm buffer max |a − b| ≤ 1e-4 · max |a|. For most tensors this is
far from what float32 does (1e-6); the bound is needed for the biases of BatchNorm. They start at zero and after three
steps are nothing but a sum of three gradients, so theirs is the relative difference of gradients, which a difference in
the last digit of an activation reaches amplified by the depth of a network that has learnt nothing yet.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from launch import run_python, torchrun
from tiny import make_data

from data.index import build_index
from data.sampler import EpochSampler
from data.spec import load_spec
from utils.config import TrainConfig, load_hyp

PROGRAM = Path(__file__).with_name("parity_program.py")
LIMIT = 1e-4
IMGSZ, BATCH = 64, 16


class Case(NamedTuple):
    """What is trained.

    Attributes:
        images: of the training set.
        flags: beside the common ones.
        hyp: values that differ from the defaults.
        empty_share: whether in each batch the last images, 8 of 16, have no object.
        windows: batches of each of the three steps.
    """

    images: int = 48
    flags: tuple[str, ...] = ()
    hyp: dict[str, float] = {}  # noqa: RUF012 (never changed)
    empty_share: bool = False
    windows: tuple[int, ...] = (1, 1, 1)


CASES = {
    "plain": Case(),
    "accumulation": Case(images=64, flags=("--after-warmup",), hyp={"lr0": 1e-3}, windows=(4, 4, 4)),
    "empty-share": Case(hyp={"mosaic": 0.0, "translate": 0.0}, empty_share=True),
    "partial-batch": Case(images=20),
    "rect": Case(flags=("--rect",)),
    "image-weights": Case(flags=("--image-weights",)),
    "multi-scale": Case(flags=("--multi-scale",)),
}
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        pytest.param(name, ranks, marks=() if (name, ranks) == ("plain", (2,)) else SLOW)
        for name in CASES
        for ranks in ([(2,), (4,)] if name == "plain" else [(2, 4)])
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value)),
)
def test_three_steps_do_not_depend_on_the_number_of_ranks(tmp_path: Path, name: str, ranks: tuple[int, ...]) -> None:
    case = CASES[name]
    data = make_data(tmp_path, train=case.images, val=2)
    if case.empty_share:
        blank_last_half_of_batches(data)
    args = [*arguments(case, tmp_path), *case.flags]
    outcome = run_python(PROGRAM, str(data), str(tmp_path / "1.pt"), *args)
    assert outcome.code == 0, outcome.said
    alone = torch.load(tmp_path / "1.pt", weights_only=True)
    assert tuple(alone["windows"]) == case.windows
    for size in ranks:
        file = tmp_path / f"{size}.pt"
        outcome = torchrun(PROGRAM, str(data), str(file), *args, ranks=size)
        assert outcome.code == 0, outcome.said
        cut = torch.load(file, weights_only=True)
        print(f"{name}, {size} ranks: {compare(alone, cut)}")
    check_case(name, alone)


def check_case(name: str, alone: dict[str, Any]) -> None:
    """Whether the case was one: what it is named for has happened."""
    images = [tuple(images.shape) for images, _, _ in alone["seen"]]
    indices = [indices for _, indices, _ in alone["seen"]]
    if name == "empty-share":
        assert all(int(objects[8:].sum()) == 0 < int(objects[:8].sum()) for _, _, objects in alone["seen"])
    elif name == "partial-batch":
        assert len(indices[1].unique()) == BATCH and set(indices[1][4:].tolist()) <= set(indices[0].tolist())
    elif name == "rect":
        assert any(height != width for _, _, height, width in images)
    elif name == "image-weights":
        assert any(len(batch.unique()) < BATCH for batch in indices), "drawn with replacement"


def arguments(case: Case, folder: Path, batch: int = BATCH) -> list[str]:
    """Flags of all cases; writes the case's hyperparameters beside its data."""
    hyp = folder / "hyp.yaml"
    hyp.write_text(yaml.safe_dump({**load_hyp(TrainConfig.hyp).as_dict(), **case.hyp}))
    numbers = ["--imgsz", str(IMGSZ), "--batch", str(batch), "--workers", "1"]
    return [*numbers, "--device", "cpu", "--sync-bn", "--hyp", str(hyp)]


def blank_last_half_of_batches(data: Path) -> None:
    """Take the labels from images whose place in epoch 0 is in the last half of a batch."""
    index = build_index(load_spec(str(data)), "train")
    sampler = EpochSampler(len(index), BATCH, seed=0, imgsz=IMGSZ)
    order, _ = sampler.plan(0)
    for image in order.reshape(-1, BATCH)[:, BATCH // 2 :].flatten().tolist():
        path = index.path(image)
        label = path.parents[2] / "labels" / path.parent.name / f"{path.stem}.txt"
        assert label.is_file(), label
        label.write_text("")


def compare(first: dict[str, Any], second: dict[str, Any]) -> str:
    """Assert that two results of the program agree; say by how much."""
    for number, (mine, theirs) in enumerate(zip(first["seen"], second["seen"], strict=True)):
        for what, a, b in zip(("pixels", "indices", "objects"), mine, theirs, strict=True):
            assert torch.equal(a, b), f"batch {number}: {what} differ"
    words = []
    pairs = [*zip(first["states"], second["states"], strict=True), (first["ema"], second["ema"])]
    for mine, theirs in pairs:
        apart = {key: relative_difference(mine[key], theirs[key]) for key in mine}
        worst = max(apart, key=lambda key: apart[key])
        assert apart[worst] <= LIMIT, f"{worst}: {apart[worst]:.1e}"
        words.append(f"{apart[worst]:.1e} ({worst})")
    for mine, theirs in zip(first["losses"], second["losses"], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=LIMIT, atol=0)
    return "largest relative difference by step, and of the EMA: " + ", ".join(words)


def relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """max |a − b| / max |a|; 0 where both are all zero."""
    a, b = a.double(), b.double()
    apart = (a - b).abs().max().item()
    return apart / a.abs().max().item() if apart else 0.0
