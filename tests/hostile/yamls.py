"""Hostile dataset, hyperparameter and model YAMLs."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tessera.data.source.dataset_yaml import load_spec
from tessera.deploy.foreign import synthetic_shapes
from tessera.models.detector import DetectionModel
from tessera.utils.config import HYPS_DIR, load_hyp
from tessera.utils.environment import datasets_dir
from tessera.utils.flags.program import HOME
from tests.data.make import write_image
from tests.hostile.damages import named
from tests.hostile.expect import Message, message_or_result

CASES, FAST_CASES, TIME_LIMIT_S, MEMORY = 2000, 24, 60, 2**30

DATA = """\
path: {folder}/pets
train: images/train
val: [images/train, 'images/*.jpg']
nc: 2
names: {{0: cat, 1: dog}}
ignore: {{2: cow}}
download: https://127.0.0.1:9/pets.zip
"""


def prepare() -> None:
    """Keep what is generated small, and import what the readers import later."""
    synthetic_shapes.write_shapes = partial(synthetic_shapes.write_shapes, train=1, val=1)
    DetectionModel("yolov5n.yaml")


def trial(rng: random.Random, folder: Path) -> str:
    write_image(folder / "pets" / "images" / "train" / "a.jpg")
    subject, damage = rng.choice([*_SUBJECTS]), rng.choice([*_DAMAGES])
    text, read = _SUBJECTS[subject](folder)
    path = folder / "a.yaml"
    path.write_bytes(_DAMAGES[damage](rng, text).encode("utf-8", "surrogatepass"))
    before = _files(folder.parent)
    used = message_or_result(lambda: read(path))
    planted = [path for path in _files(folder.parent) - before if datasets_dir() not in (path, *path.parents)]
    assert not planted, f"{damage} in {subject} wrote {planted}"
    if damage in _ALWAYS_FOUND:
        assert isinstance(used, Message), f"{damage} in {subject} was read as {used}"
    return f"{subject}, {damage}"


def _files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.name not in ("printed", "failure", "kind")}


_SUBJECTS: dict[str, Callable[[Path], tuple[str, Callable[[Path], object]]]] = {
    "data": lambda folder: (DATA.format(folder=folder), load_spec),
    "hyp": lambda _: ((HYPS_DIR / "hyp.scratch-high.yaml").read_text(), load_hyp),
    "model": lambda _: ((HOME / "models" / "yolov5n.yaml").read_text(), DetectionModel),
}


def _characters(rng: random.Random, text: str) -> str:
    letters = list(text)
    for _ in range(rng.randint(1, 5)):
        at = rng.randrange(len(letters))
        letters[at : at + rng.randint(0, 2)] = rng.choice(
            "\0\x1b\x07\x9b\u2028\u202e\ufeff\ud800&*!|>%@`'\"{}[]:,#-? \t\n9e.~/"
        )
    return "".join(letters)


def _lines(rng: random.Random, text: str) -> str:
    lines = text.splitlines()
    for _ in range(rng.randint(1, 3)):
        one, other = rng.randrange(len(lines)), rng.randrange(len(lines))
        change = rng.choice(["out", "twice", "swap", "indent"])
        if change == "out" and len(lines) > 2:
            lines.pop(one)
        elif change == "twice":
            lines.insert(other, lines[one])
        elif change == "swap":
            lines[one], lines[other] = lines[other], lines[one]
        else:
            lines[one] = " " * rng.randint(1, 4) + lines[one]
    return "\n".join(lines) + "\n"


def _value(rng: random.Random, text: str) -> str:
    lines = text.splitlines()
    at = rng.choice([i for i, line in enumerate(lines) if ":" in line or "," in line])
    key = lines[at].partition(":")[0]
    odd = rng.choice(
        ["9" * rng.choice([20, 200, 6000]), "-1", "0", "1e999", "-.inf", ".nan", "~", "''", "[]", "{}", "true",
         "[[[]]]", "0x" + "f" * 5000, "1:" * 3000 + "1", "!!binary aaaa", "!!python/object/apply:os.system [id]",
         "2020-99-99", "!!set {a, b}", "!!omap [a: 1]", "~nobody-here/x", "/", "..", ".", "a" * 300, "b/" * 3000,
         "'" + "c" * 9999 + "'",
         '"\\0"', '"\\e[2J"', '"\\uD800"', '"\\u202e"', "&a [*a]", "*missing", "? [a]", "/proc/self/mem", "/dev/zero",
         "{url: 'http://[', into: /}", "http://\x9b/", "1e400", "1" + "0" * 150]
    )  # fmt: skip
    lines[at] = f"{key}: {odd}"
    return "\n".join(lines) + "\n"


def _planting(rng: random.Random, text: str) -> str:
    place = rng.choice(["{}/site-packages", "{}/datasets/../lib", "~/lib", "..", ".", "/tmp/planted-by-a-test"])
    folder = text.partition("path: ")[2].partition("/pets")[0] if "path: " in text else "/nowhere"
    rest = [line for line in text.splitlines() if not line.startswith(("path:", "download:"))]
    return "\n".join([f"path: {place.format(folder)}", "generate: shapes", *rest]) + "\n"


def _aliases(rng: random.Random, text: str) -> str:
    levels, width, merge = rng.randint(7, 40), rng.randint(8, 12), rng.random() < 0.5
    lines = ["a0: &a0 " + ("{x: 1}" if merge else "[x]")]
    for level in range(1, levels):
        below = ", ".join([f"*a{level - 1}"] * width)
        lines.append(f"a{level}: &a{level} " + (f"{{<<: [{below}]}}" if merge else f"[{below}]"))
    return "\n".join(lines) + "\n" + text


def _depth(rng: random.Random, text: str) -> str:
    depth = rng.choice([40, 500, 5000, 100_000])
    return text + rng.choice(["x: " + "[" * depth, "x: " + "{a: " * depth, "x:\n  " + "- " * depth, "? " * depth])


def _size(rng: random.Random, text: str) -> str:
    return text + rng.choice(["x: [" + "a, " * 10**6 + "]", "#" * (3 << 20), "x: '" + "a" * (3 << 20) + "'"])


_DAMAGES = {
    **named(_characters, _lines, _value, _planting, _aliases, _depth, _size),
    "bytes": lambda rng, _: rng.randbytes(rng.randint(0, 300)).decode("latin-1"),
}
_ALWAYS_FOUND = frozenset({"planting", "aliases", "depth", "size"})
