"""The stand-in device itself: waits, copies, events and memory like on CUDA."""

from __future__ import annotations

import weakref

import torch

from tests.utils.engine.trainer import made_batch
from tests.utils.machine.stand_in import StandIn


def test_an_upload_is_noise_until_it_is_waited_for() -> None:
    with StandIn() as device:
        tensor = torch.arange(4)
        arrived = device.upload(tensor)
        tensor += 1  # page-locked memory that is overwritten too early
        assert arrived().clone().add(0).eq(torch.arange(1, 5)).sum() == 4


def test_the_last_batch_is_free_once_it_was_used() -> None:
    """An epoch's stream stays open while its model is validated."""
    with StandIn() as device:
        stream = device.prefetch([made_batch(seed) for seed in range(3)])
        for _ in range(3):
            images = weakref.ref(next(stream).images)
            assert images() is None
        assert next(stream, None) is None


def test_an_event_that_was_not_waited_for_stalls() -> None:
    with StandIn() as device:
        value = device.send(torch.ones(3))
        start, middle = device.record_event(), device.record_event()
        arrived, end = device.read_back(value), device.record_event()
        arrived()
        assert device.elapsed_s(start, middle) >= 0 and device.waits == 0
        assert device.elapsed_s(start, end) >= 0 and device.waits == 1
        assert device.elapsed_s(start, end) >= 0 and device.waits == 1
