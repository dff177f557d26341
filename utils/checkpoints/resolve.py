"""Lookup of `--weights`: a local path, or a published file that is downloaded once into the cache."""

from __future__ import annotations

import logging
import zipfile
from pathlib import Path
from urllib.parse import urlsplit

from tessera.data.source.download import fetch
from tessera.models.model_yaml import MODELS_DIR
from tessera.utils.checkpoints.foreign.efficientnet_lite import NAME as IMAGENET
from tessera.utils.config import OWN_WEIGHTS
from tessera.utils.environment import cache_dir
from tessera.utils.errors import UserError, did_you_mean
from tessera.utils.files import absolute_path, reachable_path, sha256, special_file_kind
from tessera.utils.flags.model_zoo import PublishedWeights, published_weights, suggestion
from tessera.utils.flags.program import called
from tessera.utils.text import one_line, shown

log = logging.getLogger(__name__)

MAX_WEIGHTS_BYTES = 4 << 30
_TERMS = {"AGPL-3.0": " Check its terms before you distribute what you make with it; --list-weights shows others."}


def resolve_weights(name: str) -> Path:
    """Return the path of the file that `--weights` names.

    The bare name of a published file, such as "yolox_s.pth" or "yolox_s", is searched in the working directory, then in
    the cache, and is downloaded otherwise. "tessera-n" comes with the program.

    Raises:
        UserError: there is no such file, the download fails, or the file is not the published one.
    """
    if not name:
        raise UserError("--weights is empty, expected a checkpoint, such as runs/train/exp/weights/best.pt.")
    given = reachable_path(name, "--weights")
    if given.is_file():
        return given
    bare = given.name == name
    own = MODELS_DIR / f"{name.removesuffix('.pt')}.pt"
    if bare and own.is_file():
        return own
    known = published_weights(name) if bare and not given.exists() else None
    if known is not None:
        here = Path(known.name)
        return here if here.is_file() else _published_file(known)
    cached = cache_dir() / "weights" / given.name
    if bare and cached.is_file():
        return cached
    if kind := special_file_kind(given):
        best = reachable_path(given / "weights" / "best.pt", "--weights")
        none = f" There is no {best} either." if given.is_dir() else ""
        hint = f" Its best checkpoint is --weights {best}." if best.is_file() else none
        raise UserError(f"--weights {name}: found {kind}, expected a checkpoint file.{hint}")
    raise _missing(name, given, f"{absolute_path(given)}" + (f" and {cached}" if bare else ""))


def resolve_run(name: str) -> Path:
    """Return the best checkpoint of a run directory, else the result of `resolve_weights`."""
    best = reachable_path(Path(name) / "weights" / "best.pt", "--weights")
    return best if name and best.is_file() else resolve_weights(name)


def _missing(name: str, given: Path, tried: str) -> UserError:
    if name == IMAGENET:
        return UserError(
            f"--weights {name}: the backbone of a classifier, which only {called('train.py')} accepts. Give a "
            "detector, such as runs/train/exp/weights/best.pt."
        )
    bare, model = given.name == name, given.stem if given.suffix in (".pt", ".pth", ".yaml") else given.name
    if bare and not published_weights(model) and (MODELS_DIR / f"{model}.yaml").is_file() and model != OWN_WEIGHTS:
        return UserError(
            f"--weights {name}: no such file; tried {tried}. No weights of {model} are published. Train it from "
            f"scratch with --cfg {model}.yaml and without --weights, or give a checkpoint of a run."
        )
    beside = [path.name for path in given.parent.glob("*.pt")] if given.parent.is_dir() else []
    beside.append(OWN_WEIGHTS)
    hint = suggestion(name, beside) if bare else did_you_mean(given.name, beside)
    return UserError(
        f"--weights {name}: no such file; tried {tried}.{hint} Expected a checkpoint, or the name of a published file "
        "(--list-weights)."
    )


def _published_file(known: PublishedWeights) -> Path:
    """Return the cached file; download it first if the cache lacks it."""
    cached = cache_dir() / "weights" / known.name
    if cached.is_file():
        try:
            digest = sha256(cached) if known.sha256 else ""
        except OSError as error:
            raise UserError(
                f"--weights {known.name}: cannot read {cached}: {error.strerror or error}. Check its permissions and "
                "the disk."
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
