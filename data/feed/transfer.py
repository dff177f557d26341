"""Batches on their way to the device."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator

import torch

from utils.types import Batch


def in_advance(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """The same batches, their images on `device`: copied while the device still computes on the batch before.

    On CUDA the copies, from page-locked memory, run on a stream of their own, as uint8. Elsewhere nothing is copied.
    """
    if device.type != "cuda":
        yield from batches
        return
    stream = _copy_stream(device)
    ahead: tuple[Batch, torch.cuda.Event] | None = None
    for batch in batches:
        with torch.cuda.stream(stream):
            images = batch.images.to(device, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(stream)
        if ahead is not None:
            yield _arrived(*ahead, device)
        ahead = dataclasses.replace(batch, images=images), copied
    if ahead is not None:
        yield _arrived(*ahead, device)


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The same one in all epochs: the allocator keeps memory for each stream."""
    return torch.cuda.Stream(device)


def _arrived(batch: Batch, copied: torch.cuda.Event, device: torch.device) -> Batch:
    """A batch that the device's own stream may use from now on, and whose memory is free again only after that."""
    current = torch.cuda.current_stream(device)
    current.wait_event(copied)
    batch.images.record_stream(current)
    return batch
