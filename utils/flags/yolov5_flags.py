"""YOLOv5 flags accepted for compatibility, and their replacements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tessera.utils.errors import ConfigError

_SEARCH = "a search continues from its own folder: --evolve 300 --resume runs/evolve/exp."
# Command → flag ("=" if it may take a value) → fields that replace it, an error message, or "" for an ignored flag.
_FLAGS: Mapping[str, Mapping[str, Mapping[str, Any] | str]] = {
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
    return {flag.rstrip("="): flag.endswith("=") for flag in _FLAGS.get(program, {})}


def ignored_flags(program: str) -> list[str]:
    """Return the YOLOv5 flags that a command ignores."""
    return [flag.rstrip("=") for flag, instead in _FLAGS.get(program, {}).items() if not instead]


def replaced_flags(program: str, flags: Iterable[str]) -> tuple[dict[str, Any], str]:
    """Return the fields that YOLOv5 flags set, and a warning that names the ignored ones, or "".

    Raises:
        ConfigError: a flag without an equivalent.
    """
    table = {flag.rstrip("="): instead for flag, instead in _FLAGS.get(program, {}).items()}
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
