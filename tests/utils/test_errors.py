"""Explanations of torch's exceptions; all others keep their traceback."""

from __future__ import annotations

import pytest

from tessera.utils.errors import explain_exception, warn_on_error

COMPILER = type("InductorError", (RuntimeError,), {"__module__": "torch._inductor.exc"})
NOT_DETERMINISTIC = " does not have a deterministic implementation"


def test_a_lost_worker_is_explained_wherever_it_was_raised_and_a_defect_is_not() -> None:
    lost = RuntimeError("DataLoader worker (pid 1714) is killed by signal: Killed. ")
    assert "pid 1714) is killed by signal: Killed)" in str(explain_exception(lost))
    error = KeyError("state")
    error.__context__ = RuntimeError("DataLoader worker (pid(s) 5, 6) exited unexpectedly")
    error.__context__.__cause__ = lost
    assert "pid(s) 5, 6" in str(explain_exception(error))
    assert explain_exception(RuntimeError("shapes do not fit")) is None


@pytest.mark.parts_fail
def test_tolerate_warns_and_continues_but_not_after_an_interrupt(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING"), warn_on_error("results.png"):
        raise OSError("no space left")
    assert [record.getMessage() for record in caplog.records] == [
        "results.png: failed, the run continues without it (OSError: no space left)"
    ]
    with pytest.raises(KeyboardInterrupt), warn_on_error("results.png"):
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(24, "Too many open files", "a.jpg"), "ulimit -n 4096"),
        (RuntimeError("unable to open shared memory object </x>: Too many open files (24)"), "ulimit -n 4096"),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), "ulimit -v"),
        (RuntimeError("can't start new thread"), "ulimit -v"),
        (OSError("/a/torchvision/_C.so: undefined symbol: _ZN2"), "another torch"),
        (MemoryError(), "(MemoryError)"),
        (COMPILER("g++ said\n  no"), "--compile: the compiler failed: g++ said no Leave --compile out"),
        (RuntimeError(f"kthvalue CUDA{NOT_DETERMINISTIC}, but you set …"), f"ic: kthvalue CUDA{NOT_DETERMINISTIC} on"),
    ],
)
def test_limits_of_the_system_and_of_torch_are_named(error: Exception, text: str) -> None:
    assert text in str(explain_exception(error))
