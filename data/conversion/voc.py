"""Pascal VOC XML: boxes in pixels that count from 1, both ends included (VOC 2012 development kit, 3.3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from xml.sax.saxutils import escape

from tessera.data.conversion.numbers import exact, pixel_text
from tessera.data.conversion.objects import ANY_NAME, Labelled, LabelledImage

_CORNERS = ("xmin", "ymin", "xmax", "ymax")
_PIXEL = Fraction(1)
_OWN = frozenset({"name", "difficult", "bndbox", "part", *_CORNERS})


def fields_of(labelled: Labelled) -> dict[str, str]:
    """The elements of an object: its corners are those of <bndbox>, which is a pixel wide and high at least."""
    left, top, width, height = labelled.box
    corners = left + 1, top + 1, left + max(width, _PIXEL), top + max(height, _PIXEL)
    more = {key: value for key, value in labelled.more.items() if isinstance(value, str) and _is_simple(key, value)}
    return {
        "name": labelled.name,
        **more,
        "difficult": str(int(labelled.ignored)),
        **dict(zip(_CORNERS, map(pixel_text, corners), strict=True)),
    }


def of_fields(fields: Mapping[str, str]) -> Labelled:
    """The object of elements that `parse_voc` reads."""
    left, top, right, bottom = (exact(fields[key]) for key in _CORNERS)
    more = {key: text for key, text in fields.items() if key not in _OWN and text}
    name = fields.get("name", "")
    ignored = fields.get("difficult") == "1" or name == ANY_NAME
    return Labelled(name, (left - 1, top - 1, right - left + 1, bottom - top + 1), ignored, (), more)


def row_key(fields: Mapping[str, str]) -> str:
    """What tells an object from the others of its file."""
    return " ".join(fields.get(key, "") for key in ("name", "difficult", *_CORNERS))


def xml_of(image: LabelledImage, objects: Sequence[Mapping[str, str]]) -> str:
    """The annotation of an image."""
    folder, _, name = image.place.rpartition("/")
    height, width = image.size_hw
    lines = [
        "<annotation>",
        f"  <folder>{_text(folder)}</folder>",
        f"  <filename>{_text(name)}</filename>",
        f"  <size><width>{width}</width><height>{height}</height><depth>3</depth></size>",
        "  <segmented>0</segmented>",
    ]
    for fields in objects:
        corners = "".join(f"<{key}>{fields[key]}</{key}>" for key in _CORNERS)
        others = "".join(f"<{key}>{_text(text)}</{key}>" for key, text in fields.items() if key not in _CORNERS)
        lines.append(f"  <object>{others}<bndbox>{corners}</bndbox></object>")
    return "\n".join([*lines, "</annotation>", ""])


def _is_simple(key: str, text: str) -> bool:
    return key.isidentifier() and key.isascii() and key not in _OWN and text.isprintable()


def _text(text: str) -> str:
    """Text of an element; bytes of a file's name that are no text become escapes."""
    return escape(text.encode(errors="backslashreplace").decode())
