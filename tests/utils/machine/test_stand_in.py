"""The stand-in device itself: waits, copies, events and memory like on CUDA."""

from __future__ import annotations

import weakref

import pytest
import torch

from tests.utils.engine.trainer import made_batch
from tests.utils.machine.stand_in import StandIn


def test_an_upload_is_noise_until_it_is_waited_for() -> None:
    with StandIn() as device:
        tensor = torch.arange(4)
        arrived = device.upload(tensor)
        tensor += 1  # page-locked memory that is overwritten too early
        assert arrived().clone().add(0).eq(torch.arange(1, 5)).sum() == 4 and device.uploads == 1


def test_reading_a_value_waits_and_in_a_step_it_is_an_error() -> None:
    with StandIn() as device:
        host, value = torch.ones(3), device.send(torch.ones(3))
        computed = (value * 2 + host).sum()
        with device.no_waiting():
            assert host.tolist() == [1, 1, 1] and float(host.sum()) == 3
            for read in (
                computed.item,
                computed.tolist,
                lambda: bool(computed > 0),
                value.nonzero,
                lambda: value[value > 0],
                lambda: host[value > 0],
                lambda: value.to("cpu"),
                lambda: value.to(device="cpu"),
                lambda: torch.where(value > 0),
                lambda: torch.is_nonzero(computed),
                lambda: torch.repeat_interleave(value, device.send(torch.tensor([1, 2, 1]))),
                lambda: value.index_put_((torch.tensor([0]),), host[0], accumulate=True),
                lambda: torch.unique(value),
                lambda: torch.equal(value, host),
                lambda: torch.allclose(value, host),
                lambda: computed in (1.0, 2.0),
            ):
                with pytest.raises(RuntimeError, match="the host waits"):
                    read()
        assert device.waits == 0
        assert device.read_back(computed)().item() == 9 and device.waits == 0
        assert computed.item() == 9 and device.waits == 1
        device.synchronize()
        assert device.waits == 2


def test_gradients_are_values_of_the_device() -> None:
    with StandIn() as device:
        layer = torch.nn.Linear(3, 1)
        layer(device.send(torch.ones(2, 3))).sum().backward()
        with device.no_waiting(), pytest.raises(RuntimeError, match="the host waits"):
            layer.weight.grad.norm().item()


def test_memory_ends_and_comes_back() -> None:
    with StandIn(capacity=2**20) as device:
        kept = torch.zeros(2**17, dtype=torch.float32)
        assert device.allocated_memory() == 2**19
        with pytest.raises(torch.OutOfMemoryError):
            kept.double() + 1
        device.reset_peak_memory()
        other = kept[: 2**16] + 1
        assert device.peak_memory() == 2**19 + 2**18
        del other
        assert device.allocated_memory() == 2**19 and device.free_memory() == 2**19


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
        with device.no_waiting():
            with pytest.raises(RuntimeError, match="the host waits for the device: elapsed_s"):
                device.elapsed_s(start, middle)
            arrived()
            assert device.elapsed_s(start, middle) >= 0
            with pytest.raises(RuntimeError, match="the host waits for the device: elapsed_s"):
                device.elapsed_s(start, end)
        assert device.elapsed_s(start, end) >= 0 and device.waits == 1
