"""Versions that are found and needed, in messages."""

from __future__ import annotations

import re

import pytest

from tessera.utils.machine import extras
from tessera.utils.machine.extras import version_of


def test_a_version_is_given_with_those_that_are_needed() -> None:
    """They are declared in pyproject.toml alone."""
    assert re.fullmatch(r"numpy [\d.]+, needed <\d+,>=\S+", version_of("numpy"))
    assert re.fullmatch(r"onnx-ir [\d.]+, needed >=\S+|onnx-ir is not installed, needed >=\S+", version_of("onnx-ir"))
    assert re.fullmatch(r"pytest [\d.]+", version_of("pytest"))
    assert version_of("no-such-package") == "no-such-package is not installed"


@pytest.mark.parametrize("is_clone", [True, False])
def test_an_extra_adds_its_bounds_to_those_of_the_core(monkeypatch: pytest.MonkeyPatch, is_clone: bool) -> None:
    """An installed program knows both by its metadata."""
    declared = ["torch<2.15,>=2.6", 'onnx>=1.17; extra == "export"', "Some.Name", "torch>=2.14.1; extra == 'litert'"]
    if not is_clone:
        monkeypatch.setattr(extras, "IS_CLONE", False)
        monkeypatch.setattr(extras, "distribution", lambda: "tessera-detect")
        monkeypatch.setattr(extras.metadata, "requires", {"tessera-detect": declared}.__getitem__)
        monkeypatch.setattr(extras, "_requirements", extras._requirements.__wrapped__)
    assert [str(extras._needed("torch", extra)) for extra in ("", "export")] == ["<2.15,>=2.6"] * 2
    assert str(extras._needed("torch", "litert")) == "<2.15,>=2.14.1,>=2.6"
    assert str(extras._needed("onnx", "")) == ">=1.17" and str(extras._needed("Some.Name", "")) == ""
