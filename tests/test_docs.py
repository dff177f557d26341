"""Facts in the documentation: tables, names of tests and files, commands and variables."""

from __future__ import annotations

import dataclasses
import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest

from tessera.analysis.comparison.flags import CompareConfig
from tessera.data.feed.sampler import EpochOrder, TrainSampler
from tessera.deploy.exporting.flags import ExportConfig
from tessera.deploy.inference.flags import DetectConfig
from tessera.utils import environment
from tessera.utils.config import Hyp, TrainConfig
from tessera.utils.flags.options import Options
from tessera.utils.flags.val import ValConfig

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "distributed.md").read_text()
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS: dict[str, type[Options]] = {
    "train": TrainConfig,
    "val": ValConfig,
    "detect": DetectConfig,
    "export": ExportConfig,
    "compare": CompareConfig,
}
each_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)


def law(images: int) -> str:
    """Return a row of the page's table: two ranks, global batches of 4 images, seed 0."""
    samplers = [TrainSampler(EpochOrder(images, 4, 0, 64), r, 2) for r in range(2)]
    counts = {sum(len(batch) for batch in sampler) for sampler in samplers}
    assert len(counts) == 1, "equal on all ranks"
    orders = [shown(samplers[0].order.plan(epoch)[0].tolist(), images) for epoch in range(2)]
    return f"| {images} | {len(samplers[0])} | {counts.pop()} | {orders[0]} | {orders[1]} |"


def shown(order: list[int], images: int) -> str:
    """Return batches with the ranks separated by slashes, and filling images in brackets."""
    words = [str(image) if place < images else f"({image})" for place, image in enumerate(order)]
    batches = [words[start : start + 4] for start in range(0, len(words), 4)]
    return ", ".join(f"{' '.join(batch[:2])} / {' '.join(batch[2:])}" for batch in batches)


@pytest.mark.parametrize("images", [8, 5])
def test_the_table_of_the_samplers_law(images: int) -> None:
    assert law(images) in PAGE.splitlines()


def test_every_test_that_the_page_names_is_there() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert named
    for file, name in named:
        assert f"\ndef {name}(" in (ROOT / file).read_text(), f"{file}::{name}"


def test_the_table_of_hostile_subjects() -> None:
    found = {}
    for file in (ROOT / "tests" / "hostile").glob("*.py"):
        if cases := re.search(r"^CASES, .* = (\d+)", file.read_text(), flags=re.MULTILINE):
            found[file.stem] = f"{int(cases[1]):,}"
    rows = (ROOT / "CONTRIBUTING.md").read_text().partition("| `make hostile` |")[2]
    assert dict(re.findall(r"^\| `(\w+)` \| ([\d,]+) \|", rows, flags=re.MULTILINE)) == found


def test_the_table_of_optional_hyperparameters() -> None:
    rows = []
    for f in dataclasses.fields(Hyp):
        if f.default is not dataclasses.MISSING:
            m, default = f.metadata, f.default
            allowed = f"{m['low']:g} to {m['high']:g}" if "low" in m else ", ".join(m["choices"])
            rows.append(f"| `{f.name}` | {allowed} | {default if isinstance(default, str) else f'{default:g}'} | ")
    page = (ROOT / "docs" / "hyperparameters.md").read_text().splitlines()
    table = [line for line in page if line.startswith("| `")]
    assert len(table) == len(rows) > 10
    assert [row for row, line in zip(rows, table, strict=True) if not line.startswith(row)] == []


@each_document
def test_files_modules_and_targets_are_there(path: Path) -> None:
    text = path.read_text()
    links = [path.parent / link for link in re.findall(r"\]\((?!\.\./\.\./actions/)([^):#]+)\)", text)]
    named = [ROOT / name for name in re.findall(r"\b(?:tests|utils|models|data|docs)/[\w/]+\.(?:py|md|yaml)\b", text)]
    named = [file for file in named if file.parent.name != "hub"]  # models/hub is YOLOv5's
    assert [str(file) for file in (*links, *named) if not file.exists()] == []
    assert [name for name in re.findall(r"-m (tests\.[\w.]+)", text) if find_spec(name) is None] == []
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    asked = re.findall(r"(?:^|`)make ([a-z -]+)", text, flags=re.MULTILINE)
    assert {target for line in asked for target in line.split()} <= set(targets)


def test_every_command_is_understood() -> None:
    """Of the README and of docs/distributed.md."""
    text = f"{(ROOT / 'README.md').read_text()}\n{PAGE}".replace("\\\n", " ")
    commands = re.findall(
        r"^(?!`).*\b(train|val|detect|export)(?:\.py)? (--[^#`\n]*)(?:#.*)?$", text, flags=re.MULTILINE
    )
    commands += re.findall(r"^(?:uv run )?(?:tessera )?(compare)(?:\.py)? ([^#\n]*)", text, flags=re.MULTILINE)
    assert len(commands) >= 20
    for command, flags in commands:
        if "$flags" not in flags:
            COMMANDS[command](**COMMANDS[command].from_args(shlex.split(flags)))


def test_variables_are_those_that_are_read() -> None:
    read = set(re.findall(r"TESSERA_\w+", Path(environment.__file__).read_text()))
    page = (ROOT / "docs" / "exit-codes.md").read_text()
    assert set(re.findall(r"TESSERA_\w+", page)) == read


def test_guides_begin_with_a_command_and_end_with_what_can_go_wrong() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("  - Reference:")[0]
    guides = re.findall(r"^      - .+: (.+\.md)$", navigation, flags=re.MULTILINE)
    assert len(guides) > 10
    for guide in guides:
        text = (ROOT / "docs" / guide).read_text()
        assert re.match(r"# .+\n\n```\n", text), guide
        assert text.rpartition("\n## ")[2].startswith("What can go wrong\n"), guide
