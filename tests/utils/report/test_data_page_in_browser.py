"""data_report.html in a browser without a network: silent, and legible for everyone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tessera.data.source.checks.report import DatasetCheck
from tessera.utils.report.albums.data_page import data_page
from tessera.utils.types import DatasetSpec
from tests.browser import NODE_MODULES, Tab, opened
from tests.utils.report.test_data_page import made_check
from tests.utils.report.test_page import HOSTILE

pytestmark = pytest.mark.slow


def data(folder: Path) -> str:
    """A page of many findings."""
    check: DatasetCheck = made_check(folder / "pictures", 6, HOSTILE)
    return data_page(check, DatasetSpec("made", folder / "made.yaml", folder, {}, ()))


@pytest.fixture
def tab(tmp_path: Path) -> Iterator[Tab]:
    """The page; it may not have said or asked for anything when a test ends."""
    (tmp_path / "page.html").write_text(data(tmp_path))
    with opened(tmp_path / "page.html") as tab:
        yield tab
        assert tab.said == [] and tab.requested == []


def test_it_fits_every_window_and_axe_finds_nothing(tab: Tab) -> None:
    assert tab.run("document.querySelectorAll('script').length") == 1
    axe = NODE_MODULES / "axe-core" / "axe.min.js"
    if axe.is_file():
        tab.run(f"{axe.read_text()};0")
    for width in (1280, 390):
        for dark in (False, True):
            tab.resize(width, dark=dark)
            assert tab.run("document.documentElement.scrollWidth") <= width
            if axe.is_file():
                found: dict[str, Any] = tab.run(
                    "axe.run().then(r => ({violations: r.violations.map(v => "
                    "[v.id, v.nodes[0].html, v.nodes[0].failureSummary])}))"
                )
                assert found["violations"] == []
