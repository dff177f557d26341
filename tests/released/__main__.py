"""Record checkpoints of this minor version and their results, once, for later versions to compare with.

uv run python -m tests.released      # tests/released/0.1, of the version in tessera/__init__.py
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from tessera.analysis.charts import read_results
from tessera.commands import train
from tessera.utils.checkpoints.run_directory import write_yaml
from tessera.utils.config import load_hyp
from tests.released.kept import CONFIDENCE, FOLDER, detections, flags, measured, minor_version
from tests.released.squares import write_squares

BODY = [[-1, 1, "Conv", [8, 6, 2, 2]], *[[-1, 1, "Conv", [8, 3, stride]] for stride in (2, 2, 1, 1)]]
HEADS = {"anchor": [[4], 1, "Detect", ["nc", "anchors"]], "yolox": [[4], 1, "DetectYOLOX", ["nc"]]}
ANCHORS = {"anchor": {"anchors": [[14, 14, 22, 22]]}, "yolox": {}}
KEPT = {"anchor": "last.pt", "yolox": "best.pt"}  # a file of each kind that checkpoints have
HYPS: dict[str, tuple[str, dict[str, float]]] = {
    "anchor": ("hyp.no-augmentation.yaml", {"nominal_batch": 0.0}),
    "yolox": ("hyp.tessera-short.yaml", {"lr0": 0.01, "mosaic": 0.0, "scale": 0.0, "translate": 0.0}),
}
EPOCHS = 60
MARGIN = 0.05  # distance of every score from the threshold, so that no rounding decides


def main() -> int:
    """Train, write and describe; returns 1 where this minor version has its folder."""
    target = FOLDER / minor_version()
    if target.exists():
        print(f"error: {target} is there: it is what released versions wrote, and stays. Nothing was done.")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        data, kept = write_squares(Path(folder) / "squares"), Path(folder) / "kept"
        for kind in HEADS:
            keep(kind, Path(folder), data, kept / kind)
        shutil.copytree(kept, target)
    print(f"{target}: {sum(path.stat().st_size for path in target.rglob('*') if path.is_file()):,} bytes")
    return 0


def keep(kind: str, folder: Path, data: Path, target: Path) -> None:
    cfg, hyp = folder / f"{kind}.yaml", folder / "hyp.yaml"
    described = {"nc": 2, "depth_multiple": 1.0, "width_multiple": 1.0, "backbone": BODY, "head": [HEADS[kind]]}
    write_yaml(cfg, {**described, **ANCHORS[kind]})
    recipe, own = HYPS[kind]
    write_yaml(hyp, dataclasses.replace(load_hyp(recipe), **own).as_dict())
    begun = {**flags(data, folder / "runs"), "name": kind, "cfg": str(cfg), "hyp": str(hyp)}
    train.run(**begun, epochs=EPOCHS, optimizer="AdamW", noautoanchor=True)
    weights = folder / "runs" / kind / "weights" / KEPT[kind]
    found: dict[str, Any] = {"metrics": measured(weights, data, folder / "val"), "detections": detections(weights)}
    check(found, detections(weights, CONFIDENCE - MARGIN))
    target.mkdir(parents=True)
    shutil.copy(weights, target)
    if weights.name == "last.pt":
        train.run(resume=str(weights), epochs=EPOCHS + 1)
        row = read_results(folder / "runs" / kind / "results.csv").set_index("epoch").loc[EPOCHS]
        found["resumed"] = {name: float(row[name]) for name in row.index if name.startswith("train/")}
    (target / "expected.json").write_text(json.dumps(found, indent=1) + "\n")


def check(found: dict[str, Any], nearly: list[list[list[float]]]) -> None:
    """Raise ValueError for a model that has not learnt, or one whose scores (`nearly`) lie near the threshold."""
    scores = [row[4] for rows in found["detections"] for row in rows]
    if found["metrics"]["map50"] < 0.9 or len(scores) < 6:
        raise ValueError(f"the model has not learnt: {found}")
    if nearly != found["detections"] or min(scores) < CONFIDENCE + MARGIN:
        raise ValueError(f"scores near the threshold of {CONFIDENCE}: {nearly}")


if __name__ == "__main__":
    sys.exit(main())
