"""AutoBatch: fit of measurements, and real steps and validations on a device with limited memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from tessera.models.detector import DetectionModel
from tessera.models.heads.criterion import LossSettings
from tessera.utils.config import TrainConfig, load_hyp
from tessera.utils.engine.precision import Precision
from tessera.utils.errors import UserError
from tessera.utils.image_size import ImageSize, SizeHw, size_hw_of
from tessera.utils.ranks.world import World
from tessera.utils.training.autobatch import Trial, auto_batch_size, fit_batch, synthetic_batch
from tessera.utils.types import Batch
from tests.utils.engine.trainer import TINY
from tests.utils.machine.fake_cuda import FakeCuda
from tests.utils.machine.stand_in import StandIn

MIB = 2**20


@pytest.mark.parametrize(
    ("sizes", "peaks", "room", "batch"),
    [
        ([1, 2, 4, 8], [110, 120, 140, 180], 505, 40),
        ([], [], 500, 0),
        ([1], [600], 500, 0),
        ([1, 2], [100, 600], 500, 1),  # what was measured and does not fit is not chosen
        ([1, 2], [100, 100], 500, 2),  # no slope: np.polyfit's is rounding noise, and gave 54434350866179208 images
        ([1, 2, 4, 8, 16], [10**9 + 1] * 5, 8 * 10**9, 16),
        ([1, 2, 4], [30, 20, 10], 500, 4),
    ],
)
def test_the_line_through_the_measurements(sizes: list[int], peaks: list[int], room: int, batch: int) -> None:
    assert fit_batch(sizes, peaks, room) == batch


def test_where_memory_cannot_be_measured_a_batch_has_16_images() -> None:
    assert auto_batch_size(lambda n: (0, 0), 100, World()) == 16


def linear(image: float, validation: float, surprise: int = 0) -> Callable[[int], tuple[int, int]]:
    """Measurements of a device with 10,000 bytes: bytes per image in training and validation, more above 16 images."""

    def measure(images: int) -> tuple[int, int]:
        extra = surprise if images > 16 else 0
        found = int(100 + images * image) + extra, int(50 + images * validation) + extra
        if max(found) > 10_000:
            raise torch.OutOfMemoryError
        return found

    return measure


@pytest.mark.parametrize(
    ("measure", "most", "batch", "tried"),
    [
        (linear(100, 60), 1000, 79, [1, 2, 4, 8, 16, 79]),
        (linear(100, 60, 3000), 1000, 56, [1, 2, 4, 8, 16, 79, 71, 63, 56]),  # two are out of memory, one above 90 %
        (linear(100, 200), 1000, 39, [1, 2, 4, 8, 16, 39]),  # validation takes more than training
        (linear(100, 60), 24, 24, [1, 2, 4, 8, 16, 24]),  # the images of the dataset
        # Eight times the largest measured batch is measured before a larger one.
        (linear(0.125, 1), 2000, 2000, [1, 2, 4, 8, 16, 128, 1024, 2000]),
    ],
)
def test_the_chosen_batch_is_tried_and_made_smaller_until_it_fits(
    measure: Callable[[int], tuple[int, int]], most: int, batch: int, tried: list[int]
) -> None:
    calls: list[int] = []
    found = auto_batch_size(lambda n: calls.append(n) or measure(n), most, World(accelerator=StandIn(10_000)))  # type: ignore[func-returns-value]
    assert found == batch and calls == tried


def test_errors_for_one_image() -> None:
    world = World(accelerator=StandIn(capacity=10_000))
    with pytest.raises(UserError, match="one image does not fit"):
        auto_batch_size(linear(20_000, 60), 24, world)
    with pytest.raises(ZeroDivisionError):  # not taken for missing memory
        auto_batch_size(lambda n: (n // 0, 0), 24, world)


def made_trial(device: StandIn | FakeCuda, size: ImageSize, **flags: object) -> Trial:
    torch.manual_seed(0)
    hyp = load_hyp("hyp.scratch-low.yaml")
    model = DetectionModel(TINY, names=("a", "b")).to(device.device)
    config = TrainConfig(**{"weights": "", "batch_size": -1, **flags})  # type: ignore[arg-type]
    criterion, precision = model.head.criterion(LossSettings.of(hyp, imgsz=64)), Precision(device, torch.float16)
    return Trial(config, hyp, World(accelerator=device), 64, size, model, criterion, precision)


def test_a_trial_of_one_image_of_one_cell_measures_two() -> None:
    """A normalisation cannot take the variance of one value."""
    with StandIn() as device:
        trial = made_trial(device, 8)
        assert trial.model.stride == 8 and trial(1) == trial(2)


def test_a_trial_is_a_whole_step_and_leaves_the_model_as_it_was() -> None:
    with StandIn() as device:
        trial = made_trial(device, 64, optimizer="AdamW")
        model = trial.model
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        weights = sum(p.numel() * 4 for p in model.parameters())
        held = device.allocated_memory()
        one, _ = trial(1)
        four, four_in_validation = trial(4)
        assert device.allocated_memory() - held < 64 * 1024
        assert one > 4 * weights  # gradients, two moments, the average
        assert four > one and four_in_validation > 4 * 2 * 64 * 64 * 3
        assert model.training
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, before[name]), name
        large, _ = made_trial(device, 96, optimizer="AdamW")(4)
        assert large > four


def test_the_chosen_batch_fits_and_fills_its_share() -> None:
    with FakeCuda() as device:
        trial = made_trial(device, 64)
        held = device.allocated_memory()
        device.capacity = held + 8 * MIB
        batch = auto_batch_size(trial, 1000, World(accelerator=device))
        assert 1 <= batch < 1000
        assert 0.6 * 8 * MIB < max(trial(batch)) <= 0.9 * 8 * MIB
        with pytest.raises(torch.OutOfMemoryError):
            trial(batch * 2)


@pytest.mark.parametrize("imgsz", [64, SizeHw(64, 96)])
def test_the_validation_is_tried_at_the_largest_shape_there(imgsz: ImageSize, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[SizeHw] = []

    def made(images: int, size: ImageSize, taught: int = 0) -> Batch:
        sizes.append(size_hw_of(size))
        return synthetic_batch(images, size, taught)

    monkeypatch.setattr("tessera.utils.training.autobatch.synthetic_batch", made)
    with FakeCuda() as device:
        trial = dataclasses.replace(made_trial(device, imgsz), imgsz=imgsz)
        trial(1)
    height, width = size_hw_of(imgsz)
    assert sizes == [(height, width)] * 3 + [(height + trial.model.stride, width + trial.model.stride)] * 2
