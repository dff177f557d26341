"""Flags as fields of a frozen dataclass.

A flag is a field with its command-line spelling beside it, so the command line, `run(**kwargs)` and opt.yaml cannot
drift apart.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, ClassVar, NoReturn

from tessera.utils.environment import quieten_torch
from tessera.utils.errors import ConfigError, did_you_mean
from tessera.utils.files import user_path
from tessera.utils.flags.json_output import FLAG
from tessera.utils.flags.model_zoo import published_table
from tessera.utils.flags.program import called, git_revision
from tessera.utils.flags.version import __version__
from tessera.utils.flags.yolov5_flags import FORMER_WORDS, former_flags, meaning, parted, without_effect
from tessera.utils.text import one_line, shown

log = logging.getLogger(__name__)

LARGEST_NUMBER = 2**31 - 1  # where a flag has no limit of its own


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
) -> Any:
    """A field that is a flag.

    Args:
        default: its value where the flag is not given.
        help: one line for --help.
        flags: further spellings; `--field-name` comes by itself.
        kind: bool (a switch), int, float or str.
        low, high: range of a number; a default outside it stands for something else, and is allowed too.
        choices: allowed words.
        bare: the value of the flag without an argument.
        many: takes one or more values.
        positional: what --help calls values that are given without a flag, any number; "" where a flag is needed.
    """
    metadata = {"help": help, "flags": flags, "kind": kind, "low": low, "high": high, "choices": choices, "bare": bare}
    metadata |= {"default": default, "many": many or bool(positional), "positional": positional}
    return field(default=default, metadata=metadata)


def trust_file_option() -> Any:
    """The field of the commands that take exported files: whether one that is a program may run."""
    text = "run a .torchscript or .pt2 file: a program that can do anything, so only where its maker is trusted"
    return option(False, text, kind=bool)


def threads_option() -> Any:
    """The field of the commands that compute with a checkpoint: how many processors of the host they may keep busy."""
    text = "threads that compute on the CPU, of each process; 0 = one a processor that it has"
    return option(0, text, kind=int, low=0, high=1024)


def parsed_confidence(text: str, expected: str = "a number from 0 to 1") -> float | None:
    """What `--conf-thres` says; None where it says nothing.

    Raises:
        ConfigError: it is no number from 0 to 1.
    """
    if not text.strip():
        return None
    with contextlib.suppress(ValueError):
        if 0 <= float(text) <= 1:
            return float(text)
    raise ConfigError(f"--conf-thres: found {shown(text)}, expected {expected}.")


@dataclass(frozen=True)
class Options:
    """Flags of a command: checks, parsing, plain form."""

    program: ClassVar[str]  # the command that takes them
    weights_fields: ClassVar[tuple[str, ...]] = ("weights",)  # the fields that name files of weights

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            object.__setattr__(self, f.name, _checked(getattr(self, f.name), f))
        name = getattr(self, "name", "exp")
        if not name.strip("/. "):
            raise ConfigError(f"--name {shown(name)}: expected a name for the run's folder.")

    @classmethod
    def named(cls, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Fields from Python names; every spelling of a flag is known (`batch`, `batch_size`, `img`, `imgsz` …).

        Raises:
            ConfigError: an unknown name.
        """
        names = {flag.lstrip("-").replace("-", "_"): f.name for f in dataclasses.fields(cls) for flag in _flags(f)}
        former = {flag.lstrip("-").replace("-", "_"): flag for flag in former_flags(cls.program)}
        given, idle = meaning(cls.program, [former[key] for key, value in kwargs.items() if key in former and value])
        if idle:
            log.warning(idle)
        for key, value in kwargs.items():
            if key in former:
                continue
            if key not in names:
                hint = did_you_mean(key, names)
                raise ConfigError(f"unknown option {shown(key)}.{hint} Known: {', '.join(sorted(names))}.")
            given[names[key]] = value
        return given

    @classmethod
    def from_args(cls, argv: Sequence[str]) -> dict[str, Any]:
        """Parse a command line to the fields that were given, and only those.

        Raises:
            ConfigError: an unknown flag.
        """
        idle = " ".join(without_effect(cls.program))
        parser = _Parser(
            prog=called(cls.program),
            argument_default=argparse.SUPPRESS,
            description=cls.__doc__,
            epilog=f"Flags of YOLOv5 that are accepted, with a warning, and have no effect: {idle}" if idle else None,
        )
        answer: dict[str, Any] = {"action": _Answer, "dest": argparse.SUPPRESS, "nargs": 0}
        for f in dataclasses.fields(cls):
            _add_flag(parser, f)
            if f.name == cls.weights_fields[-1]:
                listed = "list the published weights that can be given by name, and end"
                parser.add_argument("--list-weights", const=published_table, help=listed, **answer)
        told = "print one JSON object to stdout at the end, and all else to stderr (docs/json.md)"
        parser.add_argument(FLAG, action="store_true", dest=FLAG, help=told)
        told = "print the versions of this program, Python and torch, and the device, and end"
        parser.add_argument("--version", const=version_line, help=told, **answer)
        words, former = parted(cls.program, argv)
        given = vars(parser.parse_intermixed_args(words))
        given.pop(FLAG, None)  # `Answer` has seen it before the others were read
        return {**meaning(cls.program, former)[0], **given}

    @classmethod
    def warning(cls, argv: Sequence[str]) -> str:
        """What a command line has that has no effect, in one line; "" where there is nothing."""
        return meaning(cls.program, parted(cls.program, argv)[1])[1]

    @property
    def given(self) -> dict[str, Any]:
        """Fields that differ from what they are by themselves; without what a launcher sets."""
        values = {f.name: (getattr(self, f.name), f.default) for f in dataclasses.fields(self)}
        return {name: value for name, (value, own) in values.items() if value != own and name != "local_rank"}

    def as_args(self) -> list[str]:
        """The flags that give these values, as `from_args` takes them."""
        words = []
        for name, value in self.given.items():
            words.append("--" + name.replace("_", "-"))
            if value is not True:
                words += map(str, value) if isinstance(value, tuple) else [str(value)]
        return words

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for opt.yaml and checkpoints."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}


def _flags(f: dataclasses.Field[Any]) -> tuple[str, ...]:
    return ("--" + f.name.replace("_", "-"), *f.metadata["flags"])


def _checked(value: Any, f: dataclasses.Field[Any]) -> Any:
    """The value of field `f`, converted and inside its range, or a ConfigError."""
    m, flag = f.metadata, _flags(f)[0]
    if m["many"]:
        return tuple(_scalar(v, flag, m) for v in (value if isinstance(value, (list, tuple)) else [value]))
    if m["bare"] is not None and isinstance(value, bool):  # run(cache=True) is the bare flag
        value = m["bare"] if value else f.default
    return _scalar(value, flag, m)


def _scalar(value: Any, flag: str, m: Mapping[str, Any]) -> Any:
    kind = m["kind"]
    if kind is bool:
        if not isinstance(value, bool):
            raise ConfigError(f"{flag}: found {shown(value)}, expected true or false.")
        return value
    if kind is str:
        value = "" if value is None else str(value)
        value = FORMER_WORDS.get((flag, value), value)
        user_path(value, flag)  # most are paths, and no other text is longer
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
            hint = did_you_mean(word.split("=")[0], known)
            raise ConfigError(f"{self.prog}: unknown argument {shown(word)}.{hint} See {self.prog} --help.")
        raise ConfigError(f"{self.prog}: {one_line(message, 300)}. See {self.prog} --help.")


class _Answer(argparse.Action):
    """Prints what the function `const` returns and ends, as --help does, and is no field of a configuration either."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        answer: Callable[[], str] = self.const
        print(answer())
        parser.exit()


def _add_flag(parser: argparse.ArgumentParser, f: dataclasses.Field[Any]) -> None:
    m = f.metadata
    if m["positional"]:
        parser.add_argument(f.name, nargs="*", metavar=m["positional"], help=m["help"])
        return
    if m["kind"] is bool:
        parser.add_argument(*_flags(f), dest=f.name, action="store_true", help=m["help"])
        return
    text = m["help"]
    if "default:" not in text and f.default != ():
        words = map(str, f.default) if isinstance(f.default, tuple) else [str(f.default) or "''"]
        text += f" (default: {' '.join(words)})"
    extra: dict[str, Any] = {"nargs": "+"} if m["many"] else {}
    if m["bare"] is not None:
        extra = {"nargs": "?", "const": m["bare"]}
    metavar = "{" + ",".join(filter(None, m["choices"])) + "}" if m["choices"] else m["kind"].__name__.upper()
    parser.add_argument(*_flags(f), dest=f.name, metavar=metavar, help=text, **extra)


def version_line() -> str:
    """The version, its git revision where there is one, Python, torch, and the device that a run takes by itself.

    Torch is imported for this alone: every other answer to a command line does without.
    """
    quieten_torch()
    choose = import_module("tessera.utils.machine.choose_device")
    revision = git_revision()
    program = f"tessera {__version__}" + (f" (git {revision})" if revision else "")
    torch = import_module("torch").__version__
    return f"{program}, Python {platform.python_version()}, torch {torch}, device {choose.device_by_itself()}"
