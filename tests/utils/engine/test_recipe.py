"""Recipe: choice of the file, its summary and warnings; epochs with mosaic."""

from __future__ import annotations

import dataclasses
import math

import pytest

from tessera.models.detector import DetectionModel
from tessera.models.heads.anchor import Detect
from tessera.models.model_yaml import HEADS
from tessera.utils.config import Hyp, TrainConfig, load_hyp
from tessera.utils.engine.context import RunContext
from tessera.utils.engine.optimizer import Schedule
from tessera.utils.engine.recipe import (
    choose_hyp,
    chosen_weights,
    pretrained_hint,
    recipe_warnings,
    report_recipe,
    schedule_summary,
    usual_recipe,
)
from tessera.utils.engine.state import ema_decay
from tessera.utils.types import Pretraining
from tests.data.made_run import made_run
from tests.utils.engine.trainer import FREE, TINY

LOW, SHORT, TESSERA_SHORT = "hyp.scratch-low.yaml", "hyp.short.yaml", "hyp.tessera-short.yaml"
BACKBONE, LONG, MUON = "hyp.tessera-backbone.yaml", "hyp.tessera-long.yaml", " optimizer=Muon"


def made(file: str, images: int, **flags: int | str) -> tuple[RunContext, Schedule]:
    """A run of 60 epochs over `images` images in batches of 16, with the hyperparameters of a file."""
    run = made_run(load_hyp(file), imgsz=64, batch_size=16, hyp=file, epochs=60, **flags)
    return run, Schedule(run.hyp, 60, -(-images // 16), 16)


@pytest.mark.parametrize(
    ("pretraining", "batches", "file", "of_tessera"),
    [
        ("scratch", 1, SHORT + MUON, TESSERA_SHORT + MUON),
        ("drawn", 9_999, SHORT + MUON, TESSERA_SHORT + MUON),
        ("new", 9_999, SHORT, TESSERA_SHORT),
        ("known", 9_999, "hyp.known.yaml", "hyp.tessera-known.yaml"),
        ("backbone", 9_999, SHORT, BACKBONE),
        ("scratch", 10_000, LOW, "hyp.tessera-long.yaml"),
        ("drawn", 10_000, LOW, "hyp.tessera-long.yaml"),
        ("new", 10_000, LOW, "hyp.tessera-long.yaml"),
        ("known", 10**9, "hyp.known.yaml", "hyp.tessera-known.yaml"),
        ("backbone", 10**9, SHORT, BACKBONE),
    ],
)
def test_the_recipe_depends_on_start_and_length(
    pretraining: Pretraining, batches: int, file: str, of_tessera: str
) -> None:
    of_yolox = of_tessera.removesuffix(MUON)
    expected = {"Detect": file, "DetectFree": of_tessera, "DetectYOLOv9": of_tessera, "DetectYOLOX": of_yolox}
    for name, words in expected.items():
        assert usual_recipe(HEADS[name], pretraining, batches) == tuple(words.split())


@pytest.mark.parametrize(
    ("batch_size", "images", "file"),
    [(16, 99 * 16, SHORT), (16, 99 * 16 + 1, LOW), (-1, 99 * 64, SHORT), (-1, 99 * 64 + 1, LOW)],
)
def test_the_run_is_given_the_file_of_its_length_and_autobatch_counts_as_64(
    batch_size: int, images: int, file: str
) -> None:
    given = TrainConfig(epochs=100, batch_size=batch_size)
    assert choose_hyp(given, Detect, "new", images) == ((file,), load_hyp(file))


@pytest.mark.parametrize(
    ("pretraining", "words", "reason"),
    [
        ("scratch", (SHORT, "optimizer=Muon"), " (from scratch, below 10,000 batches)"),
        ("drawn", (SHORT, "optimizer=Muon"), " (from weights pretrained on synthetic shapes, below 10,000 batches)"),
        ("known", ("hyp.known.yaml",), " (from weights that know all of these classes)"),
        ("new", (SHORT, "mosaic=0"), " (from weights of other classes, of unnamed classes, or of another model, below"),
        ("scratch", (SHORT,), ""),
    ],
)
def test_the_log_says_why_a_recipe_was_chosen(
    pretraining: Pretraining, words: tuple[str, ...], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    run, schedule = made(SHORT, 1000)
    run = dataclasses.replace(run, config=dataclasses.replace(run.config, hyp=words), pretraining=pretraining)
    with caplog.at_level("INFO"):
        report_recipe(run, schedule, DetectionModel(TINY).head)
    line = next(m for m in caplog.messages if m.startswith("Recipe:"))
    assert line.startswith(f"Recipe:   {' '.join(words)}{reason}") and bool(reason) == ("(" in line)


def test_the_summary_of_a_recipe() -> None:
    assert schedule_summary(*made(LOW, 205)) == (
        "780 batches, 262 steps of up to 64 images; SGD, learning rate 0.01, warm-up "
        "100 batches, linear decay to 0.0001; EMA over the last 1.1 steps; mosaic in every epoch"
    )
    assert schedule_summary(*made(SHORT, 205)) == (
        "780 batches, 780 steps of 16 images; AdamW, learning rate 0.002, warm-up 50 batches, "
        "constant for 50% of the epochs, then cosine decay to 0.0001; EMA over the last 87.6 steps; no mosaic in the "
        "last 15 of 60 epochs"
    )
    assert "; Adam, learning" in schedule_summary(*made(SHORT, 205, optimizer="Adam"))
    for flags, text in (
        ({"close_mosaic": 0}, "steps; mosaic in every epoch"),
        ({"close_mosaic": 90}, "steps; no mosaic"),
        ({"rect": True}, "steps; no mosaic"),
    ):
        assert schedule_summary(*made(SHORT, 205, **flags)).endswith(text)


def test_the_summary_names_layer_decay_in_a_run_from_weights() -> None:
    scratch, schedule = made(SHORT, 205)
    hyp = dataclasses.replace(scratch.hyp, layer_decay=0.9)
    tuned = dataclasses.replace(scratch, hyp=hyp, config=dataclasses.replace(scratch.config, weights="some.pt"))
    assert "learning rate 0.002 at the head, × 0.9 a layer before it, warm-up" in schedule_summary(tuned, schedule)
    assert "learning rate 0.002, warm-up" in schedule_summary(dataclasses.replace(scratch, hyp=hyp), schedule)


FINE = [(LOW, 131, "best.pt"), (LOW, 1000, ""), (SHORT, 131, "")]
OF_EACH = "--hyp hyp.short.yaml optimizer=Muon, which makes a step of every batch (docs/recipes.md)"
MORE = "more --epochs or a smaller --batch-size"


@pytest.mark.parametrize(
    ("file", "images", "weights", "steps", "why", "helps"),
    [
        (LOW, 131, "", "199 optimizer steps, 100 of 540", "too few for a model from scratch", OF_EACH),
        (LOW, 40, "best.pt", "83 optimizer steps, 100 of 180", "most of the run", f"{OF_EACH}; or {MORE}"),
        (LOW, 40, "", "83 optimizer steps, 100 of 180", "too few for a model from scratch", f"{OF_EACH}; or {MORE}"),
        (SHORT, 40, "", "180 optimizer steps, 36 of 180", "too few for a model from scratch", MORE),
        *((file, images, weights, "", "", "") for file, images, weights in FINE),
    ],
)
def test_a_run_of_few_steps_or_of_warm_up_is_warned(
    file: str, images: int, weights: str, steps: str, why: str, helps: str
) -> None:
    text = f"{steps} batches in the warm-up: {why}. Use {helps}."
    assert recipe_warnings(*made(file, images, weights=weights), DetectionModel(TINY).head) == ([text] if steps else [])


def test_a_long_run_that_is_mostly_warm_up_is_warned() -> None:
    run = made_run(load_hyp(LOW), imgsz=64, batch_size=64, hyp=LOW, epochs=5)
    (text,) = recipe_warnings(run, Schedule(run.hyp, 5, 200, 64), DetectionModel(TINY).head)
    assert text.startswith("1,000 optimizer steps, 600 of 1,000 batches in the warm-up: most of the run.")
    assert text.endswith("Use a lower warmup_epochs in --hyp.")


def test_short_runs_start_from_weights_and_hear_of_better_ones() -> None:
    for flags, images, weights, begins in (
        ({}, 160, "tessera-n", "Training from tessera-n on 160 images; weights pretrained on photographs usually do"),
        ({"cfg": "yolov5n.yaml"}, 160, "", "Training from scratch on 160 images; "),
        ({}, 16 * 99, "tessera-n", "Training from tessera-n on 1,584 images; "),
        ({}, 16 * 100, "", ""),  # 100 epochs of 100 batches
        ({"epochs": 99}, 16 * 100, "tessera-n", "Training from tessera-n on 1,600 images; "),
        ({"weights": "a.pt"}, 160, "a.pt", ""),
    ):
        config = TrainConfig(**{**flags, "weights": chosen_weights(TrainConfig(**flags), images)})
        hint = pretrained_hint(config, images)
        assert config.weights == weights and hint.startswith(begins) and bool(hint) == bool(begins)
        assert not hint or ("--weights yolox_nano.pth instead of --cfg (" in hint) == ("cfg" in flags)


def test_gains_of_another_kind_of_head_are_named() -> None:
    head = DetectionModel(TINY).head
    run, schedule = made(LOW, 1000)

    def found(hyp: Hyp) -> list[str]:
        return recipe_warnings(dataclasses.replace(run, hyp=hyp), schedule, head)

    assert found(dataclasses.replace(run.hyp, box=0.2)) == [], "a search may come to that"
    (text,) = found(dataclasses.replace(run.hyp, box=7.5))
    assert "box gain 7.5, expected about 0.05 as in hyp.short.yaml optimizer=Muon" in text


@pytest.mark.parametrize(
    ("file", "optimizer", "text"),
    [
        (SHORT, "SGD", ["--optimizer SGD: lr0 0.002 of hyp.short.yaml is for AdamW; hyp.scratch-low.yaml, for SGD, has "
                        "0.01. Give --hyp hyp.scratch-low.yaml, or a file with a similar rate."]),
        (LOW, "AdamW", ["--optimizer AdamW: lr0 0.01 of hyp.scratch-low.yaml is for SGD; hyp.short.yaml, for AdamW, "
                        "has 0.002. Give --hyp hyp.short.yaml, or a file with a similar rate."]),
        (SHORT, "Adam", []),
        (SHORT, "AdamW", []),
        ("hyp.tessera-known.yaml", "AdamW", []),
        (LONG, "AdamW", [f"--optimizer AdamW: lr0 0.01 of {LONG} is for SGD; hyp.tessera-short.yaml, for AdamW, "
                         "has 0.002. Give --hyp hyp.tessera-short.yaml, or a file with a similar rate."]),
        (LOW, "Muon", [f"--optimizer Muon: lr0 0.01 of {LOW} is for SGD; hyp.short.yaml, for AdamW, has 0.002. Give "
                       "--hyp hyp.short.yaml, or a file with a similar rate."]),
    ],
)  # fmt: skip
def test_an_optimizer_that_the_rate_was_not_made_for_is_named(file: str, optimizer: str, text: list[str]) -> None:
    head = DetectionModel(FREE if "tessera" in file else TINY).head
    run, schedule = made(file, 1000, optimizer=optimizer)
    assert recipe_warnings(run, schedule, head) == text
    fitting = dataclasses.replace(run, hyp=dataclasses.replace(run.hyp, lr0=0.004))  # between those of both
    assert recipe_warnings(fitting, schedule, head) == []


@pytest.mark.parametrize("batch_size", [16, 64, 128, 512])
@pytest.mark.parametrize(("images", "epochs"), [(118_287, 300), (205, 60), (30_000, 100)])
def test_the_average_of_a_tessera_run_is_of_the_epochs_without_mosaic(
    images: int, epochs: int, batch_size: int
) -> None:
    batches = -(-images // batch_size)
    flags = TrainConfig(epochs=epochs, batch_size=batch_size)
    _, hyp = choose_hyp(flags, HEADS["DetectFree"], "scratch", images)
    before = Schedule(hyp, epochs - round(hyp.close_mosaic * epochs), batches, batch_size).steps()
    steps = Schedule(hyp, epochs, batches, batch_size).steps()
    assert math.prod(ema_decay(n, hyp.ema_fraction) for n in range(before + 1, steps + 1)) < 0.1


@pytest.mark.parametrize(
    ("epochs", "share", "flag", "with_mosaic"),
    [(60, 0.25, -1, 45), (60, 0.25, 10, 50), (60, 0.25, 0, 60), (60, 0, -1, 60), (1, 0.25, -1, 1), (9, 1, -1, 0)],
)
def test_the_mosaic_is_closed_for_a_share_of_the_epochs_or_as_the_flag_says(
    epochs: int, share: float, flag: int, with_mosaic: int
) -> None:
    hyp = dataclasses.replace(load_hyp(LOW), close_mosaic=share)
    run = made_run(hyp, imgsz=64, batch_size=2, epochs=epochs, close_mosaic=flag)
    assert run.mosaic_epochs == with_mosaic
