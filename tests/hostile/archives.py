"""Hostile archives: damaged, or made to leave their folder."""

from __future__ import annotations

import functools
import io
import random
import tarfile
import zipfile
from pathlib import Path

from tessera.deploy.foreign import download
from tessera.deploy.foreign.download import unpack
from tests.hostile.damages import cut, flipped, left_out, named, zeroed
from tests.hostile.expect import Message, message_or_result

CASES, FAST_CASES, TIME_LIMIT_S, MEMORY = 2000, 24, 60, 2**29

FILES = {f"set/{kind}/{n:03}.{end}": random.Random(n).randbytes(n * 37) for n in range(20)
         for kind, end in (("images", "jpg"), ("labels", "txt"))}  # fmt: skip
download.MAX_UNPACKED_BYTES, download.MAX_MEMBERS = 10 << 20, 500


def trial(rng: random.Random, folder: Path) -> str:
    """Unpack one archive: all of it is there, or nothing is and a message says why."""
    kind, damage = rng.choice([*_KINDS]), rng.choice([*_OF_BYTES, *_MADE])
    archive, target = folder / f"a.{kind}", folder / "place" / "target"
    archive.write_bytes(_OF_BYTES[damage](rng, whole(kind)) if damage in _OF_BYTES else _MADE[damage](rng, kind))
    (folder / "place").mkdir()
    used = message_or_result(lambda: unpack(archive, target))
    if isinstance(used, Message):
        assert not list((folder / "place").iterdir()), f"{damage} {kind} left something behind"
    else:
        found = {str(path.relative_to(target)): path.read_bytes() for path in target.rglob("*") if path.is_file()}
        assert damage not in _REFUSED, f"{damage} {kind} was unpacked: {sorted(found)[:9]}"
        found.pop("set/odd", None)  # an extension that says nothing wrong
        # A tar has no checksum of its contents, and none of its list of files.
        assert kind == "tar" or found == FILES, f"{damage} {kind}: {len(found)} of {len(FILES)} files, or others"
        assert damage in _UNSEEN or found.keys() == FILES.keys(), f"{damage} {kind}: {len(found)} of {len(FILES)} files"
    assert sorted(path.name for path in folder.iterdir()) == [archive.name, "place"], "something outside the target"
    return f"{kind}, {damage}"


@functools.cache
def whole(kind: str) -> bytes:
    return _pack(kind, list(FILES.items()))


def _pack(kind: str, files: list[tuple[str, bytes]], odd: tarfile.TarInfo | None = None) -> bytes:
    content = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as pack:
            for name, data in files:
                pack.writestr(zipfile.ZipInfo(name), data)
            if odd is not None:
                entry = zipfile.ZipInfo(odd.name)
                entry.create_system, entry.external_attr = 3, (0o120777 if odd.issym() else 0o020777) << 16
                pack.writestr(entry, odd.linkname)
        return content.getvalue()
    with tarfile.open(fileobj=content, mode=f"w:{kind[4:]}") as tape:  # type: ignore[call-overload]
        for name, data in files:
            header = tarfile.TarInfo(name)
            header.size = len(data)
            tape.addfile(header, io.BytesIO(data))
        if odd is not None:
            tape.addfile(odd)
    return content.getvalue()


_KINDS = ("zip", "tar", "tar.gz", "tar.bz2", "tar.xz")


def _name(rng: random.Random, kind: str) -> bytes:
    name = rng.choice(
        ["../x", "a/../../x", "/tmp/planted-by-a-test", "C:/x", "a\\..\\x", "x" * 300, "d/" * 2000 + "x",
         "\x1b[2J/../x", "a/" + "y" * 256, "..", "a\udcff/../../x"]
    )  # fmt: skip
    files = [*FILES.items()]
    files.insert(rng.randrange(len(files)), (name.encode("utf-8", "replace").decode(), b"planted"))
    return _pack(kind, files)


def _special(rng: random.Random, kind: str) -> bytes:
    odd = tarfile.TarInfo("set/odd")
    odd.type = rng.choice([tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
    odd.linkname = rng.choice(["/etc/passwd", "../..", "set/labels/001.txt"])
    return _pack(kind, [*FILES.items()], odd)


def _bomb(rng: random.Random, kind: str) -> bytes:
    if rng.random() < 0.5:
        return _pack(kind, [(f"{n}", b"") for n in range(501)])
    return _pack(kind, [*FILES.items(), ("bomb", bytes(11 << 20))])


def _extension(rng: random.Random, kind: str) -> bytes:
    """Headers of a tar that say odd things of the next one; for a zip a size that is a lie."""
    if kind == "zip":
        raw, size = whole(kind), rng.choice([n * 37 for n in range(5, 20)])
        return raw.replace(size.to_bytes(4, "little"), rng.choice([0, 5, 2**31]).to_bytes(4, "little"))
    odd = tarfile.TarInfo("set/odd")
    key = rng.choice(["size", "GNU.sparse.size", "GNU.sparse.map", "GNU.sparse.realsize", "path"])
    value = rng.choice(["-1", "-99999", "1e9", "9" * 30, "1,2,3", "x" * (2 << 20), "\x1b/../../x"])
    if key == "path":
        value = "x/" * (1 << 20)
    odd.pax_headers = {key: value}
    return _pack(kind, [*FILES.items()], odd)


_OF_BYTES = {
    **named(flipped, cut),
    "made well": lambda rng, raw: raw,
    "zeroed": functools.partial(zeroed, block=512),
    "left out": functools.partial(left_out, block=512),
}
_MADE = named(_name, _special, _bomb, _extension)
_REFUSED = frozenset({"name", "special", "bomb"})
_UNSEEN = frozenset({"left out", "zeroed"})  # of a tar: whole members, or all from one to the end
