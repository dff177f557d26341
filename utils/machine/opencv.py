"""Import of OpenCV with a pixel limit, without log output and threads. All modules import cv2 from here.

OpenCV reads the limit and the log level from the environment when it is loaded.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from tessera.utils.environment import configure_libraries
from tessera.utils.errors import UserError
from tessera.utils.text import first_line

_is_level_unset = configure_libraries()
try:
    import cv2 as cv2
except ImportError as error:
    raise UserError(
        f"OpenCV cannot be imported ({first_line(error)}). If desktop libraries are missing, use the headless package: "
        "pip uninstall opencv-python, then pip install opencv-python-headless."
    ) from error

# Our processes and threads already work concurrently. And a loader worker that is forked while an OpenCV thread holds
# the pool's lock would hang when it uses the pool.
cv2.setNumThreads(0)
if _is_level_unset:  # a program that has imported OpenCV before the variable was set
    getattr(cv2.utils, "logging", cv2).setLogLevel(1)  # fatal errors only; up to OpenCV 4.12 the function is cv2's


@contextmanager
def utf8_path(path: str) -> Iterator[str]:
    """Yield a UTF-8 path of the same file: `path` or a temporary link. OpenCV 5 aborts on other paths."""
    if path.isascii() or not any("\ud800" <= c <= "\udfff" for c in path):
        yield path
        return
    suffix = os.path.splitext(path)[1]  # noqa: PTH122
    with tempfile.TemporaryDirectory(prefix="tessera-") as folder:
        link = f"{folder}/link{suffix if suffix.isascii() else ''}"
        os.symlink(os.path.abspath(path), link)  # noqa: PTH100, PTH211
        yield link
