"""Weights of objects from the scores of their labels: the key `label_weights`, COCO, auto-labels, batches, tiles."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from tessera.data.augment.transforms import END, OwnTransform, transforms_of
from tessera.data.feed.dataset import TrainDataset, ValDataset
from tessera.data.feed.image_store import ImageStore
from tessera.data.feed.tiles import build_tile_index
from tessera.utils.config import load_hyp
from tessera.utils.errors import UserError
from tessera.utils.types import DatasetIndex, Draw, Sample
from tests.data.made_index import make_index, write_images
from tests.data.make import write_dataset, write_image
from tests.data.source.made_yaml import build, check, coco_set, refuse, same, write, write_list

ROWS = "0 0.5 0.5 0.5 0.5\n" * 2 + "1 0.3 0.3 0.1 0.1\n"  # the second is a duplicate
KEY = "label_weights: score\n"


@pytest.fixture
def yaml(tmp_path: Path) -> Path:
    """Labels of a model for `a`, `b` and `val/c`; those of `b` have been edited since."""
    root = tmp_path / "pets"
    yaml = write_dataset(root, {"train/a": ROWS, "train/b": ROWS, "val/c": ROWS})
    for split, scores in {
        "train": {"a.txt": [0.9, 0.8, 0.25], "b.txt": [0.5] * 3},
        "val": {"c.txt": [0.5] * 3},
    }.items():
        write_list(root / "labels" / split, scores)
    write(root / "labels" / "train" / "b.txt", ROWS + "\n")
    return write(yaml, yaml.read_text() + KEY)


def test_unchanged_auto_labels_of_train_have_their_scores_as_weights(yaml: Path) -> None:
    index, val = build(yaml), build(yaml, "val")
    assert index.label_weights.tolist() == [np.float32(0.9), 0.25, 1, 1] and not len(val.label_weights)
    assert same(build(yaml), index), "from the cache"
    assert "train: 2 of 4 objects (50 %) have a weight below 1; all together count as 3.2" in check(yaml).facts
    path = write_list(yaml.parent / "pets" / "labels" / "train", {"a.txt": [0.9, 0.8]})
    again = build(yaml)
    assert again.label_weights.tolist() == [np.float32(0.9), 1, 1, 1], "1 without a score"
    assert again.content_hash() != index.content_hash()
    path.write_text(path.read_text().replace("0.9", "1.9"))
    ignored, without = build(yaml).problems
    assert 'found \'{"labels": ' in ignored and "the line is ignored" in ignored
    assert without.startswith("train: label_weights: no object has a score below 1, so all count fully"), without
    assert {ignored, without} < {*check(yaml).problems}
    write(yaml, yaml.read_text().replace(KEY, ""))
    assert not len(build(yaml).label_weights)


def test_a_coco_file_has_scores(tmp_path: Path) -> None:
    for name in "abc":
        write_image(tmp_path / f"{name}.jpg")
    rows = [
        {"category_id": 1, "bbox": [k, 8, 16, 16], "score": s} for k, s in enumerate((0.5, None, 0, 1, 0.3, "0.3", 1.5))
    ]
    crowd = {**rows[0], "iscrowd": 1}
    yaml = coco_set(tmp_path, {"a.jpg": [crowd, *rows[:4]], "b.jpg": rows[4:6], "c.jpg": rows[6:]}, {1: "cat"}, KEY)
    index = build(yaml)
    assert len(index) == 1 and index.label_weights.tolist() == [0.5, 1, 0, 1]
    assert index.problems == (
        "set.json: annotations[6]: score is '0.3', expected 0 to 1, the weight of its object; image skipped",
        "set.json: annotations[7]: score is 1.5, expected 0 to 1, the weight of its object; image skipped",
    )
    write(yaml, yaml.read_text().replace(KEY, ""))
    assert len(build(yaml)) == 3 and not len(build(yaml).label_weights)


def test_mistakes_of_the_key(tmp_path: Path) -> None:
    write_image(tmp_path / "images" / "a.jpg")
    refuse(
        tmp_path, "train: images\nnames: [cat]\nlabel_weights: scores\n", "a.yaml:3: .* found 'scores', expected score"
    )
    refuse(tmp_path, "train: images\nnames: [cat]\nlabel_weight: score\n", "Did you mean 'label_weights'")


SIZES = [(40, 80), (64, 64), (64, 32), (64, 64)]


def weighted_index(folder: Path) -> DatasetIndex:
    """Objects of class c have the weight c / 2; image 0 has an ignored region, image 3 has no object."""
    index = make_index(SIZES, paths=write_images(folder, SIZES), classes=[[1, 2], [2, 0, 1], [0, 1], []], polygons=True)
    return dataclasses.replace(
        index,
        label_weights=index.classes.astype(np.float32) / 2,
        ignored_offsets=np.array([0, 1, 1, 1, 1]),
        ignored_classes=np.array([-1], np.int32),
        ignored_boxes_xyxy=np.array([[0, 0, 9, 9]], np.float32),
        unlabelled_sets=np.array([[True, False, False]]),
        set_of_image=np.array([-1, 0, -1, -1], np.int32),
    )


@pytest.mark.parametrize("tiled", [False, True])
def test_weights_stay_with_their_objects(tmp_path: Path, tiled: bool) -> None:
    """Through mosaic, mixup, copy-paste, warps, tiles and own transforms; of regions they are 1."""

    def drop_some(sample: Sample, rng: np.random.Generator) -> Sample:
        keep = rng.random(len(sample.classes)) < 0.8
        segments = [part for part, kept in zip(sample.segments, keep, strict=False) if kept]
        boxes, weights = sample.boxes_xyxy[keep], sample.all_weights()[keep]
        return Sample(sample.image, boxes, sample.classes[keep], segments, weights)

    index = weighted_index(tmp_path)
    index = build_tile_index(index, 48, 0.2, 64) if tiled else index
    low, neighbours = load_hyp("hyp.scratch-low.yaml"), {image: image for image in range(len(index))}
    hyp = dataclasses.replace(low, mosaic=0.8, mixup=0.5, copy_paste=0.5, degrees=10.0, perspective=0.0005)
    own = [OwnTransform(f"a:b@{stage}", stage, drop_some) for stage in ("mosaic", "mixup", END)]
    seen = set[float]()
    for transforms in ((), own):
        dataset = TrainDataset(index, ImageStore(index, 64, "linear"), hyp, 0, 9, transforms)
        for epoch in range(8):
            draws = [Draw(at, at, epoch, (64, 64), neighbours) for at in neighbours]
            batch = dataset.__getitems__(draws)
            assert not isinstance(batch, UserError) and batch.targets.shape[1] == 7
            classes, weights = batch.targets[:, 1].numpy(), batch.targets[:, 6].numpy()
            assert np.array_equal(weights, np.where(classes < 0, 1, classes / 2))
            seen |= {*classes.tolist()}
    assert seen == {-2, -1, 0, 1, 2}
    batch = ValDataset(index, ImageStore(index, 64, "linear")).__getitems__(draws)
    assert not isinstance(batch, UserError) and (batch.targets[:, 6:] == 1).all(), "all count fully"
    plain = dataclasses.replace(index, label_weights=index.label_weights[:0])
    batch = TrainDataset(plain, ImageStore(plain, 64, "linear"), hyp, 0, 9).__getitems__(draws)
    assert not isinstance(batch, UserError) and batch.targets.shape[1] == 6


def test_a_transform_that_loses_the_weights_is_refused() -> None:
    def lose(sample: Sample, rng: np.random.Generator) -> Sample:
        return Sample(sample.image, sample.boxes_xyxy, sample.classes)

    apply = transforms_of([OwnTransform("m:f", END, lose)], 0, Draw(0, 0, 0, (64, 64)), 3)
    box, zero = np.array([[1, 1, 5, 5]], np.float32), np.zeros(1, np.int32)
    sample = Sample(np.zeros((64, 64, 3), np.uint8), box, zero, weights=np.ones(1, np.float32))
    assert apply(END, sample).all_weights() == 1
    sample.weights = np.zeros(1, np.float32)
    with pytest.raises(UserError, match=r"--transforms m:f: it returned NoneType as weights: expected float32 \(1,\)"):
        apply(END, sample)
    for weights, message in (([0.5], "list as weights"), (np.array([np.nan], np.float32), "weights outside of 0 to 1")):
        own = OwnTransform(
            "m:f", END, lambda sample, rng, weights=weights: dataclasses.replace(sample, weights=weights)
        )
        with pytest.raises(UserError, match=message):
            transforms_of([own], 0, Draw(0, 0, 0, (64, 64)), 3)(END, sample)
