"""The file that `--weights` means: a path, or a published file by name, which is downloaded once and then kept."""

from __future__ import annotations

import logging
import zipfile
from pathlib import Path
from urllib.parse import urlsplit

from tessera.data.source.download import fetch
from tessera.models.model_yaml import MODELS_DIR
from tessera.utils.checkpoints.foreign.efficientnet_lite import NAME as IMAGENET
from tessera.utils.environment import cache_dir
from tessera.utils.errors import UserError, did_you_mean
from tessera.utils.files import sha256, special_kind
from tessera.utils.flags.model_zoo import PublishedWeights, published, suggestion
from tessera.utils.flags.program import called
from tessera.utils.text import one_line, shown

log = logging.getLogger(__name__)

MAX_WEIGHTS_BYTES = 4 << 30
_ZIP = b"PK\x03\x04"  # how a file of torch.save begins
_DIGITS = 64
_TERMS = {"AGPL-3.0": " Mind its terms before you pass on what is made with it; --list-weights shows permissive ones."}


def resolve_weights(name: str) -> Path:
    """Find the file that `--weights` means.

    Args:
        name: a path, or the bare name of a published file as `published` knows it, such as "yolox_s.pth" or "yolox_s",
            which is looked for in the working directory and in the cache folder, and else downloaded to the latter.

    Raises:
        UserError: there is no such file; it cannot be downloaded, or is not the published file.
    """
    if not name:
        raise UserError("--weights is empty, expected a checkpoint, such as runs/train/exp/weights/best.pt.")
    given = Path(name).expanduser()
    if given.is_file():
        return given
    bare = given.name == name
    known = published(name) if bare and not given.exists() else None
    if known is not None:
        own = Path(known.name)
        return own if own.is_file() else _published_file(known)
    cached = cache_dir() / "weights" / given.name
    if bare and cached.is_file():
        return cached
    if kind := special_kind(given):
        best = given / "weights" / "best.pt"
        none = f" There is no {best} either." if given.is_dir() else ""
        hint = f" Its best one is --weights {best}." if best.is_file() else none
        raise UserError(f"--weights {name}: found {kind}, expected a checkpoint file.{hint}")
    raise _missing(name, given, f"{given.absolute()}" + (f" and {cached}" if bare else ""))


def resolve_run(name: str) -> Path:
    """As `resolve_weights`, but a run's folder means its best checkpoint; an exported file is one too."""
    best = Path(name).expanduser() / "weights" / "best.pt"
    return best if name and best.is_file() else resolve_weights(name)


def _missing(name: str, given: Path, tried: str) -> UserError:
    if name == IMAGENET:
        return UserError(
            f"--weights {name}: that is the body of a classifier, which only {called('train.py')} begins with; "
            "expected a detector, such as runs/train/exp/weights/best.pt."
        )
    bare, model = given.name == name, given.stem if given.suffix in (".pt", ".pth", ".yaml") else given.name
    if bare and published(model) is None and (MODELS_DIR / f"{model}.yaml").is_file():
        return UserError(
            f"--weights {name}: no such file; tried {tried}. No weights of {model} are published. Train it from "
            f"scratch, without --weights: --cfg {model}.yaml; or give a checkpoint of a run."
        )
    beside = [path.name for path in given.parent.glob("*.pt")] if given.parent.is_dir() else []
    hint = suggestion(name, beside) if bare else did_you_mean(given.name, beside)
    return UserError(
        f"--weights {name}: no such file; tried {tried}.{hint} Expected a checkpoint, or a published one by name: "
        "--list-weights shows them."
    )


def _published_file(known: PublishedWeights) -> Path:
    """The file in the cache folder, downloaded where it is not there yet."""
    cached = cache_dir() / "weights" / known.name
    if cached.is_file():
        _check_kept(known, cached)
        return cached
    arrived: list[str] = []

    def accept(part: Path) -> None:
        arrived.append(_accepted(known, part, cached))
        _note(cached).write_text(f"{arrived[0]}  {known.name}\n")  # as sha256sum writes it

    fetch(known.url, cached, max_bytes=MAX_WEIGHTS_BYTES, accept=accept)
    if arrived:  # else another process has downloaded it meanwhile, and reported it
        parts, size = urlsplit(known.url), cached.stat().st_size
        pinned = "" if known.sha256 else " (not pinned: no digest of this file is known to compare it with)"
        log.info(
            f"{known.name}: {size / 1e6:.1f} MB from {parts.netloc}{parts.path.rpartition('/')[0]}, {known.licence}, "
            f"SHA-256 {arrived[0]}{pinned}, kept as {cached}.{_TERMS.get(known.licence, '')}"
        )
    return cached


def _note(cached: Path) -> Path:
    """Return where the digest of a downloaded file is kept."""
    return cached.with_name(f"{cached.name}.sha256")


def _accepted(known: PublishedWeights, part: Path, cached: Path) -> str:
    """Return the digest of a download; UserError where it is not what the publisher has."""
    size, expected = part.stat().st_size, "expected a checkpoint"
    if known.size is not None:
        expected += f" of {known.size:,} bytes" if known.sha256 else f" of about {known.size / 1e6:.1f} MB"
    with part.open("rb") as file:
        start = file.read(200)
    if not start.startswith(_ZIP):
        page = start.lstrip().startswith(b"<")
        found = "a web page" if page else f"{size:,} bytes that are no checkpoint" if size else "nothing"
        said = f" (it begins {shown(start[:40].decode(errors='replace'))})" if size else ""
        wrong = f"the server sent {found}{said}, {expected}"
    elif known.size is not None and abs(size - known.size) > (0 if known.sha256 else 0.2) * known.size:
        wrong = f"the server sent {size:,} bytes, {expected}"
    elif not zipfile.is_zipfile(part):
        wrong = f"the server sent {size:,} bytes whose end is missing, {expected}"
    else:
        digest = sha256(part)
        if not known.sha256 or digest == known.sha256:
            return digest
        wrong = f"its SHA-256 is {digest}, expected {known.sha256}"
    raise UserError(
        f"Cannot use {one_line(known.url, 200)}: {wrong}. Nothing of it is kept. Open the address in a browser to see "
        f"what is there; put the published file at {shown(cached)}, or give the path of one you trust as --weights."
    )


def _check_kept(known: PublishedWeights, cached: Path) -> None:
    """Raise UserError where a cached file is not the published one, or not what was downloaded.

    The digest of a download is noted beside it, by whoever writes there: it says nothing where the published one is
    known. A file without a note that cannot be compared was put there by hand, and is used.
    """
    note = _note(cached)
    what, expected, remedy = "is not the published file", known.sha256, "Delete it"
    try:
        if not expected:
            if not note.exists():
                return
            expected = " ".join(note.read_text(errors="replace").split()[:1])
            what, remedy = "has changed since it was downloaded", f"Delete it and {note.name}"
        found = sha256(cached)
    except OSError as error:
        raise UserError(f"--weights {known.name}: cannot read {shown(cached)}: {error.strerror or error}.") from error
    if found != expected:
        raise UserError(
            f"--weights {known.name}: {cached} {what}: its SHA-256 is '{found}', expected "
            f"{shown(expected, _DIGITS + 2)}. {remedy}, and it is downloaded again; or give its path as --weights if "
            "this very file is meant."
        )
