"""Fixtures of search tests."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A journal is flushed to the disk with each of its thousands of lines; here no power goes out."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
