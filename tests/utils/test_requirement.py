"""The grammar of --require."""

from __future__ import annotations

import pytest

from tessera.analysis.comparison.flags import CompareConfig, parsed_requirement
from tessera.utils.errors import ConfigError
from tessera.utils.flags.val import ValConfig


@pytest.mark.parametrize(
    ("text", "parts", "allowed", "refused"),
    [
        ("map >= -0.01", ("map", "", ">=", -0.01), [-0.01, 0.5], [-0.0101, float("nan")]),
        ("map50>0", ("map50", "", ">", 0.0), [0.001], [0.0]),
        (" ms <= 1e1 ", ("ms", "", "<=", 10.0), [10.0, -3.0], [10.1]),
        ("mb < +.5", ("mb", "", "<", 0.5), [0.4], [0.5]),
        ("map.low >= -0.02", ("map", "low", ">=", -0.02), [0.0], [-0.03]),
        ("map50.high < 0", ("map50", "high", "<", 0.0), [-0.1], [0.0]),
    ],
)
def test_a_requirement_is_a_metric_a_comparison_and_a_number(
    text: str, parts: tuple[object, ...], allowed: list[float], refused: list[float]
) -> None:
    found = parsed_requirement(text)
    assert tuple(found[1:]) == parts and found.text == text.strip()
    assert all(map(found.allows, allowed)) and not any(map(found.allows, refused))


def test_two_models_or_two_sides() -> None:
    for words in (["a.pt", "b.pt", "--data", "x"], ["a.pt", "--data", "x", "b.pt"], ["--a", "a.pt", "--b", "b.pt"]):
        config = CompareConfig(**CompareConfig.from_args(words))
        assert (config.a, config.b, config.models) == (("a.pt",), ("b.pt",), ())
    config = CompareConfig(
        **CompareConfig.from_args(["--a", "a1", "a2", "--b", "b1", "--require", "map > 0", "ms < 1"])
    )
    assert (config.a, config.b, len(config.requirements)) == (("a1", "a2"), ("b1",), 2)


NO_FORM, NO_INTERVAL = "expected a metric, a comparison and a number", "Only map and map50 have an interval"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], r"nothing to compare\. Give two models: compare\.py A B"),
        (["a.pt"], "found 1 MODEL, expected two"),
        (["a.pt", "b.pt", "c.pt"], "found 3 MODELS, expected two, A and B; several of a side"),
        (["--a", "a.pt"], "no --b"),
        (["--b", "a.pt"], "no --a"),
        (["a.pt", "b.pt", "--a", "c.pt"], "found 2 MODELS beside --a and --b"),
        (["a.pt", "b.pt", "--task", "speed"], "--task: found 'speed', expected one of val, train, test"),
        (["a.pt", "b.pt", "--weights", "c.pt"], "unknown argument '--weights'"),
        (["a.pt", "b.pt", "--require", "mpa >= 0"], r"'mpa' is not a metric\. Did you mean 'map'\?"),
        *(
            (["a.pt", "b.pt", "--require", text], NO_FORM)
            for text in ("map = 0", "map >=", "map >= one", "map >= 1 and ms < 2", "")
        ),
        *((["a.pt", "b.pt", "--require", text], NO_INTERVAL) for text in ("ms.low > 0", "map.mean > 0")),
    ],
)
def test_what_is_no_pair_or_no_requirement_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CompareConfig(**CompareConfig.from_args(words))


def test_models_are_given_to_compare_alone() -> None:
    with pytest.raises(ConfigError, match=r"val\.py: unknown argument 'best\.pt'"):
        ValConfig.from_args(["best.pt"])
