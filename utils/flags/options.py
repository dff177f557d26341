"""Command-line flags as fields of a frozen dataclass, from which the Python API and opt.yaml follow too."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import itertools
import logging
import math
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import yaml

from tessera.utils.environment import cache_dir, configure_command
from tessera.utils.errors import ConfigError, did_you_mean
from tessera.utils.extensions import extension
from tessera.utils.files import atomic_write, check_path, suffix_of, user_path
from tessera.utils.flags.json_output import FLAG
from tessera.utils.flags.program import called, git_revision
from tessera.utils.flags.version import __version__
from tessera.utils.image_size import ImageSize, image_size
from tessera.utils.text import one_line, shown
from tessera.utils.user_parts import part_names
from tessera.utils.yaml_file import dump_yaml

log = logging.getLogger(__name__)

LARGEST_NUMBER = 2**31 - 1  # of flags without a limit
COMPATIBILITY = "Compatibility"
# Groups of --help and the fields of all commands in each, in order.
_GROUPS = {
    "Model and weights": "models a b weights trust_file cfg head freeze noautoanchor",
    "Data": "source data task imgsz batch_size rect tile overlap single_cls cache check_data report",
    "Training": "epochs hyp teacher optimizer cos_lr label_smoothing patience metric noval seed evolve objective",
    "Augmentation and sampling": "close_mosaic transforms multi_scale sampling image_weights",
    "Prediction": "conf_thres iou_thres max_det classes agnostic_nms augment end2end track vid_stride every_frame",
    "Export": "include raw batched int8 opset max_drop license",
    "Distributed and performance": "device sync_bn workers threads amp half compile deterministic profile",
    "Checkpoints and output": (
        "resume project name exist_ok output nosave save_period save_steps noplots noreport verbose find_errors "
        "require save_txt save_conf save_json save_csv save_crop auto_label line_thickness hide_labels hide_conf"
    ),
    "Logging": "loggers callbacks",
    COMPATIBILITY: "local_rank",
}
GROUPS = {title: tuple(names.split()) for title, names in _GROUPS.items()}
_PATHS = frozenset(
    ["models", "a", "b", "weights", "cfg", "data", "hyp", "resume", "project", "name", "output", "report"]
)
_PARTS = ("head", "optimizer", "callbacks")  # module:name, in Python also the function or class


def option(
    default: Any,
    help: str,
    *flags: str,
    kind: type = str,
    low: float | None = None,
    high: float | None = None,
    choices: Sequence[str] = (),
    bare: Any = None,
    many: bool = False,
    positional: str = "",
    pair: bool = False,
) -> Any:
    """A field that is a flag.

    Args:
        default: the value if the flag is not given.
        help: one line for --help.
        flags: further spellings beside `--field-name`.
        kind: bool (a switch), int, float or str.
        low, high: range of a number; a default outside it has a meaning of its own and is allowed too.
        choices: allowed words.
        bare: the value of the flag without an argument.
        many: takes one or more values.
        positional: name in --help of values given without a flag; "" = a flag is needed.
        pair: takes one number, or two, as an ImageSize.
    """
    metadata = {"help": help, "flags": flags, "kind": kind, "low": low, "high": high, "choices": choices, "bare": bare}
    metadata |= {"default": default, "many": many or bool(positional), "positional": positional, "pair": pair}
    return field(default=default, metadata=metadata)


def weights_option(what: str) -> Any:
    """Return the field `--weights` of commands that use a trained model."""
    return option("", f"{what} (default: best.pt of the newest run in runs/train)")


def imgsz_option(default: int, note: str = "") -> Any:
    """Return the field `--imgsz`, an ImageSize."""
    text = "image size in pixels: long side, or height width" + (f" ({note})" if note else "")
    return option(default, text, "--img", "--img-size", kind=int, low=32, high=8192, pair=True)


def trust_file_option() -> Any:
    """Return the field `--trust-file` of commands that take exported files."""
    text = "run a .torchscript file; such a file can run any code, so trust its author"
    return option(False, text, kind=bool)


def head_option() -> Any:
    """Return the field `--head` of commands that load a checkpoint."""
    return option("", "head of your own that the checkpoint ends in, module:name of a class (docs/model-yaml.md)")


def threads_option() -> Any:
    """Return the field `--threads`."""
    text = "CPU threads per process (0 = one per available core)"
    return option(0, text, kind=int, low=0, high=1024)


def parsed_confidence(text: str, expected: str = "a number from 0 to 1") -> float | None:
    """Return the number that `--conf-thres` gives, or None for "".

    Raises:
        ConfigError: not a number from 0 to 1.
    """
    if not text.strip():
        return None
    with contextlib.suppress(ValueError):
        if 0 <= float(text) <= 1:
            return float(text)
    raise ConfigError(f"--conf-thres: found {shown(text)}, expected {expected}.")


@dataclass(frozen=True)
class Options:
    """Flags of a command."""

    program: ClassVar[str]  # file name of the command
    settings: ClassVar[Mapping[str, str]] = {}  # no flags of their own: name → the flag that takes name=value
    weights_fields: ClassVar[tuple[str, ...]] = ("weights",)  # fields that name weight files

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            value = _checked(part_names(value, f.name) if f.name in _PARTS else value, f)
            object.__setattr__(self, f.name, value)
            for path in (value if isinstance(value, tuple) else [value]) if f.name in _PATHS else ():
                if not (f.name == "hyp" and "=" in path):
                    user_path(path, f.metadata["positional"] or flags_of(f)[0])
        name = getattr(self, "name", "exp")
        if not name.strip("/. "):
            raise ConfigError(f"--name {shown(name)}: expected a name for the run directory.")

    @classmethod
    def named(cls, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return fields from Python keyword arguments, in any spelling of a flag (`batch`, `batch_size`, …).

        Raises:
            ConfigError: an unknown name.
        """
        names = {keyword_of(flag): f.name for f in dataclasses.fields(cls) for flag in flags_of(f)}
        former = {keyword_of(flag): flag for flag in yolov5_flags(cls.program)}
        given, idle = replaced_flags(
            cls.program, [former[key] for key, value in kwargs.items() if key in former and value]
        )
        if idle:
            log.warning(idle)
        for key, value in kwargs.items():
            if key in former:
                continue
            if key not in names:
                if flag := cls.settings.get(key):
                    raise ConfigError(
                        f"{key}: found a setting of {flag}. Give {keyword_of(flag)}={{{key!r}: {value!r}}}."
                    )
                hint = did_you_mean(key, names)
                raise ConfigError(f"unknown option {shown(key)}.{hint} Known: {', '.join(sorted(names))}.")
            given[names[key]] = _dataset_file(value) if key == "data" and isinstance(value, Mapping) else value
        return given

    @classmethod
    def from_args(cls, argv: Sequence[str]) -> dict[str, Any]:
        """Parse a command line; return only the fields that it gives.

        Raises:
            ConfigError: an unknown flag.
        """
        parser = _Parser(
            prog=called(cls.program), argument_default=argparse.SUPPRESS, description=cls.__doc__, add_help=False
        )
        fields = {f.name: f for f in dataclasses.fields(cls)}
        report: dict[str, Any] = {"action": _Report, "dest": argparse.SUPPRESS, "nargs": 0}
        for title, names in GROUPS.items():
            group = parser.add_argument_group(title)
            for f in (fields[name] for name in names if name in fields):
                _add_flag(group, f)
                if f.name == cls.weights_fields[-1]:
                    text = "list the published weights that can be given by name, and exit"
                    table = lambda: extension("published weights").published_table()  # noqa: E731
                    group.add_argument("--list-weights", const=table, help=text, **report)
            if title == "Logging":
                text = "print one JSON object to stdout at the end, everything else to stderr (docs/json.md)"
                group.add_argument(FLAG, action="store_true", dest=FLAG, help=text)
                group.add_argument(
                    "--version", const=version_line, help="print versions and device, and exit", **report
                )
                group.add_argument("-h", "--help", action="help", help="show this help, and exit")
            if title == COMPATIBILITY and (ignored := ignored_flags(cls.program)):
                group.description = f"YOLOv5 flags accepted with a warning and ignored: {' '.join(ignored)}"
        words, former = split_flags(cls.program, argv)
        own = {flag for f in fields.values() for flag in flags_of(f)}
        for word, following in itertools.pairwise([*words, ""]):
            flag, equals, value = word.partition("=")
            if flag.startswith("--") and flag not in own and (setter := cls.settings.get(key := keyword_of(flag))):
                value = value if equals else following * (following[:2] != "--")
                raise ConfigError(
                    f"{flag}: no flag, but a setting of {setter}. Give {setter} {key}={value or 'VALUE'}."
                )
        pairs = [flag for f in fields.values() if f.metadata["pair"] for flag in flags_of(f)]
        given = vars(parser.parse_intermixed_args(_join_numbers(words, pairs)))
        given.pop(FLAG, None)  # `JsonOutput` has read it before
        return {**replaced_flags(cls.program, former)[0], **given}

    @classmethod
    def warning(cls, argv: Sequence[str]) -> str:
        """Return one line that names the ignored flags of a command line, or ""."""
        return replaced_flags(cls.program, split_flags(cls.program, argv)[1])[1]

    @property
    def given(self) -> dict[str, Any]:
        """Fields that differ from their defaults, without those that a launcher sets."""
        values = {f.name: (getattr(self, f.name), f.default) for f in dataclasses.fields(self)}
        return {name: value for name, (value, own) in values.items() if value != own and name != "local_rank"}

    def as_args(self) -> list[str]:
        """Return the command line that gives these values."""
        words = []
        for name, value in self.given.items():
            words.append("--" + name.replace("_", "-"))
            if value is not True:
                words += map(str, value) if isinstance(value, tuple) else [str(value)]
        return words

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for opt.yaml and checkpoints."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}


def _dataset_file(values: Mapping[str, Any]) -> str:
    """Return a dataset YAML in the cache for the keys of one; every later command and a resume read it there.

    Its `path` is relative to the working directory first.
    """
    root = Path.cwd() / str(values.get("path") or "")
    try:
        text = dump_yaml({**values, "path": root} if root.exists() else values)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"data: found a value that is no text, number, list or mapping: {one_line(str(error), 100)}."
        ) from error
    path = cache_dir() / "data" / f"{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}.yaml"
    with atomic_write(path) as file:
        file.write(text.encode())
    return str(path)


def keyword_of(flag: str) -> str:
    """Return the keyword argument of a flag: batch_size for --batch-size."""
    return flag.lstrip("-").replace("-", "_")


def flags_of(f: dataclasses.Field[Any]) -> tuple[str, ...]:
    """Return all spellings of a field's flag."""
    return ("--" + f.name.replace("_", "-"), *f.metadata["flags"])


def _join_numbers(words: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Join the numbers after each of some flags, or its abbreviation, to one word, since a positional may follow."""
    joined: list[str] = []
    takes_number = False  # whether the words before do
    for word in words:
        number = word.lstrip("-").replace(".", "", 1).isdecimal()
        if takes_number and number and not joined[-1].startswith("--"):
            joined[-1] += f" {word}"
        else:
            joined.append(word)
        is_flag = len(word) > 2 and any(flag.startswith(word) for flag in flags)
        takes_number = is_flag or (takes_number and number)
    return joined


def _checked(value: Any, f: dataclasses.Field[Any]) -> Any:
    """Return the value of field `f`, converted; raise ConfigError if it is not allowed."""
    m, flag = f.metadata, flags_of(f)[0]
    if m["pair"]:
        return _pair(value, flag, m)
    if m["many"]:
        return tuple(_scalar(v, flag, m) for v in (value if isinstance(value, (list, tuple)) else [value]))
    if m["bare"] is not None and isinstance(value, bool):  # run(cache=True) is the bare flag
        value = m["bare"] if value else f.default
    return _scalar(value, flag, m)


def _pair(value: Any, flag: str, m: Mapping[str, Any]) -> ImageSize:
    sides = value.split() if isinstance(value, str) else value if isinstance(value, (list, tuple)) else [value]
    if len(sides) not in (1, 2):
        found = shown(" ".join(map(str, sides)))
        raise ConfigError(f"{flag}: found {found}, expected one number, the long side, or two, height and width.")
    if len(sides) == 1:
        return image_size(_scalar(sides[0], flag, m))
    return image_size([_scalar(side, flag, {**m, "default": None}) for side in sides])


def _scalar(value: Any, flag: str, m: Mapping[str, Any]) -> Any:
    kind = m["kind"]
    if kind is bool:
        if not isinstance(value, bool):
            raise ConfigError(f"{flag}: found {shown(value)}, expected true or false.")
        return value
    if kind is str:
        value = "" if value is None else str(value)
        value = YOLOV5_VALUES.get((flag, value), value)
        check_path(value, flag)
        if not m["choices"]:
            return value
        for choice in m["choices"]:
            if choice.lower() == value.lower():
                return choice
        choices = ", ".join(filter(None, m["choices"]))
        hint = did_you_mean(value, m["choices"])
        raise ConfigError(f"{flag}: found {shown(value)}, expected one of {choices}.{hint}")
    try:
        number = kind(value)
        exact = not isinstance(value, bool) and (isinstance(value, str) or number == value)
        exact = exact and math.isfinite(number)
    except (TypeError, ValueError, OverflowError):
        exact = False
    if not exact:
        wanted = "a whole number" if kind is int else "a number"
        wanted += ", or two: height width" * m["pair"]
        raise ConfigError(f"{flag}: found {shown(value)}, expected {wanted}.")
    low, high, default = m["low"], m["high"], m["default"]
    is_outside = (low is not None and number < low) or (high is not None and number > high)
    if is_outside and number != default:
        allowed = f"at least {low:g}" if high is None else f"{low:g} to {high:g}"
        if isinstance(default, (int, float)) and default < low:
            allowed += f", or {default:g}"
        raise ConfigError(f"{flag}: found {number}, allowed is {allowed}.")
    if high is None and number > LARGEST_NUMBER:
        raise ConfigError(f"{flag}: found {number}, allowed is at most {LARGEST_NUMBER:,}.")
    return number


class _Parser(argparse.ArgumentParser):
    """Raises ConfigError, with a suggestion, instead of leaving the process."""

    def error(self, message: str) -> NoReturn:
        marker = "unrecognized arguments: "
        if message.startswith(marker):
            word = message[len(marker) :].split()[0]
            known = [flag for action in self._actions for flag in action.option_strings]
            hint = did_you_mean(word.split("=")[0], known) or _flag_hint(word, known)
            raise ConfigError(f"{self.prog}: unknown argument {shown(word)}.{hint} See {self.prog} --help.")
        raise ConfigError(f"{self.prog}: {one_line(message, 300)}. See {self.prog} --help.")


def _flag_hint(word: str, known: Sequence[str]) -> str:
    """Return a hint that names the flag of a value given without one, such as `--check-data FOLDER`; else ""."""
    flags = {".yaml": "--data", ".yml": "--data", ".pt": "--weights"}
    flag = (
        "--hyp"
        if "=" in word and "--hyp" in known
        else flags.get(suffix_of(word)) or ("--source" if "--source" in known else "--data")
    )
    return "" if word.startswith("-") or flag not in known else f" Is it the value of {flag}?"


class _Report(argparse.Action):
    """Action that prints what the function `const` returns, and exits."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        report: Callable[[], str] = self.const
        print(report())
        parser.exit()


def _add_flag(parser: argparse._ArgumentGroup, f: dataclasses.Field[Any]) -> None:
    m = f.metadata
    if m["positional"]:
        parser.add_argument(f.name, nargs="*", metavar=m["positional"], help=m["help"])
        return
    if m["kind"] is bool:
        parser.add_argument(*flags_of(f), dest=f.name, action="store_true", help=m["help"])
        return
    text = m["help"]
    if "default:" not in text and f.default not in ((), "") and f"({f.default} = " not in text:
        words = map(str, f.default) if isinstance(f.default, tuple) else [str(f.default)]
        text += f" (default: {' '.join(words)})"
    extra: dict[str, Any] = {"nargs": "+"} if m["many"] else {}
    if m["bare"] is not None:
        extra = {"nargs": "?", "const": m["bare"]}
    metavar = "{" + ",".join(filter(None, m["choices"])) + "}" if m["choices"] else m["kind"].__name__.upper()
    parser.add_argument(*flags_of(f), dest=f.name, metavar=metavar, help=text, **extra)


def version_line() -> str:
    """Return the versions of Tessera (with its git revision), Python and torch, and the default device."""
    configure_command()
    choose = import_module("tessera.utils.machine.accelerator")
    revision = git_revision()
    program = f"tessera {__version__}" + (f" (git {revision})" if revision else "")
    torch = import_module("torch").__version__
    return f"{program}, Python {platform.python_version()}, torch {torch}, device {choose.default_device()}"


_SEARCH = "a search continues from its own folder: --evolve 300 --resume runs/evolve/exp."
# Command → flag of YOLOv5 ("=" if it may take a value) → fields that replace it, an error message, or "" for an ignored
# flag.
_YOLOV5_FLAGS: Mapping[str, Mapping[str, Mapping[str, Any] | str]] = {
    "train.py": {
        "--adam": {"optimizer": "Adam"},
        "--notest": {"noval": True},
        "--cache-images": {"cache": "ram"},
        "--linear-lr": {"cos_lr": False},
        "--evolve-population=": _SEARCH,
        "--resume-evolve=": _SEARCH,
        **dict.fromkeys(("--quad", "--log-artifacts", "--ndjson-console", "--ndjson-file"), ""),
        **dict.fromkeys(("--entity=", "--upload-dataset=", "--bbox-interval=", "--artifact-alias="), ""),
        **dict.fromkeys(("--bucket=", "--log-imgs="), ""),
    },
    "val.py": dict.fromkeys(("--dnn", "--save-hybrid"), ""),
    "detect.py": dict.fromkeys(("--view-img", "--visualize", "--update", "--dnn"), ""),
    "export.py": {
        # The exported graph is dynamic, simplified and includes NMS.
        **dict.fromkeys(("--dynamic", "--simplify", "--nms", "--inplace", "--verbose", "--optimize", "--keras"), ""),
        **dict.fromkeys(("--per-tensor", "--train", "--mlmodel"), ""),
        **dict.fromkeys(("--batch-size=", "--workspace=", "--topk-per-class=", "--cache="), ""),
        "--agnostic-nms": "the exported NMS is per class. Export with --raw and run your own NMS.",
        "--topk-all=": "give --max-det instead.",
    },
}
YOLOV5_VALUES = {("--cache", "images"): "ram"}  # flag and value of YOLOv5 → value here


def yolov5_flags(program: str) -> dict[str, bool]:
    """Return a command's YOLOv5 flags, each with whether a value may follow."""
    return {flag.rstrip("="): flag.endswith("=") for flag in _YOLOV5_FLAGS.get(program, {})}


def ignored_flags(program: str) -> list[str]:
    """Return the YOLOv5 flags that a command ignores."""
    return [flag.rstrip("=") for flag, instead in _YOLOV5_FLAGS.get(program, {}).items() if not instead]


def replaced_flags(program: str, flags: Iterable[str]) -> tuple[dict[str, Any], str]:
    """Return the fields that YOLOv5 flags set, and a warning that names the ignored ones, or "".

    Raises:
        ConfigError: a flag without an equivalent.
    """
    table = {flag.rstrip("="): instead for flag, instead in _YOLOV5_FLAGS.get(program, {}).items()}
    fields: dict[str, Any] = {}
    idle: list[str] = []
    for flag in flags:
        instead = table[flag]
        if isinstance(instead, Mapping):
            fields |= instead
        elif instead:
            raise ConfigError(f"{flag}: {instead}")
        else:
            idle.append(flag)
    return fields, f"{' '.join(idle)}: YOLOv5 flags that have no effect." if idle else ""


def split_flags(program: str, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into words without YOLOv5 flags, with dashes for underscores, and these flags."""
    former = yolov5_flags(program)
    words: list[str] = []
    found: list[str] = []
    may_follow = False  # a value of the last flag found
    for word in argv:
        flag, equals, value = word.partition("=")
        if flag.startswith("--"):
            flag = flag.replace("_", "-")
            may_follow = former.get(flag, False) and not equals
            if flag in former:
                found.append(flag)
            else:
                words.append(f"{flag}{equals}{value}")
        else:
            if not may_follow:
                words.append(word)
            may_follow = False
    return words, found
