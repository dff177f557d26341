"""Hostile names of files, folders and classes: controls, 255 bytes, not UTF-8, right to left, formulas, collisions."""

# ruff: noqa: PTH103, PTH118, PTH119, PTH120, PTH122 - names as texts, of which Path changes some
from __future__ import annotations

import csv
import os
import random
import unicodedata
from pathlib import Path

from tessera.commands import detect
from tessera.utils.machine.opencv import cv2
from tests.deploy.exporting.made import picture
from tests.hostile.detections import found, require_all, weights, weights_with, write_video

CASES, FAST_CASES = 400, 3
TIME_LIMIT_S = 120
MEMORY = 4 * 2**30

_WORDS = (
    *("a", "a_1", "a_0", "a_2", "a-2", "A", "b", "a_1_0", "a_01", "ä", "a\u0308", "labels", "crops"),
    *("predictions", "é"),
)
_ODD = (
    *("\x1b[2J\x1b]0;x\x07", "a\nb", "a\rb", "a\tb", "\u202egnp", "\u2028", "=1+2", "+1", "-1", "@x"),
    *("=cmd|' /C x'!A0", "%s%n", "'\"", " ", "a ", " a", "...", "..a", "-", "--help", "~", "$HOME", "a:b"),
    *("http:a", "*", "[a]", "?", "#", "\udcff\udcfe", "a\udc80", "\udce4\udcb8", "é" * 60, "x" * 240),
    *("y" * 251, "日" * 80, "\U0001f600", "a\\b", "c.jpg", ".."),
)
_SUFFIXES = (".jpg", ".png", ".JPG", ".bmp", ".tif", ".jpeg", ".webp", "", ".txt")
_FOLDERS = (
    *("", "", "", "sub", "labels", "crops", "Labels", "a.txt", "a.jpg", "a.mp4", "predictions.csv", "\udcff"),
    "\x1b[1m",
)
_CLASSES = (
    *("car", "Car", "CAR", "car", "a/b", "a:b", "a_b", "\x1b[31mred", "=1+1", "+x", "-x", "@x", "..", ".", "/"),
    *("", "n" * 200, "日" * 100, "\u202ex", "a\nb", "x\ty", "ä", "a\u0308", "CON", " car ", "car.", "\udcff"),
    *("'", '"', "a,b"),
)


def prepare() -> None:
    weights()


def trial(rng: random.Random, folder: Path) -> str:
    """Detect on files of odd names, with all outputs: every result is there, whole, and of its own source."""
    (folder / "in").mkdir()
    made: dict[str, str] = {}
    for number in range(rng.randint(2, 7)):
        path = os.path.join(folder, "in", rng.choice(_FOLDERS), _name(rng))
        if _make(path, number, rng):
            made[path] = "video" if path.endswith((".mp4", ".avi")) else "image"
    if not made:
        return "no such names here"
    names = [rng.choice(_CLASSES) for _ in range(3)] if rng.random() < 0.5 else None
    kind = rng.choice(("folder", "list", "each"))
    source: object = [*made]
    if kind == "folder":
        source = str(folder / "in")
    elif kind == "list":
        listed = [path for path in made if path == path.strip() and len(path.splitlines()) == 1 and "\\" not in path]
        made = {path: made[path] for path in listed}
        (folder / "list.txt").write_bytes(b"".join(os.fsencode(path) + b"\n" for path in listed))
        source = str(folder / "list.txt")
    outcome = found(
        weights=weights() if names is None else weights_with(names, folder / "names.pt"),
        source=source,
        project=str(folder / rng.choice(("runs", "\udcffruns", "\x1bruns"))),
        **dict.fromkeys(("save_txt", "save_crop", "save_csv", "save_json", "save_conf"), True),
        conf_thres="0.05",
    )
    if isinstance(outcome, str):
        assert kind != "each" or "neither an image nor a video" in outcome, outcome
        return f"{kind}, refused"
    assert outcome.folder is not None, outcome
    require_own(outcome, made if kind != "folder" else {})
    return kind + (", classes" if names else "")


def require_own(outcome: detect.DetectionSummary, made: dict[str, str]) -> None:
    """Each result has a file of its own: none has replaced another."""
    assert outcome.folder is not None
    counts, results = require_all(outcome)
    made = made or {line["source"]: "image" if line["frame"] is None else "video" for line in results}
    pictures = sum(line["frame"] is None for line in results)
    assert counts["pictures"] == pictures and counts["frames"] == len(results) - pictures, (counts, pictures)
    assert counts["videos"] == sum(kind == "video" for kind in made.values()), (counts, made)
    # On a file system that takes these names for one, none may meet either.
    keys = [_key(path.relative_to(outcome.folder)) for path in outcome.folder.rglob("*") if path.is_file()]
    assert len(set(keys)) == len(keys), keys
    with (outcome.folder / "predictions.csv").open(newline="", encoding="utf-8") as file:
        assert len({row[0] for row in csv.reader(file)}) - 1 <= len(made)


def _name(rng: random.Random) -> str:
    word = rng.choice(_WORDS if rng.random() < 0.6 else _ODD)
    suffix = rng.choice((*_SUFFIXES, ".mp4", ".mp4", ".mp4"))
    encoded = os.fsencode(word)[: 255 - len(suffix)]
    return os.fsdecode(encoded) + suffix


def _make(path: str, number: int, rng: random.Random) -> bool:
    """An image or a video at a path; False where it cannot be there."""
    if os.path.lexists(path) or os.path.basename(path) in (".", "..", ""):
        return False
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if path.endswith(".mp4"):
            write_video(Path(path), [picture(32, 48, number + n) for n in range(rng.randint(1, 3))])
            return True
        suffix = os.path.splitext(path)[1].lower()
        done, content = cv2.imencode(suffix if suffix not in ("", ".txt") else ".png", picture(40, 32, number))
        assert done
        Path(path).write_bytes(content.tobytes())
    except OSError:
        return False
    return not path.endswith(".txt")


def _key(path: Path) -> str:
    return unicodedata.normalize("NFC", str(path).casefold())
