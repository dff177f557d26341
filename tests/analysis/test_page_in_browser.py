"""report.html in a browser without a network: silent, usable, and legible for everyone."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tessera.analysis.report.data_page import data_page
from tessera.analysis.report.page import page
from tessera.analysis.report.page_data import ReportData
from tessera.analysis.report.validation_report import label_errors_page
from tessera.utils.types import DatasetSpec
from tests.analysis.made_page import HOSTILE, made_report_data, trained
from tests.analysis.test_image_pages import ORIGIN, made_check, made_label_errors
from tests.browser import NODE_MODULES, Tab, opened

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> ReportData:
    """A training whose classes have hostile names."""
    folder = tmp_path_factory.mktemp("run")
    made = trained(made_report_data(folder, [*HOSTILE, "empty"], images=30), [0.1, 0.2, float("nan"), 0.4, 0.3])
    (folder / "report.html").write_text(page(made))
    return made


@pytest.fixture
def tab(facts: ReportData) -> Iterator[Tab]:
    """The page; it may not have said or asked for anything when a test ends."""
    with opened(facts.run / "report.html") as tab:
        yield tab
        assert tab.said == [] and tab.requested == []


def listed(tab: Tab, which: str = "") -> list[dict[str, str]]:
    """What the errors of the gallery say of themselves."""
    found: list[dict[str, str]] = tab.run(
        f"[...document.querySelectorAll('.gallery li{which}')].map(e => ({{...e.dataset}}))"
    )
    return found


def shown(tab: Tab) -> list[dict[str, str]]:
    """Those that are shown."""
    return listed(tab, ":not([hidden])")


def texts(tab: Tab, query: str) -> list[str]:
    """The texts that a query selects."""
    found: list[str] = tab.run(f"[...document.querySelectorAll({query!r})].map(e => e.textContent)")
    return found


def test_it_is_dark_where_that_is_wanted_and_prints_light_without_controls(tab: Tab) -> None:
    levels = []
    for dark in (False, True):
        tab.resize(768, dark=dark)
        levels.append(np.asarray(Image.open(io.BytesIO(tab.image())).convert("L"), float).mean())
    assert levels[0] > 200 and levels[1] < 60
    dark = {"name": "prefers-color-scheme", "value": "dark"}
    tab.ask("Emulation.setEmulatedMedia", media="print", features=[dark])
    assert tab.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert tab.run("[...document.querySelectorAll('nav, .controls')].every(e => e.offsetHeight === 0)")


def test_1203_classes_fit(tmp_path: Path) -> None:
    made = trained(made_report_data(tmp_path, [f"{i} {'wide ' * 12}" for i in range(1203)], images=100), [0.1, 0.2])
    (tmp_path / "report.html").write_text(page(made))
    with opened(tmp_path / "report.html") as tab:
        for width in (1280, 390):
            tab.resize(width)
            assert tab.run("document.documentElement.scrollWidth") <= width
        assert len(texts(tab, "#classes tbody th")) == len(made.found.metrics.class_ids) > 100
        assert tab.run("document.querySelector('[data-group]').length") == 81
        assert tab.said == [] and tab.requested == []


def test_a_click_on_the_matrix_leads_to_its_images(tab: Tab, facts: ReportData) -> None:
    cells = tab.run("[...document.querySelectorAll('button[data-pair]')].map(e => [e.dataset.pair, +e.textContent])")
    everything, first = listed(tab), shown(tab)
    assert len(cells) > 5 and first == everything[:24]
    for pair, count in cells:
        tab.run(f"document.querySelector('button[data-pair=\"{pair}\"]').click()")
        own = [error for error in everything if error["pair"] == pair]
        assert shown(tab) == own[:24] and 0 < len(own) <= count
        assert texts(tab, "[data-filters] output") == [f"{min(len(own), 24)} of {len(own)} shown"]
    assert tab.run("document.activeElement.textContent") == "The worst errors"
    tab.run("document.querySelector('[data-clear]').click()")
    assert shown(tab) == first


def test_the_gallery_shows_more_on_demand(tab: Tab) -> None:
    count, more = len(listed(tab)), "document.querySelector('[data-more]')"
    assert count > 48 and len(shown(tab)) == 24
    for expected in [*range(48, count, 24), count]:
        assert not tab.run(f"{more}.hidden")
        tab.run(f"{more}.click()")
        assert len(shown(tab)) == expected
        assert texts(tab, "[data-filters] output") == [f"{expected} of {count} shown"]
    assert tab.run(f"{more}.hidden")
    tab.run("document.querySelector('[data-clear]').click()")
    assert len(shown(tab)) == 24


def test_filters_join(tab: Tab) -> None:
    def choose(name: str, value: str) -> None:
        tab.run(
            f"(e => {{ e.value = {value!r}; e.dispatchEvent(new Event('input')); }})"
            f"(document.querySelector('[data-filter={name}]'))"
        )

    everything = listed(tab)
    wanted = next(error for error in everything if error["kind"] == "background")
    choose("kind", "background")
    choose("size", wanted["size"])
    choose("image", wanted["image"].upper())
    expected = [error for error in everything if all(error[key] == wanted[key] for key in ("kind", "size", "image"))]
    assert shown(tab) == expected and len(expected) < len(everything)


def test_the_slider_changes_the_figures_and_the_best_is_named(tab: Tab, facts: ReportData) -> None:
    def figures() -> dict[str, str]:
        found: dict[str, str] = tab.run(
            "Object.fromEntries([...document.querySelectorAll('[data-out]')].map(e => [e.dataset.out, e.textContent]))"
        )
        return found

    metrics = facts.found.metrics
    best = figures()
    assert best["note"] == "the best" and best["confidence"] == f"{metrics.confidence:.3f}"
    assert best["p"] == f"{metrics.precision:.3f}" and best["r"] == f"{metrics.recall:.3f}"
    move = "(e => { e.value = %s; e.dispatchEvent(new Event('input')); })(document.querySelector('[data-step]'))"
    tab.run(move % 0)
    lowest = figures()
    assert lowest["confidence"] == "0.000" and float(lowest["r"]) > float(best["r"])
    assert lowest["note"] == f"the best is {metrics.confidence:.3f}" and lowest["counts"] != best["counts"]
    tab.run("document.querySelector('[data-best]').click()")
    assert figures() == best
    tab.run("(e => { e.value = 1; e.dispatchEvent(new Event('change')); })(document.querySelector('[data-group]'))")
    first = int(metrics.class_ids[0])
    assert figures()["confidence"] == f"{metrics.class_confidences[first]:.3f}"


def test_a_heading_sorts(tab: Tab) -> None:
    def column(number: int) -> list[str]:
        return texts(tab, f"#classes tbody tr > :nth-child({number + 1})")

    rows = texts(tab, "#classes tbody th")
    assert rows[0] == HOSTILE[0] and HOSTILE[2] in rows and "\\u202eright to left" in rows, "names are text"
    headings = texts(tab, "#classes thead th")
    number = headings.index("Objects")
    click = f"document.querySelectorAll('#classes thead button')[{number}].click()"
    tab.run(click)
    assert [int(text) for text in column(number)] == sorted(map(int, column(number)), reverse=True)
    tab.run(click)
    assert [int(text) for text in column(number)] == sorted(map(int, column(number)))
    sorts = tab.run("[...document.querySelectorAll('#classes th[aria-sort]')].map(e => e.getAttribute('aria-sort'))")
    assert sorts.count("none") == len(headings) - 1 and sorts[number] == "ascending"


def test_charts_show_values_by_keys(tab: Tab) -> None:
    key = (
        "(e => { e.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowLeft'})); "
        "return e.nextElementSibling.querySelector('output').textContent; })(document.querySelector('[data-chart]'))"
    )
    assert tab.run(key) == "epoch 4: mAP50-95 0.3, mAP50 0.5"
    assert tab.run(key) == "epoch 3: mAP50-95 0.4, mAP50 0.5"
    assert tab.run(key) == "epoch 2: mAP50-95 –, mAP50 0.5"


@pytest.mark.parametrize("name", ["report", "data", "suspects"])
def test_every_page_fits_and_axe_finds_nothing(name: str, facts: ReportData, tmp_path: Path) -> None:
    made = {
        "report": lambda: page(facts),
        "data": lambda: data_page(
            made_check(tmp_path / "images", 6, HOSTILE), DatasetSpec("made", tmp_path / "made.yaml", tmp_path, {}, ())
        ),
        "suspects": lambda: label_errors_page("run", *made_label_errors(tmp_path, 200), ORIGIN, 0.9),
    }
    (tmp_path / "page.html").write_text(made[name]())
    axe = NODE_MODULES / "axe-core" / "axe.min.js"
    with opened(tmp_path / "page.html") as tab:
        tab.run("document.querySelectorAll('details').forEach(e => { e.open = true; })")
        for width in (1280, 390):
            for dark in (False, True):
                tab.resize(width, dark=dark)
                assert tab.run("document.documentElement.scrollWidth") <= width
                if axe.is_file():  # .ci/run installs it where it can
                    tab.run(f"{axe.read_text()};0")
                    found: dict[str, Any] = tab.run(
                        "axe.run().then(r => ({passed: r.passes.length, violations: r.violations.map(v => "
                        "[v.id, v.nodes[0].html, v.nodes[0].failureSummary])}))"
                    )
                    assert found["violations"] == [] and found["passed"] > 10
        assert tab.said == [] and tab.requested == []
