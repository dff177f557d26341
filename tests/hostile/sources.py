"""Hostile detection sources: damaged media, odd names, lists, globs, folders, standard input; with one good image."""

from __future__ import annotations

import contextlib
import io
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

from tessera.utils.machine.opencv import cv2
from tests.deploy.exporting.made import made_image
from tests.hostile.damages import cut, named, zeroed
from tests.hostile.detections import found, require_all, weights, weights_with, write_video
from tests.hostile.images import encoded, enlarged, flipped, make_special, noise, repeated_often

CASES, FAST_CASES = 900, 6
TIME_LIMIT_S = 120
MEMORY = 4 * 2**30

_SUFFIXES = (".mp4", ".mov", ".avi", ".mkv", ".mjpeg", ".webm", ".gif", ".ts", ".mpg", ".jpg", ".png", "")
_BOXES = (
    *(b"stts", b"elst", b"mvhd", b"mdhd", b"tkhd", b"stsz", b"stsc", b"stco", b"ctts", b"hdlr", b"avcC"),
    *(b"avih", b"strh"),
)
_WORDS = (
    *("a", "a_1", "a_0", "A", "a_01", "ä", "a\u0308", "labels", "crops", "predictions", "\x1b[2J\x1b]0;x\x07", "a\nb"),
    *("\u202egnp", "\u2028", "=cmd|' /C x'!A0", "@x", "%s%n", "'\"", " a", "a ", "..a", "--help", "~", "$HOME", "*"),
    *("http:a", "[a]", "#", "\udcff\udcfe", "é" * 60, "x" * 240, "日" * 80, "\U0001f600", "a\\b", "c.jpg", "a:b"),
)
_FOLDERS = (
    "",
    "",
    "sub",
    "labels",
    "Labels",
    "crops",
    "a.txt",
    "a.jpg",
    "a.mp4",
    "predictions.csv",
    "\udcff",
    "\x1b[1m",
)
_CLASSES = (
    *("car", "CAR", "car", "a/b", "a_b", "\x1b[31mred", "=1+1", "@x", "..", "/", "", "n" * 200, "日" * 100, "\u202ex"),
    *("a\nb", "x\ty", "ä", "a\u0308", "CON", " car ", "car.", "\udcff", "'", '"', "a,b"),
)
_NUMBERS = (0, 1, 2, 7, 255, 0x7FFF, 0x10000, 100_000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
_kept: dict[str, bytes] = {}


def prepare() -> None:
    """Videos that the cases damage: each container and codec that OpenCV, and ffmpeg where it is there, can write."""
    weights()
    with tempfile.TemporaryDirectory(prefix="hostile-sources") as name:
        folder = Path(name)
        frames = [made_image(48, 64, n) for n in range(12)]
        made = {"mp4": write_video(folder / "a.mp4", frames), "avi": write_video(folder / "a.avi", frames, "MJPG")}
        sizes = (48, 64), (48, 64), (90, 40), (16, 200)
        _kept["mjpeg"] = b"".join(cv2.imencode(".jpg", made_image(*size, 3))[1].tobytes() for size in sizes)
        if program := shutil.which("ffmpeg"):
            others = {
                "faststart.mp4": ["-movflags", "faststart"],
                "h264.mp4": ["-c:v", "libx264"],
                "a.mkv": [],
                "fragmented.mp4": ["-movflags", "frag_keyframe+empty_moov"],
                "a.webm": ["-c:v", "libvpx"],
                "a.gif": [],
                "a.ts": ["-c:v", "mpeg2video"],
                "a.mpg": ["-r", "25"],
                "a.mov": ["-c", "copy"],
            }
            quietly = [program, "-nostdin", "-loglevel", "quiet", "-y", "-i"]
            for name, flags in others.items():
                command = [*quietly, folder / "a.mp4", *flags, folder / name]
                if subprocess.run(command, check=False).returncode == 0:
                    made[name] = folder / name
        _kept.update({name: path.read_bytes() for name, path in made.items()})


def trial(rng: random.Random, folder: Path) -> str:
    """Detect on a good image and what is hostile: the good one has its results, and each other at most a line."""
    os.environ["TESSERA_MAX_PIXELS"] = str(2**24)
    (folder / "in").mkdir()
    os.chdir(folder)  # a glob must not find all the images of this machine
    good = folder / "in" / "zzz.png"
    cv2.imwrite(str(good), made_image(40, 50, 1))
    kind = rng.choice([*_KINDS])
    sources, is_damaged = _KINDS[kind](rng, folder / "in")
    names = [rng.choice(_CLASSES) for _ in range(3)] if rng.random() < 0.2 else None
    outcome = found(
        weights=weights() if names is None else weights_with(names, folder / "names.pt"),
        source=[*sources, *([str(good)] if not any(str(good) == s or str(good.parent) == s for s in sources) else [])],
        project=str(folder / rng.choice(("runs", "runs", "\udcffruns", "\x1bruns"))),
        vid_stride=rng.choice((1, 1, 2, 5)),
        **dict.fromkeys(("save_txt", "save_crop", "save_csv", "save_json"), True),
        tile=rng.choice((0, 0, 0, 32)),
        conf_thres="0.3",
    )
    if isinstance(outcome, str):
        assert kind in ("special", "text", "list"), outcome
        return f"{kind}, refused"
    assert outcome.folder is not None and (outcome.folder / "zzz.png").is_file(), outcome
    require_all(outcome)
    assert len(set(outcome.failures)) <= 12, outcome.failures
    if is_damaged:
        assert outcome.failures, "nothing is said"
    return kind + (", reported" if outcome.failures else "")


Made = tuple[list[str], bool]  # what --source is given, and whether something must be said of it


def _damaged_video(rng: random.Random, folder: Path) -> Made:
    name = rng.choice([*_kept])
    damage = rng.choice((flipped, cut, zeroed, repeated_often, enlarged, noise, _boxes, _boxes, _boxes))
    suffix = rng.choice(_SUFFIXES) if rng.random() < 0.2 else f".{name.rpartition('.')[2]}"
    path = folder / f"video{suffix}"
    path.write_bytes(damage(rng, _kept[name]))
    return [str(folder)] if suffix else [str(folder / "zzz.png")], False


def _whole_videos(rng: random.Random, folder: Path) -> Made:
    for name in rng.sample([*_kept], 3):
        (folder / name).write_bytes(_kept[name]) if "." in name else (folder / f"a.{name}").write_bytes(_kept[name])
    return [str(folder)], False


def _boxes(rng: random.Random, raw: bytes) -> bytes:
    """Another number, or none, in one of the boxes of a header."""
    places = [(raw.find(box), box) for box in _BOXES if box in raw]
    if not places:
        return flipped(rng, raw)
    changed, (at, _) = bytearray(raw), rng.choice(places)
    if rng.random() < 0.2:
        struct.pack_into(">I", changed, at - 4, rng.choice((0, 1, 7, 8, 9, 12, 16)))
    for _ in range(rng.randint(1, 3)):
        where = min(at + 4 + 4 * rng.randrange(8), len(changed) - 4)
        struct.pack_into(rng.choice((">I", "<I")), changed, where, rng.choice(_NUMBERS))
    return bytes(changed)


def _odd_names(rng: random.Random, folder: Path) -> Made:
    """Controls, 255 bytes, not UTF-8, right to left, formulas, or nearly equal."""
    for number in range(rng.randint(2, 7)):
        suffix = rng.choice((".jpg", ".png", ".JPG", ".bmp", ".tif", ".webp", "", ".mp4", ".mp4"))
        name = os.fsdecode(os.fsencode(rng.choice(_WORDS))[: 255 - len(suffix)]) + suffix
        path = folder / rng.choice(_FOLDERS) / name
        with contextlib.suppress(OSError):  # its folder is a file
            path.parent.mkdir(parents=True, exist_ok=True)
            if suffix == ".mp4":
                write_video(path, [made_image(32, 48, number + n) for n in range(rng.randint(1, 3))])
            else:
                path.write_bytes(cv2.imencode(suffix.lower() or ".png", made_image(40, 32, number))[1].tobytes())
    return [str(folder)], False


def _short_video(rng: random.Random, folder: Path) -> Made:
    """A header in front, and most of the frames behind it gone."""
    raw = _kept.get("faststart.mp4", _kept["avi"])
    suffix = ".mp4" if "faststart.mp4" in _kept else ".avi"
    (folder / f"short{suffix}").write_bytes(raw[: int(len(raw) * rng.uniform(0.05, 0.6))])
    return [str(folder)], True


def _damaged_image(rng: random.Random, folder: Path) -> Made:
    damage = rng.choice((flipped, cut, zeroed, repeated_often, enlarged, noise))
    suffix = rng.choice((".jpg", ".png", ".bmp", ".webp", ".tif", ".pfm", ".dng", ".mpo"))
    (folder / f"image{suffix}").write_bytes(damage(rng, encoded(rng)))
    return [str(folder)], False


def _odd_sizes(rng: random.Random, folder: Path) -> Made:
    height, width = rng.choice(((1, 1), (1, 3000), (3000, 1), (2, 2), (1, 70_000), (17_000, 3), (3, 5), (64, 1)))
    suffix = rng.choice((".png", ".bmp", ".tif"))
    cv2.imwrite(str(folder / f"odd{suffix}"), made_image(height, width, 2))
    if max(height, width) < 4000 and rng.random() < 0.5:
        write_video(
            folder / "odd.mp4", [made_image(max(height // 2 * 2, 2), max(width // 2 * 2, 2), n) for n in range(3)]
        )
    return [str(folder)], False


def _motion_jpeg(rng: random.Random, folder: Path) -> Made:
    jpegs = []
    for _ in range(rng.randint(1, 6)):
        size = rng.choice(((48, 64), (64, 48), (8, 8), (200, 30)))
        raw = bytes(cv2.imencode(".jpg", made_image(*size, 1))[1])
        jpegs.append(rng.choice((flipped, _other_size))(rng, raw) if rng.random() < 0.4 else raw)
    (folder / rng.choice(("a.mjpeg", "a.mjpg"))).write_bytes(b"".join(jpegs))
    return [str(folder)], False


def _other_size(rng: random.Random, jpeg: bytes) -> bytes:
    changed, sides = bytearray(jpeg), (0, 1, 64, 4000, 5000, 12_000, 65_000, 65_535)
    struct.pack_into(">HH", changed, changed.index(b"\xff\xc0") + 5, rng.choice(sides), rng.choice(sides))
    return bytes(changed)


def _special(rng: random.Random, folder: Path) -> Made:
    path = folder / f"special{rng.choice(('.mp4', '.jpg', '.txt', ''))}"
    make_special(path, rng)
    return [rng.choice((str(path), str(folder)))], False


def _text(rng: random.Random, folder: Path) -> Made:
    """Texts that are no paths, or hardly."""
    texts = ("", "\0", "nowhere", "x" * 300, "/" * 5000, "\udcff", "gopher://x", "http://", "http://[", "*", "[")
    others = "**/*.png file:///etc/passwd pipe:0 concat:a|b 99999 ~nobody/x \x1b[2J rtsp://"
    return [rng.choice((*texts, *others.split()))], False


def _list(rng: random.Random, folder: Path) -> Made:
    rows = b"zzz.png ./zzz.png none.jpg # - \xff\xfe http:// ftp://x . .. / ~x/y list.txt a\0b.jpg".split(b" ")
    rows += b"\x1b[2J.png /dev/null /dev/zero in/zzz.png".split()
    rows += [b"", b"x" * 5000, b"zzz.png  "]
    chosen = rng.sample(rows, rng.randint(1, 8))
    end = rng.choice((b"\n", b"\r\n", b"\r", b"\n\n", b"\x0b", b"\xe2\x80\xa8"))
    (folder / "list.txt").write_bytes(rng.choice((b"", b"\xef\xbb\xbf", b"\xff\xfe")) + end.join(chosen))
    if rng.random() < 0.5:
        sys.stdin = io.TextIOWrapper(io.BytesIO((folder / "list.txt").read_bytes()))
        return ["-"], False
    return [str(folder / "list.txt")], False


def _stdin(rng: random.Random, folder: Path) -> Made:
    raw = encoded(rng)
    given = rng.choice((None, b"", raw, cut(rng, raw), flipped(rng, raw), _kept["mp4"], rng.randbytes(500), b"\n\n\n"))
    sys.stdin = None if given is None else io.TextIOWrapper(io.BytesIO(given))  # type: ignore[assignment]
    return ["-"], given in (None, b"", _kept["mp4"])


def _twice(rng: random.Random, folder: Path) -> Made:
    (folder / "a.mp4").write_bytes(_kept["mp4"])
    return [str(folder / rng.choice(("a.mp4", "zzz.png"))) for _ in range(3)] + [str(folder / "zzz.png")], False


_KINDS = named(
    *(_odd_names, _damaged_video, _whole_videos, _short_video, _damaged_image, _odd_sizes, _motion_jpeg),
    *(_special, _text, _list, _stdin, _twice),
)
