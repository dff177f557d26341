"""What a run says when the memory of its device is exhausted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from tessera.utils.errors import UserError
from tessera.utils.machine.accelerator import Accelerator
from tessera.utils.text import gib


@contextmanager
def explain_out_of_memory(accelerator: Accelerator, work: str, remedies: str) -> Iterator[None]:
    """Inside, exhausted memory is a UserError: with what was computed, what was free, and remedies in sentences.

    `work` is such as "a batch of 64 images a rank at 640 px".
    """
    try:
        yield
    except Exception as error:
        if not accelerator.is_out_of_memory(error):
            raise
        free = f", {gib(accelerator.free_memory())} were free" if accelerator.measures_memory else ""
        raise UserError(f"out of memory on {accelerator.name}: {work}{free}. {remedies}") from error


def explain_out_of_memory_of(weights: str | Path, accelerator: Accelerator) -> AbstractContextManager[None]:
    """Inside, where the model of a file is read or put on its device, exhausted memory is a UserError."""
    remedies = "Take a smaller model, or free memory that other processes hold."
    return explain_out_of_memory(accelerator, f"the model of {weights}", remedies)
