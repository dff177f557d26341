"""What is logged, and by which rank."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator

import pytest

from tessera.utils.report.console import setup_logging


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    before = list(root.handlers)
    yield
    root.handlers[:] = before
    logging.captureWarnings(False)


def test_rank_0_is_heard_and_others_only_with_errors_and_their_rank(capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = logging.getLogger("tessera.data.source.index"), logging.getLogger("urllib3")

    def say() -> list[str]:
        ours.info("information")
        ours.warning("careful")
        ours.error("broken")
        theirs.warning("noise")
        theirs.error("their error")
        warnings.warn("python warns", UserWarning, stacklevel=1)
        out, err = capsys.readouterr()
        assert out == ""
        return [line for line in err.splitlines() if not line.startswith("  ")]

    with warnings.catch_warnings():
        setup_logging(0, 2)  # a run in a context whose end puts the hook of `warnings` back
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        setup_logging(0, 2)
        setup_logging(0, 2)  # a second run in the same process must not print everything twice
        *lines, python = say()
        assert lines == ["information", "WARNING: careful", "ERROR: broken", "ERROR: their error"]
        assert python.startswith("WARNING: ") and python.endswith("UserWarning: python warns")
        setup_logging(1, 2)
        assert say() == ["rank 1: ERROR: broken", "rank 1: ERROR: their error"]
