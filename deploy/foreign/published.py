"""Published weights that can be given by name: URL, size, digest, licence and mAP of each file; their download.

The mAP is the publisher's: YOLOX's model zoo, the YOLOv9 authors' table, YOLOv5's release 7.0. A digest is listed
if projects that pin the file agree on it.
"""

from __future__ import annotations

import logging
import re
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from tessera.deploy.foreign.download import fetch
from tessera.utils.environment import cache_dir
from tessera.utils.errors import UserError, did_you_mean
from tessera.utils.files import sha256
from tessera.utils.text import one_line, shown

log = logging.getLogger(__name__)

MAX_WEIGHTS_BYTES = 4 << 30
_TERMS = {"AGPL-3.0": " Check its terms before you distribute what you make with it; --list-weights shows others."}

_YOLOX = "https://github.com/Megvii-BaseDetection/YOLOX/releases/download/0.1.1rc0/"
_YOLOV9 = "https://github.com/MultimediaTechLab/YOLO/releases/download/v1.0-alpha/"
_YOLOV5 = "https://github.com/ultralytics/yolov5/releases/download/v7.0/"


@dataclass(frozen=True)
class PublishedWeights:
    """A weight file on its publisher's server."""

    name: str  # of the file, such as "yolox_s.pth"
    family: str  # "YOLOX", "YOLOv9" or "YOLOv5"
    folder: str  # URL of its folder, with a final slash
    cfg: str  # model YAML in models/
    millions: float  # parameters at 80 classes, in millions, without training-only branches
    licence: str  # of the weights, as SPDX identifier
    map: float  # mAP50-95 on COCO val2017, percent, as published
    imgsz: int  # image size of that evaluation, pixels
    size: int | None = None  # bytes; exact if there is a digest
    sha256: str = ""

    @property
    def url(self) -> str:
        """Download URL."""
        return self.folder + self.name

    @property
    def stem(self) -> str:
        """File name without suffix."""
        return self.name.rpartition(".")[0]


def _yolox(model: str, millions: float, ap: float, size: int, sha256: str, imgsz: int = 640) -> PublishedWeights:
    name, cfg = f"yolox_{model}.pth", f"yolox-{model}.yaml"
    return PublishedWeights(name, "YOLOX", _YOLOX, cfg, millions, "Apache-2.0", ap, imgsz, size, sha256)


def _yolov9(model: str, millions: float, ap: float, size: int | None) -> PublishedWeights:
    name, cfg = f"v9-{model}.pt", f"yolov9-{model}.yaml"
    return PublishedWeights(name, "YOLOv9", _YOLOV9, cfg, millions, "MIT", ap, 640, size)


def _yolov5(model: str, millions: float, ap: float, size: int, sha256: str) -> PublishedWeights:
    name, cfg, imgsz = f"yolov5{model}.pt", f"yolov5{model}.yaml", 1280 if model.endswith("6") else 640
    return PublishedWeights(name, "YOLOv5", _YOLOV5, cfg, millions, "AGPL-3.0", ap, imgsz, size, sha256)


PUBLISHED = (
    _yolox("nano", 0.91, 25.8, 7_694_953, "cd28f55fbbc1829f99d9ac9b38a16d259a22889739c8728ea877610201feff7b", 416),
    _yolox("tiny", 5.06, 32.8, 40_755_013, "9de513de589ac98bb92d3bca53b5af7b9acfa9b0bacb831f7999d0f7afaee8f0", 416),
    _yolox("s", 8.97, 40.5, 72_089_125, "f55ded7181e1b0c13285c56e7790b8f0e8f8db590fe4edb37f0b7f345c913a30"),
    _yolox("m", 25.33, 46.9, 203_114_461, "60076992b32da82951c90cfa7bd6ab70eba9eda243e08b940a396f60ac2d19b6"),
    _yolox("l", 54.21, 49.7, 434_357_141, "1e6b7fa6240375370b2a8a8eab9066b3cdd43fd1d0bfa8d2027fd3a51def2917"),
    _yolox("x", 99.07, 51.1, 793_463_373, "5652330b6ae860043f091b8f550a60c10e1129f416edfdb65c259be6caf355cf"),
    _yolov9("t", 2.4, 38.3, None),
    _yolov9("s", 7.2, 46.8, 39_900_000),
    _yolov9("m", 20.1, 51.4, 132_200_000),
    _yolov9("c", 25.5, 53.0, 102_900_000),
    _yolov5("n", 1.9, 28.0, 4_062_133, "4f180cf23ba0717ada0badd6c685026d73d48f184d00fc159c2641284b2ac0a3"),
    _yolov5("s", 7.2, 37.4, 14_808_437, "8b3b748c1e592ddd8868022e8732fde20025197328490623cc16c6f24d0782ee"),
    _yolov5("m", 21.2, 45.4, 42_806_829, "61d933360ba5a7733a36764996c800287d973889d875227f5beedd2473a97a56"),
    _yolov5("l", 46.5, 49.0, 93_622_629, "2f603b7354c25454d1270663a14d8ddc1eea98e5eebc1d84ce0c6e3150fa155f"),
    _yolov5("x", 86.7, 50.7, 174_114_333, "9f27a794fa0308e2606f90565164571d6f0a0ba18a3ce2e5e5d323b71c157859"),
    _yolov5("n6", 3.2, 36.0, 7_190_229, "496c05a2b991da15acc6c4408c63da287f2513a46c6756618776d4dd71170781"),
    _yolov5("s6", 12.6, 44.8, 25_978_837, "95bda9019ada63f37338308d0c81a66047a6fbaba061abaff271ba9334cf2a6f"),
    _yolov5("m6", 35.7, 51.3, 72_308_357, "7afe7fa0f29a8351467200a2a5a33c7996d1155ed6636c7edd8ca70b14951c64"),
    _yolov5("l6", 76.8, 53.7, 154_521_589, "b357b77f646b0190912985937c44e2923441369d5fda69ba86da2aa919212618"),
    _yolov5("x6", 140.7, 55.0, 282_720_357, "257c991b216d625427dc4d9c7c76d6c6d93cf3732797538da34bdc02f97bfef0"),
)


def published_weights(name: str) -> PublishedWeights | None:
    """Return the published file of a name, or None.

    A name is the file's ("yolox_s.pth") or the model's ("yolox-s", "yolov9-t"), with or without .pt or .pth.
    """
    stem, _, suffix = name.rpartition(".")
    stem = stem if suffix in ("pt", "pth") else name
    known = {spelling: weights for weights in PUBLISHED for spelling in (weights.stem, weights.cfg[: -len(".yaml")])}
    return known.get(stem)


def published_file(name: str) -> Path | None:
    """Return the published file of a name in the working directory or the cache, downloaded if missing; or None.

    Raises:
        UserError: the download fails, or the file is not the published one.
    """
    known = published_weights(name)
    if known is None:
        return None
    if (here := Path(known.name)).is_file():
        return here
    cached = cache_dir() / "weights" / known.name
    if cached.is_file():
        try:
            digest = sha256(cached) if known.sha256 else ""
        except OSError as error:
            raise UserError(
                f"--weights {known.name}: cannot read {cached}: {error.strerror or error}. Check its permissions."
            ) from error
        if digest != known.sha256:
            raise UserError(
                f"--weights {known.name}: {cached} is not the published file: its SHA-256 is '{digest}', expected "
                f"'{known.sha256}'. Delete it to download it again, or give its path as --weights to use it as it is."
            )
        return cached
    arrived: list[str] = []
    fetch(
        known.url,
        cached,
        max_bytes=MAX_WEIGHTS_BYTES,
        accept=lambda part: arrived.append(_checked_digest(known, part, cached)),
    )
    if arrived:  # otherwise another process has downloaded and logged it
        parts, size = urlsplit(known.url), cached.stat().st_size
        pinned = "" if known.sha256 else " (not pinned: no digest of this file is known)"
        log.info(
            f"{known.name}: {size / 1e6:.1f} MB from {parts.netloc}{parts.path.rpartition('/')[0]}, {known.licence}, "
            f"SHA-256 {arrived[0]}{pinned}, cached as {cached}.{_TERMS.get(known.licence, '')}"
        )
    return cached


def _checked_digest(known: PublishedWeights, part: Path, cached: Path) -> str:
    """Return the digest of a download; raise UserError if it is not the published file."""
    size, digest = part.stat().st_size, sha256(part)
    plausible = known.size is None or abs(size - known.size) <= 0.2 * known.size
    if digest == known.sha256 or (not known.sha256 and plausible and zipfile.is_zipfile(part)):
        return digest
    with part.open("rb") as file:
        begins = shown(file.read(40).decode(errors="replace"))
    about = "" if known.size is None else f" of about {known.size / 1e6:.1f} MB"
    expected = f"SHA-256 {known.sha256}" if known.sha256 else f"a checkpoint{about}"
    raise UserError(
        f"Cannot use {one_line(known.url, 200)}: the server sent {size:,} bytes that begin with {begins}, SHA-256 "
        f"{digest}, expected {expected}. Nothing was saved. Check the address in a browser; put the "
        f"published file at {shown(cached)}, or give a local file as --weights."
    )


def licence_of(family: str) -> str:
    """Return the SPDX licence identifier of a family's published weights."""
    return next(weights.licence for weights in PUBLISHED if weights.family == family)


def suggestion(name: str, beside: Iterable[str] = ()) -> str:
    """Return a suggestion, after a space, for a name that is neither a file nor published; or "".

    Only weights of the same family are suggested, as users choose a family for its licence; and the user's files
    `beside`.
    """
    family = _family(name)
    published = [weights.name for weights in PUBLISHED if weights.family == family]
    if plain := [other for other in published if _plain(other) == _plain(name)]:
        return f" Did you mean '{plain[0]}'?"
    near = did_you_mean(name, [file for file in beside if _family(file) == family])
    return near or (f" Published ones of {family}: {', '.join(published)}." if family else "")


def _plain(name: str) -> str:
    """Return "yoloxtiny" for "YOLOX-Tiny.pth", "v9t" for "yolov9-t"."""
    return re.sub(r"[-_ ]|\.(pth?|yaml)$", "", name.casefold()).replace("yolov9", "v9")


def _family(name: str) -> str:
    known = {"yolox": "YOLOX", "v9": "YOLOv9", "yolov5": "YOLOv5"}
    return next((family for begin, family in known.items() if _plain(name).startswith(begin)), "")


_ABOUT_TABLE = (
    "",
    "Every command accepts these names for --weights. A file is searched for in the working directory and in",
    "the cache, else downloaded to the cache. The weights bring their model; --cfg trains another one.",
    "mAP50-95 is the publisher's, on COCO val2017; the licence is that of the weights.",
    "tessera-n (Apache-2.0) comes with the program: pretrained on synthetic shapes, not on photographs.",
)


def published_table() -> str:
    """Return the table of published weights for `--list-weights`."""
    rows = [("--weights", "parameters", "file", "licence", "mAP50-95", "at", "model")]
    for weights in PUBLISHED:
        megabytes = "-" if weights.size is None else f"{weights.size / 1e6:.1f} MB"
        cells = (f"{weights.millions:.1f} M", megabytes, weights.licence, f"{weights.map:.1f}")
        rows.append((weights.name, *cells, f"{weights.imgsz} px", weights.cfg))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    form = "  ".join(f"{{:{side}{width}}}" for side, width in zip("<>><>><", widths, strict=True))
    lines = [form.format(*row).rstrip() for row in rows]
    return "\n".join([*lines, *_ABOUT_TABLE])
