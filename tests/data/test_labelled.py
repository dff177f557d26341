"""Sources that label some classes: the key `labelled`, LVIS, batches, mosaics and metrics."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.data.augment.geometry import CanvasLabels, Warp, append_regions
from tessera.data.augment.pipeline import Scene, choose_copy_paste, draw_mosaic, mixup, render_scene
from tessera.data.feed.dataset import TrainDataset
from tessera.data.feed.image_store import ImageStore
from tessera.data.feed.tiles import build_tile_index
from tessera.data.source.dataset_yaml import load_spec
from tessera.data.source.index import index_warnings
from tessera.utils.config import load_hyp
from tessera.utils.errors import UserError
from tessera.utils.evaluation.average_precision import ranking_of
from tessera.utils.evaluation.curves import summarize
from tessera.utils.evaluation.matching import Matches, match_image
from tessera.utils.seeding import sample_rng
from tessera.utils.types import DatasetIndex, Draw, Sample
from tests.data.augment.made_scenes import ListSource, objects
from tests.data.made_index import make_index, write_images
from tests.data.make import write_dataset, write_image
from tests.data.source.made_yaml import build, check, coco_set, refuse, same, write
from tests.utils.evaluation.coco_oracle import coco_evaluate
from tests.utils.evaluation.made_images import Image, random_images

CAT, DOG = "0 0.5 0.5 0.5 0.5\n", "1 0.5 0.5 0.2 0.2\n"


@pytest.fixture
def yaml(tmp_path: Path) -> Path:
    """All classes in `old`, dogs in `new` although a cat is labelled there too, none in `wild`."""
    labels = {"old/a": CAT, "new/b": CAT + DOG, "new/c": "", "wild/d": None, "val/e": CAT}
    path = write_dataset(tmp_path / "pets", labels)
    sources = "[images/old, {path: images/new, labelled: [dog]}, {path: images/wild, labelled: []}]"
    return write(path, f"path: pets\ntrain: {sources}\nval: images/val\nnames: [cat, dog]\n")


def unlabelled(index: DatasetIndex) -> dict[str, list[str]]:
    """Image → the classes that it does not label."""
    rows = {index.path(at).stem: index.unlabelled(at) for at in range(len(index))}
    return {stem: [] if row is None else [index.names[c] for c in np.flatnonzero(row)] for stem, row in rows.items()}


def test_an_entry_labels_the_classes_that_it_names(yaml: Path) -> None:
    index = build(yaml)
    assert unlabelled(index) == {"a": [], "b": ["cat"], "c": ["cat"], "d": ["cat", "dog"]}
    objects = {index.path(at).stem: index.labels(at)[0].tolist() for at in range(4)}
    assert objects == {"a": [0], "b": [1], "c": [], "d": []}
    assert index.images_per_label().tolist() == [1, 3]
    (problem,) = index.problems
    assert problem.startswith("train: 1 object in 1 image is not used, such as in images/new/b.jpg"), problem
    assert same(build(yaml), index), "from the cache"
    checked = check(yaml)
    assert problem in checked.problems
    assert "train: 2 of 4 images label some classes only: 'dog' in 2; 1 label none" in checked.facts
    assert [own.empty for own in checked.counts] == [1, 0]
    assert next(fact for fact in checked.facts if "as background" in fact).endswith(
        "2 with objects; as background, 1 whose labels hold no object and 0 without a label file"
    )
    assert not len(build(yaml, "val").set_of_image)
    one = build(yaml, single_cls=True)
    assert unlabelled(one) == {"a": [], "b": ["item"], "c": ["item"], "d": ["item"]} and one.classes.tolist() == [0, 0]
    write(yaml, yaml.read_text().replace("[dog]", "[dog, cat]"))
    assert unlabelled(build(yaml))["b"] == [] and len(build(yaml).classes) == 3
    write(yaml, yaml.read_text().replace("images/old, ", "").replace("[dog, cat]", "[]"))
    with pytest.raises(UserError, match=r"`labelled` of their entry names no class of the 2 objects"):
        build(yaml)
    write(yaml, yaml.read_text().replace("{path: images/new, labelled: []}, ", ""))
    with pytest.raises(UserError, match=r"no entry of train labels a class"):
        build(yaml)


def test_an_image_with_unusable_rows_and_no_object_of_its_classes_is_skipped(yaml: Path) -> None:
    path = yaml.parent / "pets" / "labels" / "new" / "b.txt"
    path.write_text(f"{CAT}1 1.005 0.5 0.005 0.1\n")
    index = build(yaml)
    assert "b" not in unlabelled(index) and any("image skipped" in problem for problem in index.problems)


def test_classes_that_are_named_by_numbers(tmp_path: Path) -> None:
    write_image(tmp_path / "images" / "a.jpg")
    yaml = write(tmp_path / "a.yaml", "train: {path: images, labelled: [9, 7]}\nval: images\nnames: [7, 8, 9]\n")
    assert load_spec(yaml).labelled == {"train": (("7", "9"),)}
    write(yaml, yaml.read_text().replace("[9, 7]", "[9, 8, 7]"))
    assert load_spec(yaml).labelled == {"train": (None,)}


def test_copies_in_entries_of_different_classes_are_to_be_merged(yaml: Path) -> None:
    images = yaml.parent / "pets" / "images"
    shutil.copy(images / "old" / "a.jpg", images / "new" / "b.jpg")
    (note,) = (line for line in check(yaml).problems + check(yaml).notes if "several files" in line)
    assert note.endswith("merge their labels into one file")


@pytest.mark.parametrize(
    ("train", "what"),
    [
        ("{path: images, labelled: [dgo]}", "a.yaml:1: train: labelled: found 'dgo', .* Did you mean 'dog'"),
        ("{path: images, labelled: dog}", r"train: found .*, expected {path: images/new, labelled: \[bird\]}"),
        (
            "{path: images, labeled: [dog]}",
            r"expected {path: images/new, labelled: \[bird\]}.* Did you mean 'labelled'",
        ),
        (
            "{path: images, labelled: [1]}",
            "labelled: found '1', expected names of trained classes such as 'cat', 'dog'",
        ),
        ("{path: 3, labelled: [dog]}", "train: found 3, expected a folder"),
    ],
)
def test_mistakes_of_labelled(tmp_path: Path, train: str, what: str) -> None:
    write_image(tmp_path / "images" / "a.jpg")
    refuse(tmp_path, f"train: {train}\nnames: [cat, dog]\n", what)


def test_an_image_in_entries_of_different_classes_is_refused(yaml: Path) -> None:
    write(yaml, yaml.read_text().replace("images/old", "images/new"))
    with pytest.raises(UserError, match=r"new/b.jpg is in /.*images/new and in an entry that labels all\."):
        build(yaml)


def test_images_of_lvis_label_what_they_show_and_what_they_lack(tmp_path: Path) -> None:
    """An object of a class that is not exhaustively annotated counts, and its image does not label that class."""
    for name in "abc":
        write_image(tmp_path / f"{name}.jpg")
    rows = [{"category_id": number, "bbox": [8, 8, 16, 16]} for number in (1, 2)]
    yaml = coco_set(tmp_path, {"a.jpg": rows[:1], "b.jpg": rows, "c.jpg": []}, {1: "cat", 2: "dog", 3: "cow"})
    write(yaml, yaml.read_text() + "names: [cat, dog, cow, emu]\n")
    content = json.loads((tmp_path / "set.json").read_text())
    for image, negative, incomplete in zip(content["images"], ([], [3], [1]), ([], [2], []), strict=True):
        image |= {"neg_category_ids": negative, "not_exhaustive_category_ids": incomplete}
    (tmp_path / "set.json").write_text(json.dumps(content))
    index = build(yaml)
    assert unlabelled(index) == {"a": ["dog", "cow", "emu"], "b": ["dog", "emu"], "c": ["dog", "cow", "emu"]}
    assert index.labels(1)[0].tolist() == [0, 1] and len(index.unlabelled_sets) == 2
    assert "train: no image labels all objects of 'dog': nothing teaches their background" in index_warnings(index)
    write(yaml, yaml.read_text().replace("train: set.json", "train: {path: set.json, labelled: [cat, cow]}"))
    assert unlabelled(build(yaml)) == unlabelled(index) and build(yaml).labels(1)[0].tolist() == [0]
    content["images"][0]["neg_category_ids"] = "cow"
    (tmp_path / "set.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"set.json: the image 1 has the ids 'cow', expected a list of category ids"):
        build(yaml)


SIZES = [(40, 80), (64, 64), (64, 32), (64, 64)]
SETS = np.array([[True, False, False], [False, True, True]])


def partly_labelled(folder: Path) -> DatasetIndex:
    index = make_index(SIZES, paths=write_images(folder, SIZES), classes=[[1], [2, 0], [0], []])
    return dataclasses.replace(index, unlabelled_sets=SETS, set_of_image=np.array([1, -1, 0, 1], np.int32))


def test_a_batch_has_its_sets_and_their_regions(tmp_path: Path) -> None:
    index = partly_labelled(tmp_path)
    dataset = TrainDataset(index, ImageStore(index, 64, "linear"), load_hyp("hyp.no-augmentation.yaml"), 0, 0)
    batch = dataset.__getitems__([Draw(at, at, 0, (64, 64)) for at in (1, 0, 3)])
    assert not isinstance(batch, UserError) and batch.unlabelled is not None
    rows = batch.targets[batch.targets[:, 1] < 0]
    assert rows.tolist() == [[1, -2, 0, 16, 64, 48], [2, -2, 0, 0, 64, 64]]
    assert batch.unlabelled.tolist() == [[False, True, True]]
    none = dataset.__getitems__([Draw(1, 0, 0, (64, 64))])
    assert not isinstance(none, UserError) and none.unlabelled is not None and not len(none.unlabelled)


def test_tiles_keep_the_sets_of_their_image(tmp_path: Path) -> None:
    tiles = build_tile_index(partly_labelled(tmp_path), 48, 0.2, 64)
    for tile, image in enumerate(tiles.owners.tolist()):
        assert tiles.unlabelled_set(tile) == [1, -1, 0, 1][image]
    nothing = dataclasses.replace(partly_labelled(tmp_path), unlabelled_sets=np.ones_like(SETS))
    assert 3 in tiles.owners[tiles.empty_tiles], "background"
    assert set(build_tile_index(nothing, 48, 0.2, 64).empty_tiles) < set(tiles.empty_tiles)


def test_each_part_of_a_mosaic_keeps_its_own(tmp_path: Path) -> None:
    """A pixel is in a region of class -2 - k exactly where it is of an image with set k."""
    hyp = dataclasses.replace(load_hyp("hyp.scratch-low.yaml"), mosaic=1.0)
    colours = [10, 90, 170, 250]
    samples = []
    for number, colour in enumerate(colours):
        sample = Sample(np.full((64, 64, 3), colour, np.uint8), np.zeros((0, 4), np.float32), np.zeros(0, np.int32))
        whole, own = np.array([[0, 0, 64, 64]], np.float32), np.array([-2 - number], np.int32)
        samples.append(append_regions(sample, whole, own) if number else sample)
    for seed in range(5):
        rng = sample_rng(0, 0, seed)
        scene = draw_mosaic(0, range(4), (64, 64), hyp, rng)
        found = render_scene(scene, ListSource(samples).sample, 0.0, rng, np.empty((64, 64, 3), np.uint8))
        assert all(c < -1 for c in found.classes)
        for number, colour in list(enumerate(colours))[1:]:
            inside = np.zeros((64, 64), np.bool_)
            for (x1, y1, x2, y2), c in zip(found.boxes_xyxy.round().astype(int).tolist(), found.classes, strict=True):
                inside[y1:y2, x1:x2] |= c == -2 - number
            assert (inside != (found.image[..., 0] == colour)).mean() < 0.03, "up to a pixel at the seams"
    both = mixup(dataclasses.replace(samples[1], image=samples[1].image.copy()), samples[2], 0.5)
    assert both.classes.tolist() == [-3, -4]


def test_a_pasted_object_brings_its_set(tmp_path: Path) -> None:
    outlines = [[(0, 0), (20, 0), (20, 20)], [(50, 0), (60, 0), (60, 9)]]
    labels, around = objects([0, 0, 20, 20], [50, 0, 60, 9], outlines=outlines), np.array([[0, 0, 40, 100]], np.float32)
    no_points, one = np.zeros((0, 2), np.float32), np.ones(1, np.float32)
    region = CanvasLabels(around, np.array([-5], np.int32), no_points, np.zeros(1, np.int64), one)
    pasted = choose_copy_paste(labels.joined(region), 1.0, 200, np.random.default_rng(0))
    assert pasted is not None
    assert pasted.classes.tolist() == [0, 1, -5]
    assert pasted.boxes_xyxy.tolist() == [[180, 0, 200, 20], [140, 0, 150, 9], [180, 0, 200, 20]]
    boxes, outline = np.array([[4, 4, 24, 24]], np.float32), np.array([[4, 4], [24, 4], [14, 24]], np.float32)
    sample = Sample(np.full((64, 64, 3), 90, np.uint8), boxes, np.zeros(1, np.int32), [outline])
    sample = append_regions(sample, np.array([[0, 0, 64, 64]], np.float32), np.array([-2], np.int32))
    scene = Scene((0,), (0, 0), Warp((64, 64), (64, 64)))
    out = np.empty((64, 64, 3), np.uint8)
    found = render_scene(scene, ListSource([sample]).sample, 1.0, np.random.default_rng(0), out)
    assert found.classes.tolist() == [0, -2, 0, -2]


@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 10), nc=st.integers(1, 4), is_lvis=st.booleans())
@settings(max_examples=60, deadline=None)
def test_metrics_are_those_of_the_images_that_label_a_class(seed: int, n: int, nc: int, is_lvis: bool) -> None:
    """LVIS's rule: other detections of the class are not evaluated; with objects, unmatched ones are ignored."""
    rng = np.random.default_rng(seed)
    images, sets = random_images(seed, n, nc, coarse=False), rng.random((n, nc)) < 0.4
    if not is_lvis:
        images = [(d, boxes[~own[c]], c[~own[c]]) for (d, boxes, c), own in zip(images, sets, strict=True)]
    found = Matches.joined([match_image(*one, None, sets[i], image=i) for i, one in enumerate(images)])
    metrics, _ = summarize(ranking_of(found), nc)
    kept: list[Image] = []
    for (detections, boxes, classes), own in zip(images, sets, strict=True):
        without = own & ~np.isin(np.arange(nc), classes)
        kept.append((detections.select(~np.take(without, detections.classes)), boxes, classes))
    whole = np.array([[-1e4, -1e4, 1e4, 1e4]], np.float32)
    regions = [(np.flatnonzero(own).astype(np.int32), whole.repeat(int(own.sum()), 0)) for own in sets]
    if any(len(d) for d, _, _ in kept) and any(len(c) for _, _, c in kept):
        precision = coco_evaluate(kept, nc, regions if is_lvis else []).eval["precision"][:, :, :, 0, -1]
        assert metrics.map == pytest.approx(precision[precision > -1].mean(), abs=1e-9)
    else:
        assert metrics.map == 0
