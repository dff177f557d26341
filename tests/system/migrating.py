"""Makes docs/migrating.md: what becomes of YOLOv5's commands, flags, models and files here, from running them.

    uv run python -m tests.system.migrating [yolov5n.pt]     # minutes; writes the page, and ends with 1 where it is bad

Commands run as they are typed, in a folder that looks like the repository, on a few drawn images under the names of
coco128 and COCO; flags that make them small are appended. Every official checkpoint is yolov5n.pt under its name.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import yaml

from tessera.data.source.shapes import write_shapes
from tessera.data.source.spec import load_spec
from tessera.models.detector import DetectionModel
from tessera.models.summary import count_parameters
from tessera.utils.checkpoints.resolve import resolve_weights
from tessera.utils.checkpoints.weights import load_weights
from tessera.utils.config import TrainConfig, load_hyp
from tessera.utils.errors import UserError
from tessera.utils.flags.detect import DetectConfig
from tessera.utils.flags.former import former_flags, without_effect
from tessera.utils.flags.options import Options
from tessera.utils.flags.published import PUBLISHED
from tessera.utils.flags.val import ValConfig
from tests.models.hub import describe
from tests.system.launch import ROOT, free_port, run_command

PAGE = ROOT / "docs" / "migrating.md"
ORIGINALS = tuple(weights.name for weights in PUBLISHED if weights.name.startswith("yolov5"))
SMALL_TRAIN = "--imgsz 64 --epochs 1 --batch-size 4 --workers 0 --device cpu --noplots --loggers none"
SMALL_VAL = "--imgsz 64 --workers 0 --device cpu"
SMALL = {
    "train.py": SMALL_TRAIN,
    "val.py": SMALL_VAL,
    "detect.py": "--imgsz 64 --device cpu",
    "export.py": "--imgsz 64 --device cpu",
}
BAD = "BAD"


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
        typed: what a user of YOLOv5 types or names.
        note: how it differs here, or why it is refused; "" where it works as it did.
        more: flags to append when it is run, behind those that make it small.
        aside: a remark on what works.
    """

    typed: str
    note: str = ""
    more: str = ""
    aside: str = ""

    def line(self, error: str | None) -> str:
        """The line, after the row was tried; None: it worked."""
        if error is None:
            verdict = "differs" if self.note else "works"
        else:
            verdict = "refused" if self.note and BAD not in error else f"{BAD}: {error}"
        return f"| `{self.typed}` | {verdict} | {self.note or self.aside} |"


COMMANDS = (
    Row("python train.py --data coco.yaml --epochs 300 --weights '' --cfg yolov5n.yaml --batch-size 128"),
    Row("python train.py --img 640 --batch 16 --epochs 3 --data coco128.yaml --weights yolov5s.pt"),
    Row("python train.py --img 640 --epochs 3 --data data/coco128.yaml --weights yolov5s --cache"),
    Row("python train.py --data coco128.yaml --cfg models/hub/yolov5n6.yaml --weights '' --cache images --adam"),
    Row("python train.py --resume", more="--epochs 2"),
    Row("python train.py --resume runs/train/exp/weights/last.pt", more="--epochs 2"),
    Row("python train.py --freeze 10 --data coco128.yaml --weights yolov5m.pt"),
    Row("python train.py --batch 64 --data coco.yaml --weights yolov5s.pt --device 0"),
    Row("python -m torch.distributed.run --nproc_per_node 2 train.py --batch 64 --data coco.yaml --weights yolov5s.pt"),
    Row(
        "python -m torch.distributed.run --nproc_per_node 2 train.py --data coco.yaml --weights '' --sync-bn",
        aside="trains tessera-n.yaml, the default without weights",
    ),
    Row("python -m torch.distributed.launch --nproc_per_node 2 train.py --data coco.yaml --weights yolov5s.pt"),
    Row("python train.py --epochs 10 --data coco128.yaml --weights yolov5s.pt --cache --evolve", more="--evolve 1"),
    Row(
        "python train.py --imgsz 64 --batch 32 --weights yolov5n.pt --cfg yolov5n.yaml --epochs 1 --device cpu",
        "without `--data` the drawn shapes are trained on, not coco128",
    ),
    Row(
        "python train.py --data coco128.yaml --weights yolov5s.pt --quad --upload_dataset --bbox_interval 1",
        "`--quad` and the flags of W&B have no effect: one line of warning names them",
    ),
    Row(
        "python train.py --img-size 640 640 --data coco128.yaml --weights yolov5s.pt",
        "training and validation have one size",
    ),
    Row("python val.py --weights yolov5s.pt --data coco128.yaml --img 640"),
    Row("python val.py --weights yolov5s.pt --data coco.yaml --img 640 --conf 0.001 --iou 0.65 --half"),
    Row("python val.py --weights yolov5s.pt --data coco.yaml --img 832 --augment --half"),
    Row("python val.py --weights yolov5s.pt --data coco.yaml --img 640 --task speed --batch 1"),
    Row("python val.py --weights yolov5s.pt --data coco128.yaml --save-txt --save-conf --save-json --verbose --dnn"),
    Row(
        "python val.py --imgsz 64 --batch 32 --weights runs/train/exp/weights/best.pt --device cpu",
        "without `--data` it measures the dataset that the checkpoint was trained on, not coco128",
    ),
    Row(
        "python val.py --img 640 --batch 16 --weights yolov5s.pt",
        "an original checkpoint does not say what it was trained on: give `--data`",
    ),
    Row("python val.py --weights yolov5x.pt yolov5l6.pt --data coco.yaml", "one model is measured, not an ensemble"),
    Row("python val.py --weights yolov5s.pt --data coco.yaml --task study", "run it once for each `--imgsz`"),
    Row("python detect.py --weights yolov5s.pt --source datasets/coco128/images/train2017 --save-txt"),
    Row("python detect.py --weights yolov5s.pt --source 'datasets/coco128/images/*/*.jpg' --img 640 --conf 0.25"),
    Row(
        "python detect.py --weights runs/train/exp/weights/best.pt --source datasets/coco128/images/val2017",
        "without `--conf-thres` it is the confidence of the best F1, `--imgsz` that of the training",
    ),
    Row("python detect.py --weights yolov5s.pt", "there is no `data/images`: give `--source`"),
    Row(
        "python export.py --weights yolov5s.pt --include onnx",
        "the file takes a picture and answers with boxes; `--raw` gives the bare network",
    ),
    Row("python segment/train.py --data coco128-seg.yaml --weights yolov5s-seg.pt", "boxes only; polygons are boxed"),
    Row("python classify/train.py --model yolov5s-cls.pt --data imagenet", "boxes only"),
    Row(
        "python benchmarks.py --weights yolov5s.pt --data coco128.yaml",
        "export.py measures each file that it writes beside the model",
    ),
)
PYTHON = (
    Row("import train; train.run(data='coco128.yaml', imgsz=320, weights='yolov5n.pt', epochs=1, workers=0)"),
    Row("import val; val.run(data='coco128.yaml', weights='yolov5n.pt', imgsz=320, workers=0)"),
    Row("import torch; torch.hub.load('.', 'yolov5s', source='local')", "there is no hubconf.py"),
)
TRAIN_FLAGS = (
    Row("--weights yolov5s.pt"),
    Row("--cfg yolov5s.yaml", "without it and without weights tessera-n.yaml is trained"),
    Row("--data coco128.yaml", "the default is shapes.yaml"),
    Row("--hyp hyp.scratch-low.yaml", aside="the default for yolov5 models from 10,000 batches on"),
    Row("--epochs 300"),
    Row("--batch-size 16"),
    Row("--batch-size -1", aside="under DDP too"),
    Row("--imgsz 640"),
    Row("--rect", "still shuffled, and under DDP too"),
    Row("--resume", "flags beside it override the saved ones"),
    *map(Row, ("--nosave", "--noval", "--notest", "--noautoanchor", "--noplots")),
    Row(
        "--evolve 300",
        "by Optuna (`uv sync --extra tune`), in a new folder; the same command with `--resume` continues",
    ),
    Row("--resume_evolve evolve.csv", "`--evolve 300 --resume FOLDER`"),
    Row("--evolve_population data/hyps", "`--evolve 300 --resume FOLDER`"),
    *map(Row, ("--cache", "--cache ram", "--cache disk", "--cache images", "--cache-images")),
    Row("--cache val", "training and validation share one cache"),
    Row("--image-weights", aside="under DDP too"),
    Row("--device 0"),
    Row("--device 0,1", "one process a device, started by torchrun; one process alone takes one device"),
    *map(Row, ("--multi-scale", "--single-cls", "--optimizer AdamW", "--adam")),
    Row("--sync-bn", aside="on CPUs too"),
    Row("--workers 8", aside="capped by the processors that a rank has"),
    *map(Row, ("--project runs/train", "--name exp", "--exist-ok", "--cos-lr", "--linear-lr")),
    *map(Row, ("--label-smoothing 0.1", "--patience 100", "--freeze 10", "--freeze 0 1 2")),
    *map(Row, ("--save-period 5", "--save_period 5", "--seed 1", "--local_rank 0")),
)
VAL_FLAGS = (
    Row("--data coco128.yaml", "the default is the dataset that the checkpoint was trained on"),
    *map(Row, ("--weights yolov5s.pt", "--batch-size 32")),
    Row("--imgsz 640", "the default is what the weights were trained at, 640 for files of other programs"),
    *map(Row, ("--conf-thres 0.001", "--iou-thres 0.6")),
    *map(Row, ("--max-det 300", "--task val", "--task test", "--task speed", "--device 0", "--workers 8")),
    Row("--task study", "run it once for each `--imgsz`"),
    *map(Row, ("--single-cls", "--augment", "--verbose", "--save-txt", "--save-conf")),
    Row("--save-json", "for any dataset; with a COCO JSON its own ids"),
    *map(Row, ("--project runs/val", "--name exp", "--exist-ok", "--half")),
)
DETECT_FLAGS = (
    Row("--weights yolov5s.pt", "the default is yolov5n.pt"),
    Row("--weights yolov5s.pt yolov5m.pt", "one model, not an ensemble"),
    *map(Row, ("--source bus.jpg", "--source 0", "--source rtsp://camera/stream")),
    Row("--source data/images", "there is no default"),
    Row("--imgsz 640", "the default is what the weights were trained at"),
    Row("--imgsz 640 480", "one number, the long side"),
    Row("--conf-thres 0.25", "the default is the confidence of the best F1, 0.25 for YOLOv5's files; or `auto`"),
    *map(Row, ("--iou-thres 0.45", "--max-det 1000", "--device 0", "--device cpu")),
    *map(Row, ("--save-txt", "--save-conf")),
    Row("--save-csv", "more columns: frame and corners"),
    Row("--save-crop", aside="the box itself, without a margin"),
    *map(Row, ("--nosave", "--classes 0 2 3", "--agnostic-nms", "--augment")),
    *map(Row, ("--project runs/detect", "--name exp", "--exist-ok")),
    Row("--line-thickness 3", "the default is what suits the picture"),
    *map(Row, ("--hide-labels", "--hide-conf", "--half", "--vid-stride 2")),
)
MODELS = (
    *(f"yolov5{size}{p6}" for p6 in ("", "6") for size in "nsmlx"),
    *("hub/yolov3", "hub/yolov3-spp", "hub/yolov3-tiny", "hub/yolov5-bifpn", "hub/yolov5-fpn", "hub/yolov5-p2"),
    *("hub/yolov5-p34", "hub/yolov5-p6", "hub/yolov5-p7", "hub/yolov5-panet"),
    *("hub/yolov5s-LeakyReLU", "hub/yolov5s-ghost", "hub/yolov5s-transformer", "hub/anchors"),
)
HYPS = (
    *map(Row, ("hyp.scratch-low.yaml", "hyp.scratch-med.yaml", "hyp.scratch-high.yaml", "hyp.no-augmentation.yaml")),
    Row("hyp_evolve.yaml", aside="`anchors: N` lets AutoAnchor fit N a level; the file is read as YOLOv5 wrote it"),
    Row("hyp.VOC.yaml", "not part of this program; a copy of the file is read"),
    Row("hyp.Objects365.yaml", "not part of this program; a copy of the file is read"),
)
DATA = (
    *map(Row, ("coco128.yaml", "coco.yaml")),
    Row("its other YAMLs, on data that is there", "copy the YAML; what its `download:` would run is passed over"),
    Row(
        "its other YAMLs, where the data must be fetched", "a script in `download:` is never run; fetch the data first"
    ),
)
WEIGHTS = (
    Row(ORIGINALS[0]),
    *(Row(name, aside="the run that made this page had yolov5n.pt in its place") for name in ORIGINALS[1:]),
    Row("yolov5s", aside="the same as yolov5s.pt"),
    *(Row(f"yolov5s-{kind}.pt", "boxes only") for kind in ("seg", "cls")),
)


def scratch(folder: Path, original: Path) -> dict[str, str]:
    """Make `folder` look like the repository, with drawn images and yolov5n.pt; returns variables to run with."""
    for name in ("train.py", "val.py", "detect.py", "export.py", "data", "models"):
        (folder / name).symlink_to(ROOT / name)
    weights, datasets = folder / "cache" / "weights", folder / "datasets"
    weights.mkdir(parents=True)
    (weights / ORIGINALS[0]).symlink_to(original.absolute())
    write_shapes(datasets / "coco", train=8, val=4, size=96)
    for split in ("train", "val"):
        for part in ("images", "labels"):
            (datasets / "coco" / part / split).rename(datasets / "coco" / part / f"{split}2017")
        images = sorted((datasets / "coco" / "images" / f"{split}2017").iterdir())
        (datasets / "coco" / f"{split}2017.txt").write_text("".join(f"./images/{split}2017/{i.name}\n" for i in images))
    (datasets / "coco128").symlink_to("coco")
    return {"TESSERA_DATASETS": str(datasets), "TESSERA_CACHE": str(folder / "cache"), "MASTER_PORT": str(free_port())}


def with_yolov5n(typed: str) -> str:
    """The same with yolov5n.pt in place of each other official checkpoint, which is none but the published file."""
    return re.sub(r"\byolov5[nsmlx]6?(\.pt)?(?![\w.-])", ORIGINALS[0], typed)


def run(row: Row, folder: Path, env: dict[str, str]) -> str | None:
    """Run a command, or lines of Python; what went wrong, None where it worked."""
    typed = with_yolov5n(row.typed)
    words = ["python", "-c", typed] if typed.startswith("import ") else shlex.split(typed)
    script = "hubconf.py" if "torch.hub" in row.typed else next((w for w in words if w.endswith(".py")), "train.py")
    if not (folder / script).exists():
        return "there is no such program"
    if "-c" not in words:
        words += shlex.split(f"{SMALL[script]} {row.more}")
    done = run_command([sys.executable, *words[1:]], cwd=folder, env={**env, "MASTER_PORT": str(free_port())})
    if done.code == 0:
        return None
    errors = [line for line in done.err.splitlines() if line.startswith("error: ")]
    clear = len(errors) == 1 and ("Traceback" not in done.err or "torch.distributed" in row.typed)
    return errors[0] if clear else f"{BAD}: {done.said}"


def parse(options: type[Options], row: Row) -> tuple[Row, str | None]:
    """A flag, and what is wrong with it; a warning of it becomes the row's note."""
    words = shlex.split(row.typed)
    try:
        options(**options.from_args(words))
    except UserError as error:
        return row, str(error)
    return (Row(row.typed, "accepted with a warning, without effect") if options.warning(words) else row), None


def build(name: str) -> str:
    """The line of a model, with its parameters at 80 classes."""
    short, file = name.removeprefix("hub/"), f"models/{name}.yaml"
    if short == "anchors":
        return Row(file, "no model, there neither: lists of anchors to copy from").line("no model")
    shipped = (ROOT / "models" / f"{short}.yaml").is_file()
    with torch.device("meta"):
        count = count_parameters(DetectionModel(f"{short}.yaml" if shipped else describe(short)))
    if shipped:
        return Row(file, aside=f"{count:,}").line(None)
    return Row(file, f"{count:,}; not part of this program: bring the YAML").line(None)


def flags_table(options: type[Options], rows: Sequence[Row]) -> list[str]:
    """Lines of the flags, those without effect last."""
    idle, valued = without_effect(options.program), former_flags(options.program)
    tried = [parse(options, row) for row in (*rows, *(Row(f"{flag} x" if valued[flag] else flag) for flag in idle))]
    return [row.line(error) for row, error in tried]


def said(action: Callable[[], object]) -> str | None:
    """What a user would read of an action; None where it works."""
    try:
        action()
    except UserError as error:
        return str(error)
    return None


def files_table(folder: Path) -> list[str]:
    """Lines of hyperparameters, datasets and checkpoints."""
    evolved = folder / "hyp_evolve.yaml"
    evolved.write_text(yaml.safe_dump({**load_hyp("hyp.scratch-low.yaml").as_dict(), "anchors": 3.41}))
    lines = [row.line(said(partial(load_hyp, evolved if row is HYPS[4] else row.typed))) for row in HYPS]
    for row, path in zip(DATA, ("coco128", "coco", "coco", "absent"), strict=True):
        copy = folder / "copy.yaml"
        plain = yaml.safe_load((ROOT / "data" / "coco.yaml").read_text())
        copy.write_text(yaml.safe_dump({**plain, "path": path, "download": "import os\nos.makedirs('x')\n"}))
        lines.append(row.line(said(partial(load_spec, copy if row in DATA[2:] else row.typed))))
    for row in WEIGHTS:
        lines.append(row.line(said(lambda row=row: load_weights(resolve_weights(with_yolov5n(row.typed))))))
    return lines


HEAD = """\
# Coming from YOLOv5

What becomes of YOLOv5's commands, flags, models and files: it works as it did, it differs, or it is refused with one
message. Made by running it all: `uv run python -m tests.system.migrating` appends flags to each command that make it
small and put it on the CPU; the flags of the tables below the first are parsed. They may be spelled with `_` or `-`.
"""


def table(title: str, column: str, lines: Sequence[str], note: str = "") -> str:
    """A section of the page."""
    return "\n".join([f"\n## {title}\n", f"| {column} | here | {note} |", "|---|---|---|", *lines, ""])


def page(commands: Sequence[str], folder: Path) -> str:
    """The page, with these lines of its table of commands."""
    return "".join(
        (
            HEAD,
            table("Commands", "command", commands),
            table("Flags of train.py", "flag", flags_table(TrainConfig, TRAIN_FLAGS)),
            table("Flags of val.py", "flag", flags_table(ValConfig, VAL_FLAGS)),
            table("Flags of detect.py", "flag", flags_table(DetectConfig, DETECT_FLAGS)),
            table("Models", "file", [*map(build, MODELS)], "parameters at 80 classes"),
            table("Hyperparameters, datasets, checkpoints", "file", files_table(folder)),
        )
    )


def main(argv: Sequence[str]) -> int:
    """Try everything, write the page; returns 1 where something is bad."""
    original = Path(argv[0]) if argv else resolve_weights("yolov5n.pt")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        env = scratch(folder, original)
        os.environ.update(env)
        commands = []
        for row in (*COMMANDS, *PYTHON):
            commands.append(row.line(run(row, folder, env)))
            print(commands[-1], flush=True)
        text = page(commands, folder)
    PAGE.write_text(text)
    bad = [line for line in text.splitlines() if BAD in line]
    print("\n".join(bad) or f"nothing is bad; wrote {PAGE}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
