"""Exhausted memory, in a user's words."""

from __future__ import annotations

import pytest
import torch

from tessera.utils.errors import UserError
from tessera.utils.machine.accelerator import Accelerator, explain_out_of_memory
from tests.utils.machine.stand_in import StandIn


def test_the_message_says_batch_size_what_was_free_and_the_remedies() -> None:
    with (
        pytest.raises(UserError, match=r"stand-in: a batch of 64 images at 640 px, 2\.00 GiB were free\. Do less"),
        explain_out_of_memory(StandIn(capacity=2 * 2**30), "a batch of 64 images at 640 px", "Do less."),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")
    with (
        pytest.raises(UserError, match=r"on cpu: a batch of 64 images at 640 px\. Do less"),
        explain_out_of_memory(Accelerator(), "a batch of 64 images at 640 px", "Do less."),
    ):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes")


def test_another_error_passes() -> None:
    with pytest.raises(RuntimeError, match="shapes"), explain_out_of_memory(StandIn(), "", ""):
        raise RuntimeError("shapes do not match")
