"""Missing, surplus and impossible tensors in files of YOLOX and YOLOv9: one message each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tessera.utils.checkpoints.weights import load_weights, model_of_weights
from tests.deploy.foreign.made import LAST, MIDDLE, STEM, Tensors, refusal, renamed, save, v9_t, with_at

V9_MIDDLE = "12.conv2.0.bottleneck.0.conv1.conv1.conv.weight"
BINS = "22.heads.0.anc2vec.anc2vec.weight"


def without(name: str) -> Callable[[Tensors], object]:
    return lambda t: t.pop(name)


def put(name: str, make: Callable[[Tensor], Any]) -> Callable[[Tensors], object]:
    """A change of one tensor."""
    return lambda t: t.update({name: make(t.get(name, torch.zeros(1)))})


def classes(nc: int) -> Callable[[Tensors], object]:
    """`nc` classes of one number each"""
    return put(LAST, lambda _: torch.zeros(nc, 1, 1, 1))


# What is done to the tensors of a sound file, and words of the message.
YOLOX: dict[str, tuple[Callable[[Tensors], object], tuple[str, ...]]] = {
    "a tensor in the middle is missing": (
        without(MIDDLE),
        ("YOLOX", "model.6.m.0.cv1.conv.weight is not in the checkpoint", "train from it"),
    ),
    "a tensor of which the size is read is missing": (without(LAST), (f"unsupported YOLOX file: it has no {LAST}",)),
    "one tensor more": (put("head.masks.0.weight", lambda x: x), ("'head.masks.0.weight' has no place in YOLOX",)),
    "a name that a terminal obeys": (put("head.\x1b[2J" + "x" * 5000, lambda x: x), (r"\x1b[2J", "has no place")),
    "a first convolution without the four pixels": (put(STEM, lambda x: x[:, :3].clone()), (STEM, "12 input channels")),
    "an image of one channel": (put(STEM, lambda x: x[:, ::3].clone()), (STEM, "(8, 4, 3, 3)", "for RGB")),
    "a first convolution of five sides": (put(STEM, lambda x: x[..., None]), (STEM, "(8, 12, 3, 3, 1)", "4 non-empty")),
    "five sides in the middle": (put(MIDDLE, lambda x: x[..., None]), ("YOLOX", "(32, 32, 1, 1, 1)")),
    "a tensor without a number": (put(MIDDLE, lambda x: x[:0].clone()), ("in the checkpoint (0, 32, 1, 1)",)),
    "no channels": (put(STEM, lambda x: x[:0].clone()), (STEM, "(0, 12, 3, 3)")),
    "one number for all": (
        put(MIDDLE, lambda x: torch.zeros(1, 1, 1, 1).expand(x.shape)),
        ("damaged", "(32, 32, 1, 1)", "1 elements"),
    ),
    "tensors over each other": (
        lambda t: t.update(dict.fromkeys([n for n in t if t[n].ndim == 4][9:90], torch.zeros(400_000))),
        ("YOLOX", "share their storages"),
    ),
    "not a number": (put(MIDDLE, lambda x: with_at(x, float("nan"))), ("YOLOX", MIDDLE, "not finite")),
    "infinite": (put(LAST, lambda x: with_at(x, -float("inf"))), ("YOLOX", LAST, "not finite")),
    "a variance below 0": (
        lambda t: t.update({n: -x for n, x in t.items() if n.endswith("running_var")}),
        ("YOLOX", "variance below 0"),
    ),
    "beyond float32": (put(LAST, lambda x: with_at(x.double(), 1e300)), ("YOLOX", LAST, "not finite")),
    "whole numbers": (put(MIDDLE, lambda x: x.to(torch.int32)), (MIDDLE, "int32", "floating point")),
    "truth values": (put(MIDDLE, lambda x: x > 0), (MIDDLE, "bool", "floating point")),
    "complex numbers": (put(MIDDLE, lambda x: x.to(torch.complex64)), ("ComplexFloatStorage", "no checkpoint needs")),
    "no class": (classes(0), (LAST, "(0, 1, 1, 1)")),
    "a million classes of no width": (classes(10**6), (LAST, "(1000000, 1, 1, 1)", "(1000000, 32, 1, 1)")),
    "a width that the deep layers do not have": (
        put(STEM, lambda _: torch.zeros(4000, 12, 3, 3)),
        ("dark5.0.conv.weight", "(64000, 32000, 3, 3)"),
    ),
    "bottlenecks without an end": (
        lambda t: t.update({f"backbone.backbone.dark2.1.m.{i}.conv1.conv.weight": torch.zeros(1) for i in range(900)}),
        ("first stage", "at most 11"),
    ),
    "bottlenecks with a gap": (
        put("backbone.backbone.dark2.1.m.7.conv1.conv.weight", lambda x: x),
        ("first stage has the bottlenecks 0, 7",),
    ),
    "one depth-wise convolution": (
        lambda t: renamed("backbone.bu_conv2.conv", "backbone.bu_conv2.dconv.conv")(t),
        ("model.18.conv.weight is not in the checkpoint", "model.18.dconv.conv.weight of the checkpoint has no"),
    ),
    "of both families": (put("22.heads.0.class_conv.0.conv.weight", lambda x: x), ("has no place in YOLOX",)),
    "more tensors than any model": (
        lambda t: t.update({f"{i}": t[LAST] for i in range(100_000)}),
        ("YOLOX", "tensors, more than any model"),
    ),
}
YOLOV9: dict[str, tuple[Callable[[Tensors], object], tuple[str, ...]]] = {
    "a tensor in the middle is missing": (without(V9_MIDDLE), ("YOLOv9", "model.12.cv2.0.m.0.cv1.cv1.conv.weight")),
    "a tensor of which the size is read is missing": (without("0.conv.weight"), ("it has no 0.conv.weight",)),
    "one tensor more": (put("12.conv9.weight", lambda x: x), ("YOLOv9", "model.12.conv9.weight", "has no place")),
    "a name that a terminal obeys": (put("12.\x1b[2J" + "x" * 5000, lambda x: x), ("YOLOv9", r"\x1b[2J")),
    "a name without a layer": (put("hat.weight", lambda x: x), ("'hat.weight' has no place in YOLOv9",)),
    "other distances": (put(BINS, lambda x: x * 2), (BINS, "not 0, 1, 2")),
    "a stem of another size": (
        put("0.conv.weight", lambda _: torch.zeros(24, 3, 3, 3)),
        ("24 channels", "16 (YOLOv9-t)"),
    ),
    "bins that no side has": (put("22.heads.0.anchor_conv.2.weight", lambda x: x[:63]), ("63 channels", "4 to 256")),
    "a million classes of no width": (
        put("22.heads.0.class_conv.2.weight", lambda _: torch.zeros(10**6, 1, 1, 1)),
        ("(1000000, 1, 1, 1)", "(1000000, 128, 1, 1)"),
    ),
    "a width that the next layer does not have": (
        put("22.heads.0.class_conv.0.conv.weight", lambda _: torch.zeros(9000, 64, 1, 1)),
        ("22.heads.0.class_conv.1.conv.weight", "(9000, 9000, 3, 3)"),
    ),
}


@pytest.fixture(scope="module")
def nine(shared: Path) -> Tensors:
    return v9_t(shared)


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("case", YOLOX)
def test_invalid_tensors_of_yolox(case: str, small: Tensors, tmp_path: Path) -> None:
    change, words = YOLOX[case]
    change(tensors := dict(small))
    text = refusal(save(tmp_path / "yolox_s.pth", {"model": tensors}))
    assert all(word in text for word in words), text


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("case", YOLOV9)
def test_invalid_tensors_of_yolov9(case: str, nine: Tensors, tmp_path: Path) -> None:
    change, words = YOLOV9[case]
    change(tensors := dict(nine))
    text = refusal(save(tmp_path / "v9-t.pt", tensors))
    assert all(word in text for word in words), text


def test_counters_of_any_type_are_accepted(small: Tensors, tmp_path: Path) -> None:
    """Some writers make all of a model floats, or its counters 32 bits long; nothing is computed with them."""
    changed = {n: x.float() if n.endswith("num_batches_tracked") else x for n, x in small.items()}
    model_of_weights(load_weights(save(tmp_path / "yolox.pth", {"model": changed})), "given")


def test_keys_that_are_not_text_are_ignored(small: Tensors, tmp_path: Path) -> None:
    others: dict[Any, Any] = {1: torch.zeros(3), None: torch.zeros(3), 2.5: "x"}
    path = save(tmp_path / "yolox.pth", {"model": {**small, **others}})
    assert load_weights(path).family == "YOLOX"
    path = save(tmp_path / "numbers.pth", {"model": dict(enumerate(small.values()))})
    assert "found a dictionary with 'model'" in refusal(path)
