"""A dataset with COCO's numbers of images, objects, classes and sizes, of few small files under many names.

Lin et al., arXiv 1405.0312: train2017 has 118,287 images, 1,021 of them without an object, and 860,001 annotations; of
their areas 41 % are below 32² pixels and 34 % between that and 96², in images of mostly 640 × 480. Sizes are log-normal
through these two points, and an image's number of objects is negative binomial. What an object is, where it lies and
what its picture shows are chosen at random, so nothing can be learned here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tests.data.make import write_image

IMAGES = 118_287
EMPTY, MOST = 1_021 / 118_287, 93  # share of images without an object; objects of the fullest image
# Annotations of each class, from person to toothbrush.
CLASSES = (
    *(262465, 7113, 43867, 8725, 5135, 6069, 4571, 9973, 10759, 12884, 1865, 1983, 1285, 9838, 10806, 4768),
    *(5508, 6587, 9509, 8147, 5513, 1294, 5303, 5131, 8720, 11431, 12354, 6496, 6192, 2682, 6646, 2685),
    *(6347, 9076, 3276, 3747, 5543, 6126, 4812, 24342, 7913, 20650, 5479, 7770, 6165, 14358, 9458, 5851),
    *(4373, 6399, 7308, 7852, 2918, 5821, 7179, 6353, 38491, 5779, 8652, 4192, 15714, 4157, 5805, 4970),
    *(2262, 5703, 2855, 6434, 1673, 3334, 225, 5610, 2637, 24715, 6334, 6613, 1481, 4793, 198, 1954),
)
OBJECTS = sum(CLASSES)
SIDE = (-2.585, 1.177)  # ln(√area / √(640 · 480)): mean and deviation, by the shares of small and medium objects
SIZES_HW = ((48, 64), (64, 48), (43, 64), (64, 64))  # pictures, in COCO's aspects
_LABELS, _PICTURES = 8_192, 64  # files of their own; a file system allows some ten thousand links to one


def write_coco(folder: Path, images: int = IMAGES, val: int = 500, seed: int = 0) -> Path:
    """Write `images` to train on and `val` to validate on; returns their YAML. One that is there is used as it is."""
    yaml = folder / "coco-size.yaml"
    if yaml.is_file():
        return yaml
    own = folder / "own"
    own.mkdir(parents=True)
    for number in range(_PICTURES):
        write_image(own / f"{number}.jpg", SIZES_HW[number % len(SIZES_HW)], seed=number)
    for number, text in enumerate(labels(min(_LABELS, images), seed)):
        (own / f"{number}.txt").write_text(text)
    for split, count in (("train", images), ("val", val)):
        for kind, suffix, files in (("images", "jpg", _PICTURES), ("labels", "txt", min(_LABELS, images))):
            (folder / kind / split).mkdir(parents=True)
            for number in range(count):
                os.link(f"{own}/{number % files}.{suffix}", f"{folder}/{kind}/{split}/{number:012d}.{suffix}")
    names = [f"class {number}" for number in range(len(CLASSES))]
    yaml.write_text(f"path: {folder}\ntrain: images/train\nval: images/val\nnames: {names}\n")
    return yaml


def labels(count: int, seed: int) -> Iterator[str]:
    """Label files of `count` images: rows of class, centre, width and height, as shares of the image."""
    rng = np.random.default_rng(seed)
    mean = OBJECTS / IMAGES / (1 - EMPTY) - 1
    objects = np.minimum(1 + rng.poisson(rng.gamma(0.8, mean / 0.8, count)), MOST) * (rng.random(count) >= EMPTY)
    shares = np.array(CLASSES) / OBJECTS
    for number in objects:
        classes = rng.choice(len(CLASSES), number, p=shares)
        sides = np.exp(rng.normal(*SIDE, number))
        aspects = np.exp(rng.normal(0, 0.3, number))
        sizes = np.clip(np.stack((sides * aspects, sides / aspects), 1), 0.004, 0.99)
        centres = sizes / 2 + rng.random((number, 2)) * (1 - sizes)
        boxes = (" ".join(f"{side:.6f}" for side in box) for box in np.concatenate((centres, sizes), 1).tolist())
        yield "".join(f"{name} {box}\n" for name, box in zip(classes.tolist(), boxes, strict=True))
