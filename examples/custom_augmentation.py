"""Train with an augmentation of your own: sensor noise on every training image.

uv run -m examples.custom_augmentation
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import tessera
from tessera.data.augment import albumentations_filters


def add_noise(image: NDArray[np.uint8], rng: np.random.Generator) -> None:
    """Add Gaussian noise to an image, uint8 (H, W, 3) RGB, in place.

    All randomness comes from `rng`, which follows from the seed, the epoch and the position of the image: the training
    stays reproducible, resumes exactly, and is the same on any number of ranks.
    """
    noise = rng.normal(0, rng.uniform(0, 8), image.shape)
    np.copyto(image, np.clip(image + noise, 0, 255).astype(np.uint8))


def main(epochs: int = 20, project: Path = Path("runs/train")) -> None:
    """Train on the synthetic shapes with noise in place of the filters of Albumentations."""
    albumentations_filters.open_filter = lambda: add_noise
    tessera.train(data="shapes.yaml", imgsz=128, epochs=epochs, project=project, name="noise")


if __name__ == "__main__":
    main()
