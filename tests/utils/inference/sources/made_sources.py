"""Sources for tests: a door for pictures, and frames that carry their number."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from data.source.decode import Pixels, read_image
from utils.errors import UserError
from utils.inference.sources.frames import Frame, SourceEvent
from utils.inference.sources.sources import open_sources


def read(picture: Path | bytes) -> Pixels:
    """A door that takes files and encoded bytes."""
    if isinstance(picture, Path):
        return read_image(picture)
    image = cv2.imdecode(np.frombuffer(picture, np.uint8), cv2.IMREAD_COLOR)
    if image is None:
        raise UserError("the bytes do not decode")
    return cv2.cvtColor(image, cv2.COLOR_BGR2RGB)


def items(specs: Any, **options: Any) -> list[Frame | SourceEvent]:
    """All that comes from sources."""
    with open_sources(specs, read=read, **options) as sources:
        return list(sources)


def frames(found: Iterable[Frame | SourceEvent]) -> list[Frame]:
    """The frames among items."""
    return [item for item in found if isinstance(item, Frame)]


def events(found: Iterable[Frame | SourceEvent]) -> list[SourceEvent]:
    """The events among items."""
    return [item for item in found if isinstance(item, SourceEvent)]
