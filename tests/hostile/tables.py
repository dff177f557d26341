"""Hostile results.csv at a resume: damaged, foreign, or a special file."""

from __future__ import annotations

import random
from pathlib import Path

from tessera.analysis.charts import read_results
from tessera.utils.report.results_csv import ResultsTable
from tests.hostile.damages import cut, flipped, left_out, named, repeated, zeroed
from tests.hostile.expect import Message, message_or_result
from tests.hostile.images import make_special

CASES, FAST_CASES = 2000, 20
TIME_LIMIT_S = 20

LOSSES = ("box", "obj", "cls")
_CELLS = (
    *("", "nan", "1e999", "-1", "9" * 6000, "\0", "\x1b[2J", '"', "\u202e", "\ufeff"),
    *('"' + "x" * 200_000, "x" * 200_000),
)


def trial(rng: random.Random, folder: Path) -> str:
    path = folder / "results.csv"
    table = ResultsTable(path, LOSSES)
    for epoch in range(3):
        table.append({column: float(epoch) if column == "epoch" else rng.random() for column in table.columns})
    kind = rng.choice([*_DAMAGES, "special file"])
    if kind == "special file":
        path.unlink()
        make_special(path, rng)
    else:
        path.write_bytes(_DAMAGES[kind](rng, path.read_bytes()))
    message_or_result(lambda: read_results(path))
    opened = message_or_result(lambda: ResultsTable(path, LOSSES, start_epoch=2))
    if not isinstance(opened, Message):
        assert all(epoch < 2 for epoch in read_results(path)["epoch"])
    return kind


def binary(rng: random.Random, _: bytes) -> bytes:
    return rng.randbytes(rng.randrange(5000)) + b"\n" + rng.randbytes(rng.randrange(200)) + b"\n"


def other_cell(rng: random.Random, raw: bytes) -> bytes:
    lines = [line.split(",") for line in raw.decode().splitlines()]
    cells = rng.choice(lines)
    cells[rng.randrange(len(cells))] = rng.choice(_CELLS)
    return "".join(",".join(cells) + "\n" for cells in lines).encode("utf-8", "surrogatepass")


_DAMAGES = named(binary, other_cell, cut, flipped, left_out, repeated, zeroed)
