"""Flags and hyperparameters: spellings, defaults, errors."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from tessera.analysis.comparison.flags import CompareConfig
from tessera.data.source.dataset_yaml import load_spec
from tessera.deploy.exporting.flags import ExportConfig
from tessera.deploy.inference.flags import DetectConfig
from tessera.utils.config import HYPS_DIR, Hyp, TrainConfig, complete_hyp, given_hyp, load_hyp
from tessera.utils.errors import ConfigError
from tessera.utils.flags.options import Options
from tessera.utils.flags.val import ValConfig

SPEC_DEFAULTS = {
    "weights": "auto", "data": "shapes.yaml", "hyp": (), "epochs": 100, "batch_size": 16, "imgsz": 640,
    "cache": "none", "optimizer": "", "workers": 8, "project": "runs/train", "name": "exp", "patience": 100,
    "save_period": -1, "seed": 0, "local_rank": -1, "amp": "auto", "close_mosaic": -1, "evolve": 0,
    "loggers": "tensorboard",
}  # fmt: skip


def test_defaults() -> None:
    config = TrainConfig()
    assert {key: getattr(config, key) for key in SPEC_DEFAULTS} == SPEC_DEFAULTS
    assert ValConfig().conf_thres == 0.001 and ValConfig().iou_thres == 0.6 and ValConfig().max_det == 300


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        (["--batch", "8"], "batch_size", 8),
        (["--img", "320"], "imgsz", 320),
        (["--img-size", "640", "640"], "imgsz", 640),
        (["--imgs", "384", "640", "--rect"], "imgsz", (384, 640)),
        (["--imgsz=384 640"], "imgsz", (384, 640)),
        (["--cache"], "cache", "ram"),
        (["--resume"], "resume", "newest"),
        (["--resume", "a/last.pt"], "resume", "a/last.pt"),
        (["--evolve"], "evolve", 300),
        (["--freeze", "10"], "frozen_layers", tuple(range(10))),
        (["--freeze", "0", "3", "7"], "frozen_layers", (0, 3, 7)),
        (["--local_rank=1"], "local_rank", 1),
        (["--loggers", "none"], "logger_names", ()),
        (["--log", "tensorboard,wandb"], "logger_names", ("tensorboard", "wandb")),
        (["--optimizer", "adamw"], "optimizer", "AdamW"),
        (["--cache", "images"], "cache", "ram"),
        (["--cache-images", "--epochs", "5"], "cache", "ram"),
        (["--adam"], "optimizer", "Adam"),
        (["--adam", "--optimizer", "AdamW"], "optimizer", "AdamW"),
        (["--notest"], "noval", True),
        (["--save_period=5"], "save_period", 5),
        (["--multi_scale"], "multi_scale", True),
    ],
)
def test_spellings(argv: list[str], field: str, value: Any) -> None:
    assert getattr(TrainConfig(**TrainConfig.from_args(argv)), field) == value


IDLE = {
    TrainConfig: "--quad --bucket b --entity=e --upload_dataset --bbox_interval -1 --artifact_alias latest --noval",
    ValConfig: "--dnn --save-hybrid --half",
}


@pytest.mark.parametrize("options", IDLE, ids=lambda options: options.program)
def test_yolov5_flags_without_effect_warn_in_one_line(options: type[TrainConfig] | type[ValConfig]) -> None:
    argv = IDLE[options].split()
    flags = [word.partition("=")[0].replace("_", "-") for word in argv[:-1] if word.startswith("--")]
    assert options.warning(argv) == f"{' '.join(flags)}: YOLOv5 flags that have no effect."
    assert options.from_args(argv) == options.from_args(argv[-1:]) and options.warning(argv[-1:]) == ""


def test_flags_of_yolov5_from_python(caplog: pytest.LogCaptureFixture) -> None:
    given = {"quad": True, "upload_dataset": "val", "entity": None, "adam": True, "evolve_population": "", "epochs": 3}
    assert TrainConfig.named(given) == {"optimizer": "Adam", "epochs": 3}
    assert [record.getMessage() for record in caplog.records] == [
        "--quad --upload-dataset: YOLOv5 flags that have no effect."
    ]
    with pytest.raises(ConfigError, match=r"--resume-evolve: a search continues from its own folder: --evolve 300 --r"):
        TrainConfig.from_args(["--resume_evolve", "evolve.csv"])


def test_python_names() -> None:
    assert ValConfig.from_args(["--conf", "0.25", "--img", "320"]) == {"conf_thres": "0.25", "imgsz": "320"}
    assert TrainConfig(**TrainConfig.named({"img": 320, "batch": 4, "cache": True})) == TrainConfig(
        imgsz=320, batch_size=4, cache="ram"
    )
    with pytest.raises(ConfigError, match=r"'bath'.*Did you mean 'batch'"):
        TrainConfig.named({"bath": 4})


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ("0", "found 0, allowed is 32 to 8192"),
        ("-640", "found -640, allowed is 32 to 8192"),
        ("384 0", "found 0, allowed is 32 to 8192"),
        ("64.5 96", "found '64.5', expected a whole number, or two: height width"),
        ("384x640", "found '384x640', expected a whole number, or two: height width"),
        ("384 640 3", "found '384 640 3', expected one number, the long side, or two, height and width"),
    ],
)
def test_image_sizes_that_are_refused(sizes: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"^--imgsz: {said}\.$"):
        TrainConfig(**TrainConfig.from_args(["--imgsz", *sizes.split()]))


def test_a_height_and_a_width_are_kept_as_given() -> None:
    """Files of two models may follow on a command line."""
    config = TrainConfig(imgsz=[384, 640])  # type: ignore[arg-type]
    assert TrainConfig(**TrainConfig.from_args(config.as_args())) == TrainConfig(**config.as_dict()) == config
    assert config.as_dict()["imgsz"] == [384, 640] and f"{config.imgsz}" == "384x640"
    compared = CompareConfig.from_args(["--imgsz", "384", "640", "a.pt", "b.pt"])
    assert compared == {"imgsz": "384 640", "models": ["a.pt", "b.pt"]}


@pytest.mark.parametrize("options", [ValConfig, DetectConfig, ExportConfig])
def test_a_default_outside_the_range_stands_for_something_else(options: type[Options]) -> None:
    """0 = the trained size, or no tiles; what is smaller than a tile or an image can be is refused."""
    flags = {"--imgsz": "32 to 8192, or 0", **({} if options is ExportConfig else {"--tile": "at least 32, or 0"})}
    for flag, allowed in flags.items():
        options(**options.from_args([flag, "0"]))
        with pytest.raises(ConfigError, match=rf"^{flag}: found 16, allowed is {allowed}\.$"):
            options(**options.from_args([flag, "16"]))
        with pytest.raises(ConfigError, match=rf"^{flag}: found -1, allowed is {allowed}\.$"):
            options(**options.from_args([flag, "-1"]))


@pytest.mark.parametrize("path", sorted(HYPS_DIR.glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_hyperparameters_are_valid(path: Path) -> None:
    hyp = load_hyp(path.name)
    assert Hyp.from_dict(hyp.as_dict(), "copy") == hyp


def test_anchors_of_an_evolved_file() -> None:
    """YOLOv5 writes them into what it evolves; without them nothing changes, and no file gets the key."""
    values = load_hyp("hyp.scratch-low.yaml").as_dict()
    assert "anchors" not in values and Hyp.from_dict(values, "x").anchors == 0
    evolved = Hyp.from_dict({**values, "anchors": 3.412}, "x")
    assert evolved.anchors == 3.412 and Hyp.from_dict(evolved.as_dict(), "x") == evolved
    with pytest.raises(ConfigError, match="anchors: found -1, allowed is 0 to 32"):
        Hyp.from_dict({**values, "anchors": -1}, "x")


OPTIONAL = {  # the keys that a file may leave out, at what YOLOv5 does
    "anchors": 0, "optimizer": "SGD", "nominal_batch": 64, "warmup_min_batches": 100, "warmup_fraction": 0,
    "flat_fraction": 0, "cosine": 0, "ema_fraction": 0, "close_mosaic": 0, "clip": 10, "dfl": 1.5, "topk": 10,
    "alpha": 0.5, "beta": 6, "layer_decay": 1, "class_weights": "",
}  # fmt: skip


def test_keys_that_may_be_left_out() -> None:
    """A file that names them at their defaults is the file without them, in every checkpoint and table."""
    values = load_hyp("hyp.scratch-low.yaml").as_dict()
    assert not OPTIONAL.keys() & values.keys()
    hyp = Hyp.from_dict(values, "x")
    assert {key: getattr(hyp, key) for key in OPTIONAL} == OPTIONAL
    assert Hyp.from_dict({**values, **OPTIONAL}, "x") == hyp and hyp.as_dict() == values
    with pytest.raises(ConfigError, match="x: flat and flat_fraction are one hyperparameter"):
        Hyp.from_dict({**values, "flat": 0.5, "flat_fraction": 0.5}, "x")
    other = Hyp.from_dict({**values, "optimizer": "adamw", "flat": 0.5}, "x")
    assert other.as_dict() == {**values, "optimizer": "AdamW", "flat_fraction": 0.5}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("optimizer", "Lion", "found 'Lion', expected one of SGD, Adam, AdamW"),
        ("optimizer", ["SGD"], r"found \['SGD'\], expected one of SGD, Adam, AdamW"),
        ("flat", 1, "found 1, allowed is 0 to 0.99"),  # its name in 0.1
        ("clip", 0, r"found 0, allowed is 0.001 to 1e\+06"),
        ("topk", 2.5, "found 2.5, expected a whole number from 1 to 100"),
        ("layer_decay", 1.1, "found 1.1, allowed is 0.1 to 1"),
        ("class_weights", "inverse", "found 'inverse', expected auto, or weights by class name: {\"king\": 2}"),
        ("class_weights", {}, "found {}, expected auto, or weights"),
        ("class_weights", "{" * 10_000, "found '{{.*, expected auto, or weights"),
        ("class_weights", '{"a":' + "[" * 100_000, "found '{.*, expected auto, or weights"),
        ("class_weights", {"ace": 1, "king": 0}, "'king': found 0, allowed is 0.001 to 1000"),
        ("class_weights", {"king": math.nan}, "'king': found nan, expected a number from 0.001 to 1000"),
        ("class_weights", '{"king": Infinity}', "'king': found inf, expected a number from 0.001 to 1000"),
        ("class_weights", {"king": True}, "'king': found True, expected a number"),
    ],
)
def test_values_of_optional_keys_that_are_refused(key: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"x: {key}: {message}"):
        Hyp.from_dict({**load_hyp("hyp.scratch-low.yaml").as_dict(), key: value}, "x")


def test_class_weights_round_trip_as_one_line() -> None:
    """Of a file's mapping or a word; in a table and a checkpoint they are that line."""
    values = load_hyp("hyp.scratch-low.yaml").as_dict()
    for given, line in (({"king": 2, 9: "1e-1"}, '{"king": 2.0, "9": 0.1}'), (" Auto", "auto")):
        hyp = Hyp.from_dict({**values, "class_weights": given}, "x")
        assert hyp.as_dict()["class_weights"] == hyp.class_weights == line
        assert Hyp.from_dict(hyp.as_dict(), "x") == hyp


@pytest.mark.parametrize("value", [10**400, "9" * 6000, "1e999", "nan", None, [1], True, "x" * 10**6])
def test_numbers_that_are_none(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"x: lr0: found .*, expected a number from 1e-08 to 10") as error:
        Hyp.from_dict({**load_hyp("hyp.scratch-low.yaml").as_dict(), "lr0": value}, "x")
    assert len(str(error.value)) < 200


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"epochs": 0}, "--epochs: found 0, allowed is at least 1"),
        ({"label_smoothing": float("nan")}, "a number"),
        ({"rect": "yes"}, "true or false"),
        ({"optimizer": "Lion"}, "--optimizer: found 'Lion', expected one of SGD, Adam, AdamW"),
        ({"cache": "rom"}, "Did you mean 'ram'"),
        ({"loggers": "wandbb"}, "--loggers: unknown tracker 'wandbb'. Did you mean 'wandb'"),
        ({"epochs": "9" * 6000}, "--epochs: found '999.*, expected a whole number"),
        ({"epochs": 10**400}, "--epochs: found a number of about 401 digits, expected a whole number"),
        ({"epochs": 10**15}, r"--epochs: found 1000000000000000, allowed is at most 2,147,483,647"),
        ({"label_smoothing": "1e999"}, "--label-smoothing: found '1e999', expected a number"),
        ({"sampling": "balance"}, "--sampling: found 'balance', expected one of shuffled, balanced. Did you mean 'bal"),
        (
            {"sampling": "balanced", "image_weights": True},
            "--sampling balanced with --image-weights: .* Leave out one of",
        ),
        ({"data": "a\0b"}, r"--data: found 'a\\x00b', expected a path; none holds a NUL"),
        ({"optimizer": "S\x1b[31mGD"}, r"--optimizer: found 'S\\x1b\[31mGD'"),
    ],
)
def test_refused_in_one_short_line(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        TrainConfig(**values)
    assert len(str(error.value)) < 250 and str(error.value).isprintable()


@pytest.mark.parametrize("options", [TrainConfig, ValConfig, DetectConfig, ExportConfig, CompareConfig])
def test_no_path_is_an_address(options: type[Options]) -> None:
    paths = {f.name for f in dataclasses.fields(options)} & {
        "weights", "cfg", "data", "hyp", "resume", "project", "name", "report", "output", "models", "a", "b",
    }  # fmt: skip
    for name in sorted(paths):
        with pytest.raises(ConfigError, match=f"(--{name}|^MODEL): found the address 's3://bucket/x', expected a path"):
            options(**{name: "s3://bucket/x"})


@pytest.mark.parametrize(
    ("options", "argv", "flag"),
    [
        (TrainConfig, ["--check-data", "pets/"], "--data"),
        (TrainConfig, ["--epochs", "2", "lr0=.004"], "--hyp"),
        (ValConfig, ["--verbose", "pets.yaml"], "--data"),
        (DetectConfig, ["--weights", "a.pt", "bus.jpg"], "--source"),
        (ExportConfig, ["best.pt"], "--weights"),
    ],
)
def test_the_flag_of_a_value_without_one_is_named(options: type[Options], argv: list[str], flag: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown argument '{argv[-1]}'\. Is it the value of {flag}\?"):
        options.from_args(argv)


def test_values_and_partial_files_change_the_recipe_and_complete_files_do_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    partial, whole = tmp_path / "exp=2.yaml", tmp_path / "whole.yaml"
    partial.write_text("mosaic: 0.5\nlr0: 1e-3\nlrf: 0.05\n")
    low, short = load_hyp("hyp.scratch-low.yaml"), load_hyp("hyp.short.yaml")
    whole.write_text("\n".join(f"{key}: {value}" for key, value in low.as_dict().items()))
    args = ["--hyp", str(partial), "lr0=.004", "warmup-epochs=0", 'class_weights={"a/b": 2}', "--epochs", "3"]
    words = TrainConfig(**TrainConfig.from_args(args)).hyp
    with caplog.at_level("INFO"):
        named, hyp = complete_hyp(words, ("hyp.short.yaml",), short)
    changes = {"mosaic": 0.5, "lr0": 0.004, "warmup_epochs": 0.0, "class_weights": '{"a/b": 2.0}'}
    assert named == ("hyp.short.yaml", *words) and hyp == dataclasses.replace(short, **changes)
    assert "Changed:  mosaic 1.0 → 0.5, lr0 0.002 → 0.004, class_weights" in caplog.text
    assert complete_hyp(named, (), low) == (named, hyp), "as a resumed run reads them"
    words = TrainConfig(hyp=(str(whole), "mosaic=0")).hyp
    assert complete_hyp(words, ("hyp.short.yaml",), short) == (words, dataclasses.replace(low, mosaic=0.0))
    assert TrainConfig(hyp={"mosaic": 0, "class_weights": {"a": 1}}).hyp == ("mosaic=0", 'class_weights={"a": 1}')
    assert TrainConfig(hyp="").hyp == () and TrainConfig(hyp="hyp.short.yaml").hyp == ("hyp.short.yaml",)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--hyp", "mosaic=x"], "^--hyp: mosaic: found 'x', expected a number from 0 to 1"),
        (["--hyp", "moaic=0"], "^--hyp: unknown hyperparameter 'moaic'. Did you mean 'mosaic'"),
        (["--hyp", "mosaic"], "(?s)^--hyp mosaic: no such file.*given as key=value"),
        (["--lr0", "0.01"], r"^--lr0: no flag, but a setting of --hyp. Give --hyp lr0=0.01\."),
        (["--obj=2"], r"Give --hyp obj=2\."),
        (["--copy_paste", "--noval"], "Give --hyp copy_paste=VALUE"),
    ],
)
def test_wrong_settings_and_settings_used_as_flags_are_named(args: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        given_hyp(TrainConfig(**TrainConfig.from_args(args)).hyp)
    with pytest.raises(ConfigError, match=r"Give hyp={'lr0': 0.01}"):
        TrainConfig.named({"lr0": 0.01})


def test_a_mapping_stands_for_a_dataset_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / "cache"))
    (tmp_path / "here" / "images").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    values = {"train": Path("images"), "val": ["images"], "names": {0: "cat"}}
    given = [cls.named({"data": values})["data"] for cls in (TrainConfig, ValConfig)]
    monkeypatch.chdir(tmp_path)  # as a later resume
    spec = load_spec(given[0])
    assert given[0] == given[1] and spec.names == ("cat",)
    assert spec.root == tmp_path / "here"
    with pytest.raises(ConfigError, match=r"^data: found a value that is no text, number, list or mapping"):
        TrainConfig.named({"data": {**values, "val": object()}})
