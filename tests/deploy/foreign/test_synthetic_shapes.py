"""The generated dataset: deterministic, tight boxes, atomic writes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tessera.deploy.foreign import synthetic_shapes
from tessera.deploy.foreign.synthetic_shapes import render_image, write_shapes
from tessera.utils.errors import UserError


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("datasets") / "shapes"
    write_shapes(root, train=60, val=20)
    return root


Painted = tuple[np.ndarray, np.ndarray]  # the image before and after


@pytest.fixture
def painted(monkeypatch: pytest.MonkeyPatch) -> list[Painted]:
    """What each object that is painted changes."""
    seen: list[Painted] = []
    paint = synthetic_shapes._paint

    def spy(rng: np.random.Generator, image: np.ndarray, contours: list[np.ndarray], alpha: np.ndarray) -> None:
        before = image.copy()
        paint(rng, image, contours, alpha)
        seen.append((before, image.copy()))

    monkeypatch.setattr(synthetic_shapes, "_paint", spy)
    return seen


def files(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def test_same_bytes_again_and_other_bytes_with_another_seed(written: Path, tmp_path: Path) -> None:
    assert [path.name for path in written.parent.iterdir()] == ["shapes"], "no temporary folder is left"
    assert [len([*(written / "images" / split).iterdir()]) for split in ("train", "val")] == [60, 20]
    write_shapes(tmp_path / "again", train=60, val=20)
    assert files(tmp_path / "again") == files(written)
    write_shapes(tmp_path / "other", train=60, val=20, seed=1)
    write_shapes(tmp_path / "fewer", train=3, val=2)
    assert files(tmp_path / "fewer").items() <= files(written).items(), "however many are written"
    assert not set(files(tmp_path / "other").values()) & {v for k, v in files(written).items() if k.endswith(".jpg")}


def test_labels_are_what_was_rendered(written: Path) -> None:
    for number in range(20):
        image, classes, boxes = render_image("train", number)
        height, width = image.shape[:2]
        label = written / f"labels/train/{number:05d}.txt"
        rows = (
            np.loadtxt(label, ndmin=2).reshape(-1, 5) if label.exists() and label.stat().st_size else np.empty((0, 5))
        )
        assert rows[:, 0].astype(int).tolist() == classes.tolist()
        corners = np.concatenate((rows[:, 1:3] - rows[:, 3:] / 2, rows[:, 1:3] + rows[:, 3:] / 2), 1)
        np.testing.assert_allclose(corners * (width, height, width, height), boxes, atol=1e-3)
        assert (rows[:, 1:] >= 0).all() and (rows[:, 1:] <= 1).all()


def test_boxes_are_tight(painted: list[Painted]) -> None:
    """Outside its box a shape changes next to nothing; each of the box's four edge lines it does change."""
    seen = 0
    for number in range(30):
        painted.clear()
        _, _, boxes = render_image("val", number)
        assert len(painted) == len(boxes)
        for (before, after), box in zip(painted, boxes.astype(int), strict=True):
            left, top, right, bottom = box
            changed = np.abs(after - before).max(2)
            outside = changed.copy()
            # Antialiasing touches the next pixel, and more of them faintly past a sharp tip.
            outside[max(top - 1, 0) : bottom + 1, max(left - 1, 0) : right + 1] = 0
            assert outside.max() < 0.25 * changed.max(), (number, box)
            inside = changed[top:bottom, left:right]
            for line in (inside[0], inside[-1], inside[:, 0], inside[:, -1]):
                assert line.max() > 1, (number, box)
            seen += 1
    assert seen > 60


def test_existing_dataset_is_left_alone(tmp_path: Path) -> None:
    root = tmp_path / "shapes"
    write_shapes(root, train=2, val=1)
    (root / "mine.txt").write_text("kept")
    before = files(root)
    write_shapes(root, train=5, val=5)
    assert files(root) == before


def test_an_empty_folder_is_filled_and_a_foreign_one_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write_shapes(tmp_path / "empty", train=1, val=1)
    assert (tmp_path / "empty/images/val/00000.jpg").exists()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/thesis.txt").write_text("precious")
    with pytest.raises(UserError, match="foreign: cannot put the shapes dataset here"):
        write_shapes(tmp_path / "foreign", train=1, val=1)
    assert (tmp_path / "foreign/thesis.txt").read_text() == "precious"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "foreign"]
