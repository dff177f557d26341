"""Flags of YOLOv5 that are no flags here: what to write instead, and what is said of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tessera.utils.errors import ConfigError

_SEARCH = "a search continues from its own folder: --evolve 300 --resume runs/evolve/exp."
# Command → flag, with "=" where a value may follow → what to write instead: fields and their values, or a sentence
# where the user has to choose; nothing where it has no effect.
_FORMER: Mapping[str, Mapping[str, Mapping[str, Any] | str]] = {
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
        # The graph is dynamic, folded and has its suppression in it; sizes are fixed with --raw --imgsz.
        **dict.fromkeys(("--dynamic", "--simplify", "--nms", "--inplace", "--verbose", "--optimize", "--keras"), ""),
        **dict.fromkeys(("--per-tensor", "--train", "--mlmodel"), ""),
        **dict.fromkeys(("--batch-size=", "--workspace=", "--topk-per-class=", "--cache="), ""),
        "--agnostic-nms": "the file suppresses class by class. Export with --raw and suppress outside.",
        "--topk-all=": "give --max-det instead.",
    },
}
FORMER_WORDS = {("--cache", "images"): "ram"}  # flag and word of YOLOv5 → the word to write instead


def former_flags(program: str) -> dict[str, bool]:
    """The former flags of a command, and whether a value may follow each."""
    return {flag.rstrip("="): flag.endswith("=") for flag in _FORMER.get(program, {})}


def without_effect(program: str) -> list[str]:
    """The former flags of a command that are accepted and do nothing."""
    return [flag.rstrip("=") for flag, instead in _FORMER.get(program, {}).items() if not instead]


def meaning(program: str, flags: Iterable[str]) -> tuple[dict[str, Any], str]:
    """Return the fields that former flags of a command set, and a warning of those without effect, or "".

    Raises:
        ConfigError: one of them cannot be replaced without the user.
    """
    table = {flag.rstrip("="): instead for flag, instead in _FORMER.get(program, {}).items()}
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
    return fields, f"{' '.join(idle)}: known from YOLOv5, without effect here." if idle else ""


def parted(program: str, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """A command line, with dashes for underscores in its flags, without the former ones; and these."""
    former = former_flags(program)
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
