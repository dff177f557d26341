"""Model YAMLs: valid ones, and the message of each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tessera.models.detector import DetectionModel
from tessera.models.layers.blocks import Bottleneck, Conv
from tessera.models.model_yaml import find_model_yaml, read_model
from tessera.utils.errors import ConfigError

TEXT = """\
nc: 2
depth_multiple: 0.5
width_multiple: 0.5
anchors:
  - [10,13, 16,30]
  - [30,61, 62,45]
backbone:
  - [-1, 1, Conv, [16, 3, 2]]
  - [-1, 1, Conv, [20, 3, 2]]
  - [-1, 6, C3, [32]]
head:
  - [-1, 1, Conv, [32, 3, 2]]
  - [-1, 1, nn.Upsample, [None, 2, 'nearest']]
  - [[-1, 2], 1, Concat, [1]]
  - [-1, 3, Bottleneck, [32, False]]
  - [[6, 3], 1, Detect, [nc, anchors]]
"""


def written(folder: Path, old: str = "", new: str = "") -> Path:
    """A good YAML with one change, in a file."""
    assert TEXT.count(old) == 1 or not old
    path = folder / "mine.yaml"
    path.write_text(TEXT.replace(old, new) if old else TEXT)
    return path


def test_scales_channels_and_repeats(tmp_path: Path) -> None:
    model = DetectionModel(written(tmp_path))
    assert model.name == "mine"
    widths = [model.model[index].conv.out_channels for index in (0, 1, 3)]
    assert widths == [8, 16, 16]  # 20 · 0.5 rounds up to a multiple of 8
    assert len(model.model[2].m) == 3
    chain = model.model[6]
    assert isinstance(chain, nn.Sequential) and len(chain) == 2
    first, second = chain
    assert isinstance(first, Bottleneck) and not first.adds
    assert first.cv1.conv.in_channels == 32 and second.cv1.conv.in_channels == 16
    assert model.head.strides == (4, 8)
    assert [tuple(x.shape) for x in model(torch.zeros(2, 3, 32, 32))] == [(2, 2, 8, 8, 7), (2, 2, 4, 4, 7)]


def test_modules_that_researchers_use(tmp_path: Path) -> None:
    rows = "[-1, 1, Focus, [16, 3]]", "[-1, 1, DWConv, [32, 3, 2]]", "[-1, 1, SPP, [32, [5, 9]]]"
    rows += "[-1, 1, nn.ZeroPad2d, [[0, 1, 0, 1]]]", "[-1, 1, nn.MaxPool2d, [2, 1, 0]]", "[-1, 1, nn.Identity, []]"
    rows += "[-1, 1, Conv, [16, [3, 1], [1, 1], 'None', 2, 1, 'False']]", "[-1, 1, SPPF, [16]]"
    path = tmp_path / "many.yaml"
    body = "\n".join(f"  - {row}" for row in rows)
    path.write_text(f"nc: 1\nanchors: 3\nbackbone:\n{body}\nhead:\n  - [[7], 1, Detect, [nc, anchors]]\n")
    model = DetectionModel(path)
    assert model.head.strides == (4,)
    conv = model.model[6]
    assert isinstance(conv, Conv)
    assert (conv.conv.kernel_size, conv.conv.padding, conv.conv.groups) == ((3, 1), (1, 0), 2)
    assert isinstance(conv.act, nn.Identity)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("Conv, [16, 3, 2]", "Cnov, [16, 3, 2]", r"mine.yaml:8: layer 0 \(Cnov\): unknown module.*Did you mean 'Conv'"),
        ("[16, 3, 2]", "[16, 3, 2.5]", r"mine.yaml:8: layer 0 \(Conv\): argument 'stride' is 2.5, expected a whole"),
        ("[16, 3, 2]", "[]", r"mine.yaml:8: .*has 0 arguments \[\], expected 1 to 7: \[channels, kernel, stride"),
        ("[16, 3, 2]", "[16, 3, 2, 1, 3]", r"mine.yaml:8: layer 0 \(Conv\): does not fit.*divisible by groups"),
        ("[32]]", "[32, True, 1, 0.5, Conv, 9]]", r"mine.yaml:10: .*has 6 arguments.*expansion, conv\]"),
        ("[32]]", "[32, True, 1, 0.5, DWConv]]", r"mine.yaml:10: .*'conv' is 'DWConv', expected one of Conv, Dept"),
        ("C3, [32]]", "Elan, [32, True, 3]]", r"mine.yaml:10: layer 2 \(Elan\).*parts of 8 channels.*multiple of 3"),
        ("[32]]", "['__import__(\"os\")']]", r"mine.yaml:10: .*'channels' is '__import__.*whole number from 1"),
        ("[[-1, 2], 1, Concat", "[[-1, 0], 1, Concat", r"mine.yaml:14: layer 5 \(Concat\): does not fit its input.*64"),
        ("[[-1, 2], 1, Concat", "[[-1, 5], 1, Concat", r"mine.yaml:14: .*`from` is 5, expected an earlier.*0 to 4"),
        ("[[-1, 2], 1, Concat", "[[-1, -7], 1, Concat", r"mine.yaml:14: .*`from` is -7"),
        ("[[-1, 2], 1, Concat", "[[], 1, Concat", r"mine.yaml:14: layer 5 \(Concat\): `from` is \[\], expected"),
        ("[[6, 3], 1, Detect", "[[], 1, Detect", r"mine.yaml:16: layer 7 \(Detect\): `from` is \[\], expected"),
        ("[-1, 3, Bottleneck", "[[-1, 2], 3, Bottleneck", r"mine.yaml:15: .*reads 2 layers, but takes one"),
        ("[-1, 3, Bottleneck", "[-1, 0, Bottleneck", r"mine.yaml:15: .*repeats is 0"),
        ("[None, 2, 'nearest']", "[None, 2, 'nearst']", r"mine.yaml:13: .*'nearst', expected one of nearest,"),
        ("[None, 2, 'nearest']", "[None, None, 'nearest']", r"mine.yaml:13: layer 4 \(nn.Upsample\): does not fit"),
        ("[[6, 3], 1, Detect", "[[6, 3, 0], 1, Detect", r"mine.yaml:16: .*reads 3 layers, but `anchors` has 2 rows"),
        ("[nc, anchors]", "[80, anchors]", r"mine.yaml:16: .*argument 'nc' is 80, expected one of nc"),
        ("[[6, 3], 1, Detect, [nc, anchors]]", "[-1, 1, nn.Identity, []]", r"mine.yaml:16: .*must be a detection head"),
        ("[-1, 1, nn.Upsample, [None, 2, 'nearest']]", "[[-1], 1, Detect, []]", r"mine.yaml:13: .*must be the last"),
        ("[-1, 6, C3, [32]]", "[-1, 6, C3]", r"mine.yaml:10: layer 2 is \[-1, 6, 'C3'\], expected \[from, repeats"),
        ("Detect, [nc", "[Detect], [nc", r"mine.yaml:16: layer 7 is .*\['Detect'\], .*expected \[from, repeats"),
        ("[16, 3, 2]", "[16, 3, 3]", r"mine.yaml:16: .*makes \d+×\d+ cells of 128×128 px, expected an integer stride"),
        ("nc: 2", "nc: two", r"mine.yaml:1: nc is 'two', expected a whole number"),
        ("nc: 2", "ncc: 2", r"mine.yaml:1: unknown key 'ncc'.*Did you mean 'nc'"),
        ("nc: 2\n", "", r"mine.yaml: the key 'nc' is missing"),
        ("nc: 2", "nc: 2\nnc: 3", r"mine.yaml:2: the key 'nc' is already on line 1"),
        ("depth_multiple: 0.5", "depth_multiple: -1", r"mine.yaml:2: depth_multiple is -1, expected a number above 0"),
        ("30,61, 62,45", "30,61, 62", r"mine.yaml:4: anchors is .*all of one length"),
        ("nc: 2", "nc: 2\nactivation: eval('1')", r"mine.yaml:2: activation is .*nn.LeakyReLU\(\)"),
        ("nc: 2", "nc: [2", r"mine.yaml:\d+: not valid YAML"),
    ],
)
def test_mistakes_name_the_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = written(tmp_path, old, new)
    with pytest.raises(ConfigError, match=message) as error:
        DetectionModel(path)
    assert str(error.value).startswith(str(path))


HUGE = [
    ("width_multiple: 0.5", "width_multiple: 1.0e+9", r"mine.yaml:8: .*parameters up to here, at most 1,000,000,000"),
    ("width_multiple: 0.5", "width_multiple: 1.0e+300", r"mine.yaml:8: .*, width_multiple and arguments .16, 3"),
    ("depth_multiple: 0.5", "depth_multiple: 1.0e+9", r"mine.yaml:10: .*6e\+09 repeats after depth_multiple, at most"),
    ("[-1, 6, C3", f"[-1, {10**150}, C3", r"mine.yaml:10: .*repeats is a number of about 151 digits, expected"),
    ("[16, 3, 2]", "[16, 1000000001, 2]", r"mine.yaml:8: layer 0 \(Conv\): (does not fit|the model has)"),
    ("[16, 3, 2]", f"[16, {10**50}, 2]", r"mine.yaml:8: layer 0 \(Conv\): does not fit"),
    ("[None, 2, 'nearest']", "[None, 1000, 'nearest']", r"yaml:13: .*makes a feature map of .* at most 16,777,216"),
    ("nc: 2", "nc: 1000000000", r"mine.yaml:16: layer 7 \(Detect\): the model has"),
    ("nc: 2", "nc: 2147483648", r"mine.yaml:1: nc is 2147483648, expected .* to 2,147,483,647"),
    ("nc: 2", "nc: 2\nch: 1000000000", r"mine.yaml:9: layer 0 \(Conv\): (does not fit|the model has)"),
    ("[16, 3, 2]", f"[16, [{', '.join('9' * 5000)}], 2]", r"mine.yaml:8: .*'kernel' is \[9, 9, 9.{0,80}, expected"),
]


@pytest.mark.parametrize(("old", "new", "message"), HUGE)
def test_what_no_machine_holds_is_refused_before_memory_is_taken(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        DetectionModel(written(tmp_path, old, new))
    assert max(map(len, str(error.value).replace(str(tmp_path), "").splitlines())) < 360


def test_anchors_beyond_any_number() -> None:
    with pytest.raises(ConfigError, match=r"anchors is 1000000000, expected at most 64 anchors a level"):
        DetectionModel("yolov5n", anchors=10**9)


def test_a_dictionary_has_no_lines_but_places(tmp_path: Path) -> None:
    plain = read_model(written(tmp_path)).plain
    plain["head"][2][2] = "Cat"
    with pytest.raises(ConfigError, match=r"mine: head\[2\]: layer 5 \(Cat\): unknown module"):
        DetectionModel(plain)


def test_reading_leaves_the_callers_dictionary_alone(tmp_path: Path) -> None:
    plain = read_model(written(tmp_path)).plain
    assert read_model(plain, {"nc": 9, "anchors": 3}).nc == 9
    assert plain["nc"] == 2 and plain["anchors"] == [[10, 13, 16, 30], [30, 61, 62, 45]]


def test_files_are_found_by_path_and_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path)
    assert find_model_yaml(path) == path
    assert find_model_yaml("yolov5n") == find_model_yaml("models/yolov5n.yaml").resolve()
    monkeypatch.chdir(tmp_path)
    assert find_model_yaml("yolov5x6.yaml").name == "yolov5x6.yaml"
    with pytest.raises(ConfigError, match=r"'yolov5q.yaml': not found, tried .*Did you mean 'yolov5"):
        find_model_yaml("yolov5q.yaml")


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"- 1\n- 2\n", b"", b"a\x00b"])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"other.yaml"):
        DetectionModel(path)
