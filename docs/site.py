"""Hooks of the documentation site (mkdocs.yml): pages and tables from README.md, CHANGELOG.md, flags and YAML keys.

Links to files outside docs/ become links into the repository that GITHUB_REPOSITORY names, or plain text without it.
"""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from tessera.analysis.comparison.flags import CompareConfig
from tessera.deploy.exporting.flags import ExportConfig
from tessera.deploy.inference.flags import DetectConfig
from tessera.utils.config import Hyp, TrainConfig
from tessera.utils.flags.val import ValConfig

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
COMMANDS = (TrainConfig, ValConfig, DetectConfig, ExportConfig, CompareConfig)
FUNCTIONS = ("train", "val", "detect", "export", "compare")
_DETECTOR = "deploy.inference.detector.Detector"  # where it is: griffe does not follow the links in tessera/
_BADGE = re.compile(r"^\[!\[\w+\]\(\S+\)\]\(\S+\)\n", re.MULTILINE)
_PROGRAM = re.compile(r"^\[([^\]]+)\]\(\.\./deploy/clients/[\w.]+\)$", re.MULTILINE)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    pages = {target: (ROOT / source).read_text() for source, target in PAGES.items()}
    pages["flags.md"] = "# Flags\n\n" + "\n".join(_flags(command) for command in COMMANDS)
    entries = "\n".join(f"::: tessera.{name}\n    options: {{heading: tessera.{name}}}\n" for name in FUNCTIONS)
    entries += f"\n::: {_DETECTOR}\n    options: {{heading: tessera.Detector}}\n"
    pages["python.md"] = f"# Python API\n\n{entries}"
    for target, content in pages.items():
        files.append(File.generated(config, target, content=content))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Point the links of a page at pages of the site, or into the repository."""
    folder = ROOT if page.file.src_uri in PAGES.values() else ROOT / "docs"
    markdown = markdown.replace("<!-- required keys -->", _required_hyperparameters())
    markdown = _PROGRAM.sub(_program, _BADGE.sub("", markdown))
    return _LINK.sub(lambda found: _link(folder, *found.groups()), markdown)


def _program(link: re.Match[str]) -> str:
    """Return the code of a program in place of the link to it."""
    file = ROOT / link[1]
    language = {".mjs": "js", ".cpp": "cpp", ".pbtxt": "text"}[file.suffix]
    return f'```{language} title="{link[1]}"\n{file.read_text().rstrip()}\n```'


def _link(folder: Path, image: str, text: str, target: str) -> str:
    if target.startswith(("http", "#")):
        return f"{image}[{text}]({target})"
    path, _, anchor = target.partition("#")
    place = os.path.relpath(folder / path, ROOT)
    inside = PAGES.get(place) or (place.removeprefix("docs/") if place.startswith("docs/") else None)
    if inside:
        return f"{image}[{text}]({inside}{'#' * bool(anchor)}{anchor})"
    repository = os.environ.get("GITHUB_REPOSITORY")
    return f"[{text}](https://github.com/{repository}/blob/main/{place})" if repository else text


def _flags(command: Any) -> str:
    rows = ["| flag | default | meaning |", "| --- | --- | --- |"]
    for field in dataclasses.fields(command):
        options = field.metadata
        spellings = ", ".join(f"`{flag}`" for flag in (f"--{field.name.replace('_', '-')}", *options["flags"]))
        default = f"`{options['default']}`" if options["kind"] is not bool and options["default"] != "" else ""
        text = options["help"].replace("|", "\\|").replace("%%", "%")
        rows.append(f"| {spellings} | {default} | {text} |")
    return f"## {command.program}\n\n" + "\n".join(rows) + "\n"


def _required_hyperparameters() -> str:
    """Return a table of YOLOv5's hyperparameters: ranges from `Hyp`, values and meanings from hyp.scratch-low.yaml."""
    text = (ROOT / "data" / "hyps" / "hyp.scratch-low.yaml").read_text()
    lines = {key: rest for key, *rest in re.findall(r"^(\w+): (\S+) +# (.+)$", text, flags=re.MULTILINE)}
    rows = ["| key | range | hyp.scratch-low.yaml | meaning |", "| --- | --- | --- | --- |"]
    for field in dataclasses.fields(Hyp):
        if field.default is dataclasses.MISSING:
            value, meaning = lines[field.name]
            rows.append(
                f"| `{field.name}` | {field.metadata['low']:g} to {field.metadata['high']:g} | {value} | {meaning} |"
            )
    return "\n".join(rows)
