"""OpenCV, bounded, quiet and with no threads of its own: whoever needs it imports it from here.

OpenCV reads its limit of pixels and what it prints from the environment once, when it is loaded; so they are set before
that.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from tessera.utils.environment import bound_opencv, quieten_opencv
from tessera.utils.errors import UserError
from tessera.utils.text import first_line

bound_opencv()
_is_ours = quieten_opencv()
try:
    import cv2 as cv2
except ImportError as error:
    raise UserError(
        f"OpenCV does not load here ({first_line(error)}). Where libraries of a desktop are missing, take the package "
        "without windows: pip uninstall opencv-python, then pip install opencv-python-headless."
    ) from error

# Images are worked on side by side in processes and threads of our own. OpenCV's threads would be one pool more, and a
# loader worker that is forked while one of them holds the pool's lock waits for ever when it touches the pool.
cv2.setNumThreads(0)
if _is_ours:  # a program that has imported it before has kept it from reading that
    getattr(cv2.utils, "logging", cv2).setLogLevel(1)  # fatal errors alone; up to OpenCV 4.12 the function is cv2's


@contextmanager
def in_utf8(path: str) -> Iterator[str]:
    """A path that leads to the same file and is UTF-8: itself, or inside `with` a link.

    For OpenCV, which takes no other one: version 5 ends the process. There need be nothing at the path yet.
    """
    if path.isascii() or not any("\ud800" <= c <= "\udfff" for c in path):
        yield path
        return
    suffix = os.path.splitext(path)[1]  # noqa: PTH122
    with tempfile.TemporaryDirectory(prefix="tessera-") as folder:
        link = f"{folder}/link{suffix if suffix.isascii() else ''}"
        os.symlink(os.path.abspath(path), link)  # noqa: PTH100, PTH211
        yield link
