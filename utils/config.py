"""Configuration: hyperparameters and the flags of train.py, frozen and checked.

Nothing derived from a configuration (scaled gains, accumulation, rates) is ever stored in it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from tessera.utils.errors import ConfigError, did_you_mean
from tessera.utils.files import user_path
from tessera.utils.flags.objective import parse_objective
from tessera.utils.flags.options import Options, option
from tessera.utils.flags.program import HOME
from tessera.utils.text import first_of, shown
from tessera.utils.yaml_file import YamlMapping, read_yaml

HYPS_DIR = HOME / "data" / "hyps"
CacheMode = Literal["none", "ram", "disk"]  # where decoded images are kept
Sampling = Literal["shuffled", "balanced"]  # which images an epoch has
OptimizerName = Literal["SGD", "Adam", "AdamW"]
OPTIMIZERS: tuple[OptimizerName, ...] = get_args(OptimizerName)
AUTO = "auto"  # class weights by the numbers of objects
LOGGER_NAMES = ("tensorboard", "wandb", "mlflow", "trackio", "clearml", "comet")  # keys of report/trackers' TRACKERS


def _between(low: float, high: float, default: Any = dataclasses.MISSING, *, whole: bool = False) -> Any:
    """A float field that must lie in [low, high], and be a whole number on request; required without a default."""
    return field(default=default, metadata={"low": low, "high": high, "whole": whole})


@dataclass(frozen=True)
class Hyp:
    """Hyperparameters (data/hyps/*.yaml), each inside its range.

    The keys from `anchors` on may be left out; their defaults are YOLOv5's ways, so that its files mean what they did.
    """

    lr0: float = _between(1e-8, 10)
    lrf: float = _between(0, 10)
    momentum: float = _between(0, 0.9999)
    weight_decay: float = _between(0, 1)
    warmup_epochs: float = _between(0, 1000)
    warmup_momentum: float = _between(0, 0.9999)
    warmup_bias_lr: float = _between(0, 10)
    box: float = _between(0, 100)
    cls: float = _between(0, 100)
    cls_pw: float = _between(0.01, 100)
    obj: float = _between(0, 100)
    obj_pw: float = _between(0.01, 100)
    iou_t: float = _between(0, 1)
    anchor_t: float = _between(1.001, 100)
    fl_gamma: float = _between(0, 10)
    hsv_h: float = _between(0, 1)
    hsv_s: float = _between(0, 1)
    hsv_v: float = _between(0, 1)
    degrees: float = _between(0, 180)
    translate: float = _between(0, 1)
    scale: float = _between(0, 0.999)
    shear: float = _between(0, 89)
    perspective: float = _between(0, 0.001)
    flipud: float = _between(0, 1)
    fliplr: float = _between(0, 1)
    mosaic: float = _between(0, 1)
    mixup: float = _between(0, 1)
    copy_paste: float = _between(0, 1)
    # Anchors a level, rounded, that AutoAnchor fits where the model has another number: YOLOv5 evolves it.
    # 0 = the model's.
    anchors: float = _between(0, 32, default=0.0)
    optimizer: OptimizerName = field(default="SGD", metadata={"choices": OPTIMIZERS})
    # Images that an optimizer step stands for: smaller batches are accumulated, and weight_decay is meant for it.
    # 0 = the batch as it is.
    nominal_batch: float = _between(0, 65536, default=64.0)
    # The warm-up lasts `warmup_epochs`, but at least so many iterations and this share of all, and at most that share.
    warmup_least: float = _between(0, 100_000, default=100.0, whole=True)
    warmup_share: float = _between(0, 1, default=0.0)
    warmup_most: float = _between(0, 1, default=0.0)  # 0 = no bound
    flat: float = _between(0, 0.99, default=0.0)  # share of the epochs before the learning rate begins to fall
    cosine: float = _between(0, 1, default=0.0)  # share of a cosine in the fall; the rest is a line
    ema_share: float = _between(0, 1, default=0.0)  # horizon of the average, of the updates so far; 0 = YOLOv5's ramp
    close_mosaic: float = _between(0, 1, default=0.0)  # share of the epochs, at the end, without mosaic and mixup
    clip: float = _between(0.001, 1e6, default=10.0)  # largest norm of the gradient
    dfl: float = _between(
        0, 100, default=1.5
    )  # gain of the distribution loss; it and the next are for anchor-free heads
    topk: float = _between(1, 100, default=10.0, whole=True)  # task-aligned assignment: cells an object,
    alpha: float = _between(0, 10, default=0.5)  # exponent of the probability,
    beta: float = _between(0, 20, default=6.0)  # and of the IoU
    # Of a run from weights: each layer's rate is this times that of the next; so many layers, from the first, are not
    # trained (but with --freeze), or normalise by the statistics that they came with (not from a new layer on).
    layer_decay: float = _between(0.1, 1, default=1.0)
    frozen_layers: float = _between(0, 1000, default=0.0, whole=True)
    fixed_norms: float = _between(0, 1000, default=0.0, whole=True)
    # Of the class loss: "auto", or a JSON object of weights by class name, for which a file may also have a mapping.
    # "" = every class weighs the same.
    class_weights: str = field(default="", metadata={"low": 0.001, "high": 1000, "whole": False, "by_class": True})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str) -> Hyp:
        """As `from_yaml`, of plain values; `where` is the file that messages name."""
        return cls.from_yaml(YamlMapping(where, dict(values)))

    @classmethod
    def from_yaml(cls, found: YamlMapping) -> Hyp:
        """Check keys, types and ranges of what a YAML holds.

        Raises:
            ConfigError: an unknown or missing key, not a number or word that is allowed.
        """
        values = found.values
        known = {f.name: f for f in dataclasses.fields(cls)}
        for key in values:
            if key not in known:
                raise ConfigError(
                    f"{found.at(str(key))}: unknown hyperparameter {shown(key)}.{did_you_mean(str(key), known)} "
                    f"Known: {first_of(list(known), 10)}; the files in data/hyps have them."
                )
        missing = [key for key, f in known.items() if key not in values and f.default is dataclasses.MISSING]
        if missing:
            raise ConfigError(
                f"{found.name}: missing hyperparameter{'s' if len(missing) > 1 else ''} {', '.join(missing)}. "
                f"Add them; data/hyps/hyp.scratch-low.yaml shows every key."
            )
        return cls(**{key: _value(values[key], f"{found.at(key)}: {key}", known[key].metadata) for key in values})

    def as_dict(self) -> dict[str, Any]:
        """Plain mapping, in order; without the keys that may be left out and are at their default."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default}


def _value(value: Any, where: str, metadata: Mapping[str, Any]) -> Any:
    if "by_class" in metadata:
        return _by_class(value, where, metadata)
    if "low" in metadata:
        return _number(value, where, metadata)
    matching = [c for c in metadata["choices"] if isinstance(value, str) and c.lower() == value.lower()]
    if not matching:
        raise ConfigError(f"{where}: found {shown(value)}, expected one of {', '.join(metadata['choices'])}.")
    return matching[0]


def _by_class(value: Any, where: str, metadata: Mapping[str, Any]) -> str:
    """ "auto", "", or numbers by class name as a JSON object: one line, as tables, checkpoints and trackers have it."""
    text = value.strip() if isinstance(value, str) else value
    if isinstance(text, str):
        if text.lower() in ("", AUTO):
            return text.lower()
        with contextlib.suppress(ValueError, RecursionError):
            text = json.loads(text)
    if not isinstance(text, dict) or not text:
        raise ConfigError(f"{where}: found {shown(value)}, expected {AUTO}, or weights by class name: {{king: 2}}.")
    numbers = {str(name): _number(weight, f"{where}: {shown(name)}", metadata) for name, weight in text.items()}
    return json.dumps(numbers)


def _number(value: Any, where: str, metadata: Mapping[str, Any]) -> float:
    low, high = metadata["low"], metadata["high"]
    number = math.nan
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        number = float(value)  # of text too: YAML 1.1 reads 1e-3, without a point, as that
    if isinstance(value, bool) or not math.isfinite(number):
        raise ConfigError(f"{where}: found {shown(value)}, expected a number from {low:g} to {high:g}.")
    if not low <= number <= high:
        raise ConfigError(f"{where}: found {number:g}, allowed is {low:g} to {high:g}.")
    if metadata["whole"] and not number.is_integer():
        raise ConfigError(f"{where}: found {number:g}, expected a whole number from {low:g} to {high:g}.")
    return number


def load_hyp(hyp: str | Path) -> Hyp:
    """Read a hyperparameter YAML, looked up as given, then in data/hyps/.

    Raises:
        ConfigError: no such file, not YAML, or a key or value that is not allowed.
    """
    given = user_path(hyp, "--hyp")
    tried = list(dict.fromkeys((given, HYPS_DIR / given)))
    path = next((p for p in tried if os.path.isfile(p)), None)  # noqa: PTH113 - pathlib's raises where it may not look
    if path is None:
        choices = sorted(p.name for p in HYPS_DIR.glob("*.yaml"))
        places = "\n  ".join(map(shown, tried))
        raise ConfigError(
            f"--hyp {shown(given)}: no such file.{did_you_mean(given.name, choices)} Tried\n  {places}\n"
            f"There are {', '.join(choices)}."
        )
    return Hyp.from_yaml(read_yaml(path, "'key: value' lines"))


@dataclass(frozen=True)
class TrainConfig(Options):
    """Train a detector."""

    program = "train.py"

    weights: str = option(
        "",
        "start from this checkpoint: ours, or a published one by name (--list-weights); imagenet = the body of a "
        "classifier; '' = from scratch",
    )
    cfg: str = option("", "model YAML, looked up in models/ (default: what the weights bring, else tessera-n.yaml)")
    data: str = option("shapes.yaml", "dataset YAML, looked up in data/")
    hyp: str = option("", "hyperparameter YAML, looked up in data/hyps/ (default: by model, start and length)")
    epochs: int = option(100, "epochs in all", kind=int, low=1)
    batch_size: int = option(16, "images a batch over all ranks; -1 = AutoBatch", "--batch", kind=int, low=-1)
    imgsz: int = option(640, "image size, pixels", "--img", "--img-size", kind=int, low=32, high=8192)
    tile: int = option(0, "larger images in tiles of so many pixels, and as a whole; 0 = as a whole", kind=int, low=32)
    overlap: float = option(0.2, "least share of a tile that the next one overlaps", kind=float, low=0, high=0.9)
    rect: bool = option(False, "batches of one aspect ratio instead of squares", kind=bool)
    resume: str = option(
        "",
        "resume PATH; auto: the run of --project and --name, which begins where it is not there; bare: the newest "
        "last.pt, with --evolve the newest search, under --project",
        bare="newest",
    )
    nosave: bool = option(False, "save after the final epoch only", kind=bool)
    noval: bool = option(False, "validate after the final epoch only", kind=bool)
    noautoanchor: bool = option(False, "keep the anchors of the model", kind=bool)
    noplots: bool = option(False, "make no pictures", kind=bool)
    noreport: bool = option(False, "write no report.html", kind=bool)
    evolve: int = option(0, "search hyperparameters in N trainings (bare: 300)", kind=int, low=0, bare=300)
    objective: str = option("fitness", 'what --evolve raises, such as map, recall@p=0.95 or "map - 0.01*ms"')
    cache: CacheMode = option(
        "none", "keep decoded images in ram (bare) or on disk", choices=("none", "ram", "disk"), bare="ram"
    )
    image_weights: bool = option(False, "sample images of weak classes more often", kind=bool)
    sampling: Sampling = option(
        "shuffled",
        "an epoch has every image once (shuffled), or those of rare classes more often (balanced)",
        choices=("shuffled", "balanced"),
    )
    device: str = option("", "cpu, 0, 0,1 or mps; under torchrun each rank takes its own")
    multi_scale: bool = option(False, "vary the size by ±50 %% a batch", kind=bool)
    single_cls: bool = option(False, "all classes become one", kind=bool)
    optimizer: OptimizerName | Literal[""] = option(
        "", "SGD, Adam or AdamW (default: as the hyperparameters say)", choices=("", *OPTIMIZERS)
    )
    sync_bn: bool = option(False, "BatchNorm statistics over all ranks", kind=bool)
    workers: int = option(8, "loader workers a rank, capped by this process's CPUs", kind=int, low=0, high=1024)
    project: str = option("runs/train", "folder of runs")
    name: str = option("exp", "name of the run's folder")
    exist_ok: bool = option(False, "write into an existing folder instead of a new one", kind=bool)
    cos_lr: bool = option(False, "cosine schedule instead of a linear one", kind=bool)
    label_smoothing: float = option(0.0, "epsilon of the class targets", kind=float, low=0, high=0.999)
    patience: int = option(100, "stop after so many epochs without a better one; 0 = never", kind=int, low=0)
    freeze: tuple[int, ...] = option(
        (), "freeze layers 0..N-1, or those listed (default: as the hyperparameters say)", kind=int, low=0, many=True
    )
    save_period: int = option(-1, "also keep epochN.pt every so many epochs; -1 = never", kind=int, low=-1)
    save_steps: int = option(0, "also save last.pt every so many optimizer steps; 0 = never", kind=int, low=0)
    seed: int = option(0, "seed of all that is random", kind=int, low=0, high=2**63 - 1)
    local_rank: int = option(-1, "set by torch.distributed.launch", "--local_rank", kind=int, low=-1)
    amp: str = option("auto", "mixed precision", choices=("auto", "bf16", "fp16", "off"))
    compile: bool = option(False, "torch.compile the model", kind=bool)
    close_mosaic: int = option(
        -1, "no mosaic or mixup in the last N epochs; -1 = as the hyperparameters say", kind=int, low=-1
    )
    deterministic: bool = option(False, "bit-reproducible kernels", kind=bool)
    profile: bool = option(
        False, "measure where the time is spent: a table an epoch, a trace of a few steps", kind=bool
    )
    # --log is the older name. Under torchrun, which has flags of its own that begin with it, it cannot be typed.
    loggers: str = option("tensorboard", f"comma list of {', '.join(LOGGER_NAMES)}; or none", "--log")
    check_data: bool = option(False, "check the dataset, print every problem, and end", kind=bool)
    report: str = option(
        "", "with --check-data, also write a page: data_report.html in this folder (bare: runs/data)", bare="runs/data"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_size == 0:
            raise ConfigError("--batch-size 0: expected at least 1, or -1 for AutoBatch.")
        if self.image_weights and self.sampling == "balanced":
            raise ConfigError(
                "--sampling balanced with --image-weights: both choose the images of an epoch, one by how rare their "
                "classes are, one by how badly these are found too. Leave one of them out."
            )
        if self.evolve and self.resume == "auto":
            raise ConfigError(
                "--evolve with --resume auto: a search is begun or joined by --name with --exist-ok. Give these in its "
                "place; --resume with a folder, or bare for the newest search, continues one."
            )
        if self.report and not self.check_data:
            raise ConfigError(
                "--report without --check-data: it writes the page of a dataset's checks. Give --check-data too; a "
                "training writes report.html by itself."
            )
        if not self.data:
            raise ConfigError("--data: found nothing, expected a dataset YAML such as coco128.yaml.")
        if self.objective != TrainConfig.objective and not self.evolve:
            raise ConfigError(
                f"--objective {shown(self.objective)} without --evolve: one training raises nothing. Add --evolve N, "
                "or leave --objective out."
            )
        parse_objective(self.objective)
        _ = self.logger_names

    @property
    def logger_names(self) -> tuple[str, ...]:
        """Trackers that were asked for, each once, in their order; "none" and "" stand for no tracker."""
        asked = [name.strip() for name in self.loggers.split(",")]
        known = (*LOGGER_NAMES, "none")
        for name in asked:
            if name and name not in known:
                hint = did_you_mean(name, known)
                raise ConfigError(f"--loggers: unknown tracker {shown(name)}.{hint} Known: {', '.join(known)}.")
        return tuple(dict.fromkeys(name for name in asked if name in LOGGER_NAMES))

    @property
    def frozen_layers(self) -> tuple[int, ...]:
        """Indices of the layers to freeze: one number counts from the first, several are a list."""
        return tuple(range(self.freeze[0])) if len(self.freeze) == 1 else self.freeze
