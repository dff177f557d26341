"""Rows of docs/migrating.md: YOLOv5's commands, flags, models and files work or are refused as it says.

    python -m tests.system.test_migrating [yolov5n.pt]     # all commands: minutes; 1 where one ends otherwise

Commands run as they are typed, in a folder that looks like the repository, on a few drawn images under the names of
coco128 and COCO; flags that make them small are appended. Every official checkpoint is yolov5n.pt under its name.
"""

from __future__ import annotations

import re
import shlex
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import pytest

from tessera.deploy.foreign.synthetic_shapes import write_shapes
from tessera.deploy.inference.flags import DetectConfig
from tessera.utils.checkpoints.weights import resolve_weights
from tessera.utils.config import TrainConfig, load_hyp
from tessera.utils.errors import UserError
from tessera.utils.flags.options import Options, ignored_flags, yolov5_flags
from tessera.utils.flags.val import ValConfig
from tests.system.launch import ROOT, free_port, run_command

SMALL = {
    "train.py": "--imgsz 64 --epochs 1 --batch-size 4 --workers 0 --device cpu --noplots --loggers none",
    "val.py": "--imgsz 64 --workers 0 --device cpu",
    "detect.py": "--imgsz 64 --device cpu",
    "export.py": "--imgsz 64 --device cpu",
}
IDLE = "accepted with a warning, without effect"
LISTS = {"Works:": ("works", ""), f"A{IDLE[1:]}:": ("differs", IDLE), "Not shipped,": ("differs", "bring the YAML")}


class Row(NamedTuple):
    """What a user of YOLOv5 types or names, the page's word for it ("works", "differs", "refused"), and its note."""

    typed: str
    verdict: str
    note: str


def section(title: str) -> list[Row]:
    """The rows of a section's table, its lines of code, which work, and what its sentences list."""
    text = (ROOT / "docs" / "migrating.md").read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]
    table = [line for line in text.splitlines() if line.startswith("| `")]
    rows = [Row(*row) for row in re.findall(r"^\| `(.+)` \| (works|differs|refused) \| (.*) \|$", text, re.MULTILINE)]
    assert len(rows) == len(table), title
    for block in re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        rows += [Row(typed, "works", "") for typed in block.splitlines()]
    for paragraph in text.replace("\n\n", "\0").replace("\n", " ").split("\0"):
        for beginning, (verdict, note) in LISTS.items():
            if paragraph.strip().startswith(beginning):
                rows += [Row(typed, verdict, note) for typed in re.findall(r"`([^`]+)`", paragraph)]
    return rows


COMMANDS = section("Commands")


@pytest.mark.parametrize("options", [TrainConfig, ValConfig, DetectConfig])
def test_flags_are_taken_or_refused_as_the_page_says(options: type[Options]) -> None:
    rows = section(f"Flags of {options.program}")
    assert len(rows) > 20
    for row in rows:
        error, words = "", shlex.split(row.typed)
        try:
            options(**options.from_args(words))
        except UserError as refused:
            error = str(refused)
        assert bool(error) == (row.verdict == "refused"), f"{row}: {error}"
        assert bool(row.note) or row.verdict == "works", row
        if row.note == IDLE:
            assert options.warning(words), row
    valued, typed = yolov5_flags(options.program), {row.typed for row in rows}
    assert {f"{flag} x" if valued[flag] else flag for flag in ignored_flags(options.program)} <= typed


def test_hyperparameters_are_read_or_not_there_as_the_page_says() -> None:
    rows = [row for row in section("Hyperparameters, datasets, checkpoints") if row.typed.startswith("hyp.")]
    assert len(rows) > 4
    for row in rows:
        with pytest.raises(UserError) if row.verdict == "refused" else nullcontext():
            load_hyp(row.typed)


def test_models_are_shipped_as_the_page_says() -> None:
    """Their parameters are in tests/models/test_family.py and test_hub.py."""
    rows = section("Models")
    assert len(rows) > 20
    for row in rows:
        assert (ROOT / "models" / Path(row.typed).name).is_file() == (row.verdict == "works"), row


def scratch(folder: Path, original: Path) -> dict[str, str]:
    """Make `folder` look like the repository, with drawn images and yolov5n.pt; returns variables to run with."""
    for name in ("train.py", "val.py", "detect.py", "export.py", "data", "models"):
        (folder / name).symlink_to(ROOT / name)
    weights, datasets = folder / "cache" / "weights", folder / "datasets"
    weights.mkdir(parents=True)
    (weights / "yolov5n.pt").symlink_to(original.absolute())
    write_shapes(datasets / "coco", train=8, val=4, size=96)
    for split in ("train", "val"):
        for part in ("images", "labels"):
            (datasets / "coco" / part / split).rename(datasets / "coco" / part / f"{split}2017")
        images = sorted((datasets / "coco" / "images" / f"{split}2017").iterdir())
        (datasets / "coco" / f"{split}2017.txt").write_text("".join(f"./images/{split}2017/{i.name}\n" for i in images))
    (datasets / "coco128").symlink_to("coco")
    return {"TESSERA_DATASETS": str(datasets), "TESSERA_CACHE": str(folder / "cache")}


def require(row: Row, folder: Path, env: dict[str, str]) -> None:
    """Run a command, or lines of Python, and see that it ends as the page says; a refusal is one message."""
    typed = re.sub(r"\byolov5[nsmlx]6?(\.pt)?(?![\w.-])", "yolov5n.pt", row.typed)  # but for names of YAMLs
    words = ["python", "-c", typed] if typed.startswith("import ") else shlex.split(typed)
    script = "hubconf.py" if "torch.hub" in row.typed else next((w for w in words if w.endswith(".py")), "train.py")
    if not (folder / script).exists():
        assert row.verdict == "refused", row
        return
    if "-c" not in words:
        more = "--evolve 1" if "--evolve" in words else "--epochs 2" if "--resume" in words else ""
        words += shlex.split(f"{SMALL[script]} {more}")
    done = run_command([sys.executable, *words[1:]], cwd=folder, env={**env, "MASTER_PORT": str(free_port())})
    assert (done.code != 0) == (row.verdict == "refused"), f"{row}\n{done.said}"
    if done.code:
        errors = [line for line in done.err.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 and ("Traceback" not in done.err or "torch.distributed" in row.typed), done.said


@pytest.mark.slow
def test_some_of_its_commands(shared: Path, tmp_path: Path) -> None:
    env = scratch(tmp_path, shared / "weights" / "yolov5n.pt")
    for typed in (
        "python train.py --data coco128.yaml --weights yolov5s.pt --quad",
        "python val.py --imgsz 64 --batch 32 --weights runs/train/exp/weights/best.pt",
        "python val.py --weights yolov5x.pt yolov5l6.pt",
        "python detect.py --weights yolov5s.pt --source datasets/coco128",
    ):
        (row,) = [row for row in COMMANDS if row.typed.startswith(typed)]
        require(row, tmp_path, env)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        variables, wrong = scratch(Path(name), Path(sys.argv[1]) if sys.argv[1:] else resolve_weights("yolov5n.pt")), 0
        for command in COMMANDS:
            try:
                require(command, Path(name), variables)
                print(f"as the page says: {command.typed}", flush=True)
            except AssertionError as error:
                wrong += 1
                print(f"BAD: {error}", flush=True)
    sys.exit(wrong > 0)
