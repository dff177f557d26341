"""What mattered in a search is told from what drifted along with it."""

from __future__ import annotations

import dataclasses

import numpy as np

from tessera.utils.search.knobs import FEWEST, knobs
from tessera.utils.search.table import Row
from tests.utils.search.searches import START

KEYS = ("lr0", "box", "cls", "obj", "scale", "translate", "hsv_h", "hsv_s", "hsv_v", "mosaic")


def rows(rng: np.random.Generator, trials: int = 40, effect: float = 1.0, drift: float = 1.0) -> list[Row]:
    """Trials that get better, and whose values all rise meanwhile; of a set only lr0 and cls have an effect."""
    found = []
    for number in range(trials):
        values = {key: 0.4 + 0.1 * drift * number / trials + 0.05 * rng.normal() for key in KEYS}
        worth = drift * number / trials + 10 * effect * (values["lr0"] - values["cls"]) + 0.2 * rng.normal()
        row = Row(number, "measured", worth, (), dataclasses.replace(START, **values))
        found.append(row if worth > 0 else row._replace(end="pruned", objective=worth + 5))
    return found


def test_what_mattered_is_found_with_its_sign() -> None:
    found = knobs(rows(np.random.default_rng(0), 80))
    assert found is not None and {knob.name for knob in found[:2]} == {"lr0", "cls"}
    assert all((knob.correlation > 0) == (knob.name == "lr0") for knob in found[:2])


def test_what_drifts_along_with_a_search_is_seldom_named() -> None:
    named = [bool(knobs(rows(np.random.default_rng(seed), effect=0.0))) for seed in range(100)]
    assert sum(named) <= 12, "5 %, and three standard deviations of what a hundred searches show"


def test_few_trials_tell_nothing() -> None:
    assert knobs(rows(np.random.default_rng(0), FEWEST - 1)) is None
    assert knobs([Row(number, "measured", 0.1, (), START) for number in range(20)]) is None
