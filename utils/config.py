"""Hyperparameters (`Hyp`) and flags of train.py (`TrainConfig`): frozen and checked, without derived values."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from tessera.utils.errors import ConfigError, did_you_mean
from tessera.utils.files import user_path
from tessera.utils.flags.objective import parse_objective
from tessera.utils.flags.options import Options, imgsz_option, option
from tessera.utils.flags.program import HOME
from tessera.utils.image_size import ImageSize
from tessera.utils.text import first_of, row, shown
from tessera.utils.user_parts import placed_part_names
from tessera.utils.yaml_file import YamlMapping, read_yaml

HYPS_DIR = HOME / "data" / "hyps"
CacheMode = Literal["none", "ram", "disk"]  # cache of decoded images
Sampling = Literal["shuffled", "balanced"]  # images of an epoch
OptimizerName = Literal["SGD", "Adam", "AdamW", "Muon"]
OPTIMIZERS: tuple[OptimizerName, ...] = get_args(OptimizerName)
OWN_WEIGHTS = "tessera-n"  # that come with the program
NO_TEACHER = "none"  # value of --teacher
_DIGEST = re.compile(r"#[0-9a-f]{16}$")  # what a resolved --teacher ends in
AUTO = "auto"  # value of --weights, of --teacher, of --resume, and of class_weights
LOGGER_NAMES = ("tensorboard", "wandb", "mlflow")  # keys of TRACKERS in analysis/trackers.py
_FORMER_LOGGERS = ("clearml", "comet")  # up to 0.1; both read TensorBoard's files
OWN_PARTS = ("head", "transforms", "optimizer", "callbacks")  # flags that may name parts of the user's own

log = logging.getLogger(__name__)

_ASSIGNMENT = re.compile(r"([A-Za-z][\w-]*)=(.*)", re.DOTALL)  # of --hyp


def _between(low: float, high: float, default: Any = dataclasses.MISSING, *, whole: bool = False) -> Any:
    """Return a float field in [low, high]; required without a default."""
    return field(default=default, metadata={"low": low, "high": high, "whole": whole})


RENAMED = {  # hyperparameters of files and checkpoints of 0.1
    "warmup_least": "warmup_min_batches",
    "warmup_share": "warmup_fraction",
    "warmup_most": "warmup_max_fraction",
    "flat": "flat_fraction",
    "ema_share": "ema_fraction",
}


@dataclass(frozen=True)
class Hyp:
    """Hyperparameters (data/hyps/*.yaml), each inside its range.

    The keys from `anchors` on are optional; their defaults keep the meaning of YOLOv5's files.
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
    # Anchors per level, rounded, that AutoAnchor fits; 0 = as the model.
    anchors: float = _between(0, 32, default=0.0)
    optimizer: OptimizerName = field(default="SGD", metadata={"choices": OPTIMIZERS})
    # Nominal batch size: smaller batches are accumulated, and weight_decay is scaled to it. 0 = no accumulation.
    nominal_batch: float = _between(0, 65536, default=64.0)
    # Warm-up: the longest of `warmup_epochs`, these batches, and this fraction of all; at most the maximum.
    warmup_min_batches: float = _between(0, 100_000, default=100.0, whole=True)
    warmup_fraction: float = _between(0, 1, default=0.0)
    warmup_max_fraction: float = _between(0, 1, default=0.0)  # 0 = no bound
    flat_fraction: float = _between(0, 0.99, default=0.0)  # fraction of the epochs before the learning rate decays
    cosine: float = _between(0, 1, default=0.0)  # weight of a cosine in the decay; the rest is linear
    ema_fraction: float = _between(0, 1, default=0.0)  # EMA horizon, fraction of the updates so far; 0 = YOLOv5's ramp
    close_mosaic: float = _between(0, 1, default=0.0)  # fraction of the epochs, at the end, without mosaic and mixup
    clip: float = _between(0.001, 1e6, default=10.0)  # gradient norm is clipped to it
    # Anchor-free heads: gain of the distribution focal loss; cells per object, and exponents of the class probability
    # and of the IoU, in the task-aligned assignment.
    dfl: float = _between(0, 100, default=1.5)
    topk: float = _between(1, 100, default=10.0, whole=True)
    alpha: float = _between(0, 10, default=0.5)
    beta: float = _between(0, 20, default=6.0)
    # Fine-tuning: factor of the learning rate from layer to layer, towards the input; number of first layers that are
    # frozen (unless --freeze), and that keep their BatchNorm statistics.
    layer_decay: float = _between(0.1, 1, default=1.0)
    frozen_layers: float = _between(0, 1000, default=0.0, whole=True)
    fixed_norms: float = _between(0, 1000, default=0.0, whole=True)
    # Class weights of the class loss: "auto", or a JSON object (in a file also a mapping) by class name; "" = equal.
    class_weights: str = field(default="", metadata={"low": 0.001, "high": 1000, "whole": False, "by_class": True})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str) -> Hyp:
        """Return hyperparameters from plain values, as `from_yaml`; messages name the file `where`."""
        return cls.from_yaml(YamlMapping(where, dict(values)))

    @classmethod
    def from_yaml(cls, found: YamlMapping) -> Hyp:
        """Return hyperparameters from a YAML, with keys, types and ranges checked.

        Raises:
            ConfigError: an unknown or missing key, or a value that is not allowed.
        """
        values = cls.checked(found)
        if missing := cls.missing(values):
            raise ConfigError(
                f"{found.name}: missing hyperparameter{'s' if len(missing) > 1 else ''} {', '.join(missing)}. "
                f"Add them; data/hyps/hyp.scratch-low.yaml shows every key."
            )
        return cls(**values)

    @classmethod
    def missing(cls, values: Collection[str]) -> list[str]:
        """Return the required hyperparameters that `values` lack."""
        return [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING and f.name not in values]

    @classmethod
    def checked(cls, found: YamlMapping) -> dict[str, Any]:
        """Return the checked values of a YAML that may lack keys.

        Raises:
            ConfigError: an unknown key, or a value that is not allowed.
        """
        written = {RENAMED.get(key, key): key for key in found.values}
        for key in found.values:
            if (other := written[RENAMED.get(key, key)]) != key:
                raise ConfigError(f"{found.at(key)}: {key} and {other} are one hyperparameter. Remove one.")
        values = {name: found.values[key] for name, key in written.items()}
        known = {f.name: f for f in dataclasses.fields(cls)}
        for key in values:
            if key not in known:
                raise ConfigError(
                    f"{found.at(str(key))}: unknown hyperparameter {shown(key)}.{did_you_mean(str(key), known)} "
                    f"Known: {first_of(list(known), 10)}; the files in data/hyps have them."
                )
        where = {name: f"{found.at(key)}: {key}" for name, key in written.items()}
        return {name: _value(value, where[name], known[name].metadata) for name, value in values.items()}

    def as_dict(self) -> dict[str, Any]:
        """Return a plain mapping without optional keys at their default."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default}


def _value(value: Any, where: str, metadata: Mapping[str, Any]) -> Any:
    if "by_class" in metadata:
        return _by_class(value, where, metadata)
    if "low" in metadata:
        return _number(value, where, metadata)
    return _choice(value, where, metadata["choices"])


def _choice(value: Any, where: str, choices: Sequence[str]) -> str:
    matching = [choice for choice in choices if isinstance(value, str) and choice.lower() == value.lower()]
    if not matching:
        hint = did_you_mean(value, choices) if isinstance(value, str) else ""
        raise ConfigError(f"{where}: found {shown(value)}, expected one of {', '.join(filter(None, choices))}.{hint}")
    return matching[0]


def _by_class(value: Any, where: str, metadata: Mapping[str, Any]) -> str:
    """Return "auto", "", or a one-line JSON object of numbers by class name."""
    text = value.strip() if isinstance(value, str) else value
    if isinstance(text, str):
        if text.lower() in ("", AUTO):
            return text.lower()
        with contextlib.suppress(ValueError, RecursionError):
            text = json.loads(text)
    if not isinstance(text, dict) or not text:
        example = '{"king": 2}'
        raise ConfigError(f"{where}: found {shown(value)}, expected {AUTO}, or weights by class name: {example}.")
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


def load_hyp(hyp: str | Path, *words: str) -> Hyp:
    """Read a hyperparameter YAML that has every key, searched for as given, then in data/hyps/; `words` change values.

    Raises:
        ConfigError: no such file, not YAML, or a key or value that is missing or not allowed.
    """
    return dataclasses.replace(Hyp.from_yaml(_read_hyp(hyp)), **given_hyp(words))


def given_hyp(words: Sequence[str]) -> dict[str, Any]:
    """Return the values of `--hyp`: of files, which may lack keys, and of key=value. Later words win.

    Raises:
        ConfigError: no such file, not YAML, or a key or value that is not allowed.
    """
    values: dict[str, Any] = {}
    for word in words:
        if assigned := _ASSIGNMENT.fullmatch(word):
            values |= Hyp.checked(YamlMapping("--hyp", {assigned[1].replace("-", "_"): assigned[2]}))
        else:
            values |= Hyp.checked(_read_hyp(word))
    return values


def complete_hyp(words: Sequence[str], base: Sequence[str], base_hyp: Hyp) -> tuple[tuple[str, ...], Hyp]:
    """Return the words of `--hyp` and their values; what they leave out is that of `base`, which then comes first."""
    values = given_hyp(words)
    if not Hyp.missing(values):
        return tuple(words), Hyp(**values)
    hyp = dataclasses.replace(base_hyp, **values)
    pairs = {key: (getattr(base_hyp, key), getattr(hyp, key)) for key in values}
    if changed := [f"{key} {was} → {now}" for key, (was, now) in pairs.items() if was != now]:
        log.info(row("Changed", f"{', '.join(changed)} (--hyp)"))
    repeated = tuple(base[-len(words) :]) == tuple(words)  # the same command, started again
    return (tuple(base) if repeated else (*base, *words)), hyp


def _read_hyp(hyp: str | Path) -> YamlMapping:
    given = user_path(hyp, "--hyp")
    tried = list(dict.fromkeys((given, HYPS_DIR / given)))
    path = next((p for p in tried if os.path.isfile(p)), None)  # noqa: PTH113 - pathlib's raises where it may not look
    if path is None:
        choices = sorted(p.name for p in HYPS_DIR.glob("*.yaml"))
        places = "\n  ".join(map(shown, tried))
        raise ConfigError(
            f"--hyp {shown(given)}: no such file.{did_you_mean(given.name, choices)} Tried\n  {places}\n"
            f"Available: {', '.join(choices)}. Single values are given as key=value, such as mosaic=0."
        )
    return read_yaml(path, "'key: value' lines")


def split_teacher(teacher: str) -> tuple[str, str]:
    """Return the file and the digest of a resolved `--teacher`; "" for none."""
    name = _DIGEST.sub("", teacher)
    return name, teacher[len(name) :]


@dataclass(frozen=True)
class TrainConfig(Options):
    """Train a detector."""

    program = "train.py"
    settings: ClassVar[Mapping[str, str]] = {f.name: "--hyp" for f in dataclasses.fields(Hyp)}

    weights: str = option(
        AUTO,
        "initial weights: a checkpoint, a published file by name (--list-weights) or imagenet (backbone); '' = from "
        "scratch; auto = tessera-n (pretrained on synthetic shapes) without --cfg and below 10,000 batches, else ''",
    )
    cfg: str = option(
        "", "model YAML, searched for in models/ too (default: the model of the weights, else tessera-n.yaml)"
    )
    data: str = option("shapes.yaml", "dataset YAML, searched for in data/ too")
    hyp: tuple[str, ...] = option(
        (),
        "hyperparameters: key=value and YAML files, searched for in data/hyps/ too; what they leave out is chosen by "
        "model, weights and length",
        many=True,
    )
    epochs: int = option(100, "number of epochs", kind=int, low=1)
    batch_size: int = option(16, "total batch size over all ranks; -1 = AutoBatch", "--batch", kind=int, low=-1)
    imgsz: ImageSize = imgsz_option(640)
    tile: int = option(
        0, "split large images into tiles of N pixels, in addition to the whole image (0 = off)", kind=int, low=32
    )
    overlap: float = option(
        0.2, "minimum overlap of neighbouring tiles, as a fraction of a tile", kind=float, low=0, high=0.9
    )
    rect: bool = option(False, "rectangular training: each batch holds images of similar aspect ratio", kind=bool)
    resume: str = option(
        "",
        "resume a run: a checkpoint or run directory; auto = the run --project/--name, started if missing; bare = the "
        "newest under --project",
        bare="newest",
    )
    nosave: bool = option(False, "save only after the last epoch", kind=bool)
    noval: bool = option(False, "validate only after the last epoch", kind=bool)
    noautoanchor: bool = option(False, "disable AutoAnchor: keep the model's anchors", kind=bool)
    noplots: bool = option(False, "save no plots or sample images", kind=bool)
    noreport: bool = option(False, "do not write report.html", kind=bool)
    teacher: str = option(
        AUTO,
        "checkpoint that teaches the classes which images do not label (`labelled` in the dataset's YAML); none; auto "
        "= the initial weights, if they know such a class",
    )
    evolve: int = option(
        0, "search hyperparameters in N trials, and train the best ones again (bare: 300)", kind=int, low=0, bare=300
    )
    metric: str = option(
        "fitness",
        "metric that best.pt, early stopping and --evolve maximise, such as map, recall@p=0.95 or 'map - 0.01*ms'",
        "--objective",
    )
    cache: CacheMode = option(
        "none",
        "cache decoded images, once per node, in ram (bare) or on disk",
        choices=("none", "ram", "disk"),
        bare="ram",
    )
    image_weights: bool = option(False, "sample images of classes with low mAP more often", kind=bool)
    sampling: Sampling = option(
        "shuffled",
        "shuffled = each image once per epoch; balanced = images of rare classes more often",
        choices=("shuffled", "balanced"),
    )
    device: str = option("", "cpu, 0, 0,1 or mps; under torchrun each rank takes its own GPU")
    multi_scale: bool = option(False, "vary the image size by ±50 %% from batch to batch", kind=bool)
    single_cls: bool = option(False, "treat all classes as one", kind=bool)
    optimizer: str = option(
        "",
        f"optimizer: {', '.join(OPTIMIZERS)}, or module:name of a factory of your own (default: from the "
        "hyperparameters)",
    )
    sync_bn: bool = option(False, "synchronise BatchNorm statistics across ranks", kind=bool)
    workers: int = option(8, "data loader workers per rank, at most its CPUs", kind=int, low=0, high=1024)
    project: str = option("runs/train", "parent folder of run directories")
    name: str = option("exp", "name of the run directory")
    exist_ok: bool = option(False, "write into an existing run directory instead of a new one", kind=bool)
    cos_lr: bool = option(False, "cosine learning-rate schedule instead of a linear one", kind=bool)
    label_smoothing: float = option(0.0, "label smoothing epsilon", kind=float, low=0, high=0.999)
    patience: int = option(100, "stop after N epochs without improvement (0 = off)", kind=int, low=0)
    head: str = option(
        "", "head of your own, module:name of a class, instead of the last layer of the YAML (docs/model-yaml.md)"
    )
    freeze: tuple[int, ...] = option(
        (),
        "freeze the first N layers, or the listed ones (default: from the hyperparameters)",
        kind=int,
        low=0,
        many=True,
    )
    save_period: int = option(-1, "also save epochN.pt every N epochs (-1 = off)", kind=int, low=-1)
    save_steps: int = option(0, "also save last.pt every N optimizer steps (0 = off)", kind=int, low=0)
    seed: int = option(0, "random seed", kind=int, low=0, high=2**63 - 1)
    local_rank: int = option(-1, "set by torch.distributed.launch", "--local_rank", kind=int, low=-1)
    amp: str = option("auto", "mixed precision", choices=("auto", "bf16", "fp16", "off"))
    compile: bool = option(False, "torch.compile the model", kind=bool)
    close_mosaic: int = option(
        -1, "disable mosaic and mixup for the last N epochs (-1 = from the hyperparameters)", kind=int, low=-1
    )
    transforms: tuple[str, ...] = option(
        (),
        "own functions on each training sample: module:name (after all others) or module:name@stage (before mosaic, "
        "mixup, hsv or albumentations)",
        many=True,
    )
    deterministic: bool = option(False, "use deterministic kernels, for bit-reproducible runs", kind=bool)
    profile: bool = option(False, "print times per epoch, and write a torch.profiler trace of a few steps", kind=bool)
    # --log is the older name. Under torchrun, which has flags of its own that begin with it, it cannot be typed.
    loggers: str = option("tensorboard", f"comma-separated list of {', '.join(LOGGER_NAMES)}; or none", "--log")
    callbacks: tuple[str, ...] = option((), "observers of your own, each module:name of a class", many=True)
    check_data: bool = option(False, "check the dataset, print all problems, and exit", kind=bool)
    report: str = option(
        "", "with --check-data: also write data_report.html to this folder (bare: runs/data)", bare="runs/data"
    )

    def __post_init__(self) -> None:
        hyp: Any = self.hyp
        if isinstance(hyp, Mapping):
            words = {k: json.dumps(v) if isinstance(v, Mapping) else v for k, v in hyp.items()}
            hyp = tuple(f"{key}={value}" for key, value in words.items())
        object.__setattr__(self, "hyp", hyp or ())  # "" in checkpoints of 0.1
        object.__setattr__(self, "transforms", placed_part_names(self.transforms, "transforms"))
        super().__post_init__()
        if ":" not in self.optimizer:
            object.__setattr__(self, "optimizer", _choice(self.optimizer, "--optimizer", ("", *OPTIMIZERS)))
        if self.batch_size == 0:
            raise ConfigError("--batch-size 0: expected at least 1, or -1 for AutoBatch.")
        if self.image_weights and self.sampling == "balanced":
            raise ConfigError(
                "--sampling balanced with --image-weights: both select the images of an epoch, one by how rare their "
                "classes are, one by the classes' mAP. Leave out one of them."
            )
        if self.evolve and self.resume == "auto":
            raise ConfigError(
                "--evolve with --resume auto: start or join a search with --name and --exist-ok; continue one with "
                "--resume DIRECTORY, or bare --resume for the newest."
            )
        if self.report and not self.check_data:
            raise ConfigError(
                "--report without --check-data: it writes the page of the dataset checks. Add --check-data; a "
                "training writes report.html unless --noreport."
            )
        if self.check_data and self.resume not in ("", AUTO):
            raise ConfigError("--check-data with --resume: it checks the dataset of --data. Omit --resume.")
        if self.overlap != TrainConfig.overlap and not (self.tile or self.resume):
            raise ConfigError("--overlap without --tile has no effect. Give --tile, or omit --overlap.")
        if not self.data:
            raise ConfigError("--data: found nothing, expected a dataset YAML such as coco128.yaml.")
        parse_objective(self.metric)
        _ = self.logger_names

    @property
    def logger_names(self) -> tuple[str, ...]:
        """Names in `--loggers`, each once, in their order; "none" and "" are no tracker."""
        names = [name.strip() for name in self.loggers.split(",")]
        known = (*LOGGER_NAMES, "none")
        for name in names:
            if name and name not in known:
                if name in _FORMER_LOGGERS:
                    raise ConfigError(
                        f"--loggers {name}: no longer supported. It reads TensorBoard's files: give --loggers "
                        "tensorboard, or an observer of your own with --callbacks (docs/trackers.md)."
                    )
                hint = did_you_mean(name, known)
                raise ConfigError(f"--loggers: unknown tracker {shown(name)}.{hint} Known: {', '.join(known)}.")
        return tuple(dict.fromkeys(name for name in names if name in LOGGER_NAMES))

    @property
    def own_parts(self) -> dict[str, tuple[str, ...]]:
        """Parts of the user's own by flag, each module:name."""
        values = {name: getattr(self, name) for name in OWN_PARTS}
        named = {k: tuple(p for p in ((v,) if isinstance(v, str) else v) if ":" in p) for k, v in values.items()}
        return {name: parts for name, parts in named.items() if parts}

    def own_part_flags(self, *names: str) -> str:
        """Return " --head module:name" and the like, of `names` or of all own parts, for command lines in messages."""
        return "".join(
            f" --{name} {shlex.join(parts)}" for name, parts in self.own_parts.items() if name in (names or OWN_PARTS)
        )

    @property
    def frozen_layers(self) -> tuple[int, ...]:
        """Indices of the layers to freeze: one number N is the first N layers, several are indices."""
        return tuple(range(self.freeze[0])) if len(self.freeze) == 1 else self.freeze
