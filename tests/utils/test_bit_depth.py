"""Levels of more than 8 bits become 8 by one rule, stated in a YAML or a checkpoint."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.utils.bit_depth import PixelRule, to_uint8
from tessera.utils.errors import ConfigError


def test_bytes_stay_the_very_array() -> None:
    levels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    assert to_uint8(levels) is levels
    assert to_uint8(levels, PixelRule("range", 0, 10)) is levels


def test_without_a_rule() -> None:
    assert to_uint8(np.array([0, 255, 256, 4095, 65535], np.uint16)).tolist() == [0, 0, 1, 15, 255]
    floats = np.array([0, 0.5, 1, 2, -1, np.nan, np.inf, -np.inf])
    assert to_uint8(floats).tolist() == [0, 128, 255, 255, 0, 0, 255, 0]
    assert to_uint8(floats.astype(np.float16)).tolist() == to_uint8(floats.astype(np.float32)).tolist()


@given(low=st.integers(0, 60000), span=st.integers(1, 65535), level=st.integers(0, 65535))
def test_a_range_is_linear_and_cut(low: int, span: int, level: int) -> None:
    rule = PixelRule("range", low, low + span)
    exact = min(max((level - low) / span, 0), 1) * 255
    for dtype in (np.uint16, np.float32):
        (found,) = to_uint8(np.array([level], dtype), rule).tolist()
        assert abs(found - exact) <= 0.501


def test_percentiles_are_each_picture_s_own() -> None:
    ramp = np.linspace(0, 1000, 1001).astype(np.uint16)
    rule = PixelRule("percentile", 10, 90)
    found = to_uint8(ramp, rule)
    assert found[:101].max() == 0 and found[900:].min() == 255 and abs(int(found[500]) - 128) <= 1
    assert (to_uint8(ramp * 2, rule) == found).all()
    assert (to_uint8(np.full((4, 4), 77, np.uint16), rule) == 0).all()
    assert (to_uint8(np.full((4, 4), np.nan, np.float32), rule) == 0).all()


@pytest.mark.parametrize(
    "value", [{"range": [0, 4095]}, {"percentile": [1, 99.5]}, {"range": [-1.5, 2]}, {"percentile": [0, 100]}]
)
def test_plain_form_there_and_back(value: dict[str, Any]) -> None:
    rule = PixelRule.from_plain(value, "here")
    assert rule is not None and rule.as_dict() == value and PixelRule.from_plain(rule.as_dict(), "here") == rule
    assert PixelRule.from_plain(None, "here") is None


@pytest.mark.parametrize(
    "value",
    [
        *("range", 4095, [], [0, 4095], {}, {"range": 4095}, {"range": [4095]}, {"range": [0, 1, 2]}, {"rang": [0, 1]}),
        *({"range": [1, 1]}, {"range": [2, 1]}, {"range": [0, "a"]}, {"range": [0, float("nan")]}),
        *({"percentile": [-1, 50]}, {"percentile": [1, 101]}, {"range": [0, 1], "percentile": [0, 1]}, {1: [0, 1]}),
        {"range": [False, True]},
    ],
)
def test_what_is_no_rule(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^a\.yaml:3: pixels: found .*, expected \{range: \[0, 4095\]\}"):
        PixelRule.from_plain(value, "a.yaml:3: pixels")
