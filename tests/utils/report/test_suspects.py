"""What `--find-errors` leaves behind: a corrected copy that divides the dataset as the dataset itself is divided."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessera.data.source.index import build_index
from tessera.data.source.spec import load_spec
from tessera.utils.flags.val import ValConfig
from tessera.utils.report.page.facts import Origin
from tessera.utils.report.suspects import report_suspects
from tessera.utils.suspects.evidence import Evidence
from tests.data.make import write_image
from tests.utils.suspects.test_copy import NAMES, text_set, written


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_what_is_held_out_of_train_is_held_out_of_the_copys(split: str, tmp_path: Path) -> None:
    text_set(tmp_path / "set")
    for number in range(3, 10):
        write_image(tmp_path / "set" / "images" / "train" / f"{number}.jpg", (100, 200), seed=10 * number)
    spec = load_spec(written(tmp_path / "set", train="images/train", val=0.3, test="images/val", names=NAMES))
    index, config = build_index(spec, split), ValConfig(find_errors=True, corrected=str(tmp_path / "copy"))
    nothing = Evidence.joined(spec.nc, [])
    (tmp_path / "run").mkdir()
    report_suspects(nothing, index, spec, tmp_path / "run", Origin(config, "best.pt", 640, "cpu"), config)
    copy = load_spec(tmp_path / "copy" / "set.yaml")
    for side in ("train", "val"):
        own, copied = build_index(spec, side), build_index(copy, side)
        assert [copied.path(i).name for i in range(len(copied))] == [own.path(i).name for i in range(len(own))]
