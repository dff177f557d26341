"""Hostile exported files: damaged, with false metadata, or with predictions of another shape, type or size.

Files that run code are the subject of tests/deploy/runtime/test_runtimes.py.
"""

from __future__ import annotations

import functools
import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tessera.deploy.foreign.safetensors_file import save_safetensors
from tessera.deploy.inference.detector import Detector
from tessera.utils.checkpoints.format import load_any_checkpoint, save_checkpoint
from tessera.utils.checkpoints.weights import load_weights
from tests.deploy.exporting.made import ANCHORED, checkpoint
from tests.deploy.runtime.made_files import (
    ANSWER,
    ROWS,
    STRINGS,
    WHOLE_STRINGS,
    write_answer,
    write_onnx,
    write_openvino,
    write_rows,
    write_torchscript,
)
from tests.hostile.damages import cut, flipped, left_out, named, repeated, zeroed
from tests.hostile.expect import Message, message_or_result

CASES, FAST_CASES, TIME_LIMIT_S, MEMORY = 800, 16, 120, 3 * 2**30

FIXED = {**STRINGS, "size_hw": "[64, 64]"}
IMAGE = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)


def prepare() -> None:
    """Make the good files once, before the first case is forked. No runtime computes here: its threads do not fork."""
    torch.set_num_threads(1)
    good()


@functools.cache
def good() -> dict[str, dict[str, bytes]]:
    """Every file of each good export by its name; the first is the one that is given as --weights."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        weights = load_weights(checkpoint(folder / "best.pt", ANCHORED))
        save_safetensors(folder / "best.safetensors", weights, {})
        write_answer(folder / "whole.onnx", ANSWER)
        write_onnx(folder / "raw.onnx", FIXED)
        write_openvino(folder / "raw.xml", FIXED)
        write_torchscript(folder / "raw.torchscript", FIXED)
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
    found = {name: {name: content} for name, content in files.items() if not name.endswith(".bin")}
    found["raw.xml"]["raw.bin"] = files["raw.bin"]
    return found


def trial(rng: random.Random, folder: Path) -> str:
    damage, trusted = rng.choice([*_DAMAGES]), rng.random() < 0.7
    path = _DAMAGES[damage](rng, folder)
    before = sorted(folder.iterdir())
    used = message_or_result(lambda: find(path, trusted))
    assert sorted(folder.iterdir()) == before, "something was left behind"
    refused = path.suffix == ".torchscript" and not trusted
    assert isinstance(used, Message) or not refused, f"{damage}: used, and nothing was reported"
    return f"{damage}, {path.suffix[1:]}{' not trusted' if refused else ''}"


def find(path: Path, trusted: bool) -> int:
    """What detect.py does with a file; what it finds is what a detector can have found."""
    (result,) = Detector(path, trust_file=trusted, conf_thres=0.1, device="cpu")(IMAGE)
    boxes, scores, classes = result.boxes_xyxy, result.scores, result.classes
    assert boxes.shape == (len(scores), 4) and scores.shape == classes.shape
    assert np.isfinite(boxes).all() and np.isfinite(scores).all()
    assert ((classes >= 0) & (classes < len(result.names))).all()
    assert [box.name for box in result] == [result.names[number] for number in classes]
    return len(scores)


def _put(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder / next(iter(files))


def _bytes(rng: random.Random, folder: Path) -> Path:
    """Bits flipped, bytes overwritten, a part zeroed, left out or repeated, the end cut off: of any of its files."""
    files = dict(good()[rng.choice([*good()])])
    name = rng.choice([*files])
    damage = rng.choice((flipped, overwritten, zeroed, left_out, repeated, cut))
    return _put(folder, {**files, name: damage(rng, files[name])})


def overwritten(rng: random.Random, raw: bytes) -> bytes:
    """A few bytes are 0, 1, 127, 128 or 255."""
    content = bytearray(raw)
    for _ in range(rng.randint(1, 8)):
        content[rng.randrange(len(content))] = rng.choice((0, 1, 127, 128, 255))
    return bytes(content)


_WORDS = (
    *("", "null", "NaN", "-1", "0", "1", "7", "64", "1e9", "1000000000", "1e999", "9" * 5000, "true", "[]", "{}", '""'),
    *('"text"', "[1, 2, 3]", '["a", "a", "a"]', '["a"]', '["a\\u001b[31m", "b", "c"]', "[NaN, NaN, NaN]", "[" * 50_000),
    *('{"0": "a", "1": "b"}', "[64, 64]", "[64]", "[0, 0]", "[-64, 64]", '["\\ud800", "b", "c"]', "[[], [], []]"),
    *(json.dumps(["x" * 100_000, "b", "c"]), json.dumps([str(number) for number in range(30_000)]), "\x1b[2J"),
    *('{"range": [0, 4095]}', '{"range": [0, NaN]}', '{"percentile": [5]}', "tessera-detector 1", "tessera-network 9"),
    *("tessera-network " + "9" * 5000, "x" * 100_000),
)
_KEYS = ("format", "names", "imgsz", "stride", "size_hw", "end2end", "conf", "conf_per_class", "pixels", "data")


def _description(rng: random.Random, folder: Path) -> Path:
    change = {rng.choice(_KEYS): rng.choice(_WORDS) for _ in range(rng.randint(1, 3))}
    lost = rng.choice(_KEYS) if rng.random() < 0.2 else ""

    def strings(of: dict[str, str]) -> dict[str, str]:
        return {key: value for key, value in {**of, **change}.items() if key != lost}

    match rng.randrange(5):
        case 0:
            return write_onnx(folder / "best.onnx", strings(FIXED))
        case 1 if not any("\x1b" in value or "\x00" in value for value in change.values()):  # no XML holds them
            path = write_openvino(folder / "best.xml", strings(FIXED))
            (folder / "best.onnx").unlink()
            return path
        case 2:
            return write_torchscript(folder / "best.torchscript", strings(FIXED))
        case 3:
            return write_rows(folder / "best.onnx", ROWS, strings(FIXED))
        case _:
            return write_answer(folder / "best.onnx", ANSWER, strings(WHOLE_STRINGS))


_ODD = (float("nan"), float("inf"), -float("inf"), 1e38, -1e38, -3.0, 999.0, 0.5, 1e9, 65.0, -0.0)


def _odd_array(rng: random.Random, value: NDArray[Any]) -> NDArray[Any]:
    changes: tuple[Callable[[], NDArray[Any]], ...] = (
        *(lambda: value[..., :0], lambda: value[:0], lambda: value[..., None], lambda: value.reshape(-1)),
        *(lambda: value.repeat(rng.choice((2, 3)), rng.randrange(value.ndim)), lambda: value[0], lambda: value.T),
        *(lambda: value.astype(np.int32), lambda: value.astype(np.float64), lambda: value.astype(bool)),
        *(lambda: value.astype(str).astype(object), lambda: value.astype(np.float16), lambda: value[::-1]),
    )
    if rng.random() < 0.5:
        return rng.choice(changes)()
    changed = value.astype(np.float32) if rng.random() < 0.8 else value.copy()
    for _ in range(rng.randint(1, 3)):
        odd = rng.choice(_ODD)
        if changed.dtype.kind == "f" or abs(odd) < 2**62:
            changed.flat[rng.randrange(changed.size)] = odd
    return changed


def _answer(rng: random.Random, folder: Path) -> Path:
    """What a whole detector finds has another shape, type or number."""
    answer: dict[str, NDArray[Any]] = dict(ANSWER)
    for _ in range(rng.randint(1, 2)):
        name = rng.choice([*ANSWER])
        answer[name] = _odd_array(rng, ANSWER[name])
    if rng.random() < 0.1:
        answer[rng.choice(("count", "box"))] = answer.pop(rng.choice([*ANSWER]))
    return write_answer(folder / "best.onnx", answer)


def _rows(rng: random.Random, folder: Path) -> Path:
    """What a bare network computes has another shape, type or number."""
    batch = rng.choice(("batch", "batch", 1, 2, 0, 10**9))
    return write_rows(folder / "best.onnx", _odd_array(rng, ROWS), batch=batch)


def _huge_weights(rng: random.Random, folder: Path) -> Path:
    """A checkpoint whose numbers are all finite, and what it computes is not."""
    path = _put(folder, good()["best.pt"])
    state = load_any_checkpoint(path)
    tensors = {name: tensor.clone() for name, tensor in state["ema"].items()}
    for name in rng.sample([name for name, tensor in tensors.items() if tensor.is_floating_point()], rng.randint(1, 8)):
        factor = rng.choice((1e10, 1e20, 1e30, -1e30, 0.0))
        tensors[name] = (tensors[name] * factor).clamp(-3e38, 3e38)
    save_checkpoint(path, {**state, "ema": tensors})
    return path


_DAMAGES = named(_bytes, _description, _answer, _rows, _huge_weights)
