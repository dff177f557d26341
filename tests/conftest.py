"""Fixtures for all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder with reference values, real images and an official checkpoint; skips where it does not exist."""
    if not SHARED.is_dir():
        pytest.skip(f"needs the folder of reference data {SHARED}, which is not here")
    return SHARED


@pytest.fixture(autouse=True)
def private_folders(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep caches and datasets of a test inside its own folder; all tests share matplotlib's list of fonts."""
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path_factory.getbasetemp() / "matplotlib"))
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TESSERA_DATASETS", str(tmp_path / "datasets"))
