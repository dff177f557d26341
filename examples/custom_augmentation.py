"""Train with an augmentation of your own: sensor noise on every training image.

uv run -m examples.custom_augmentation
uv run train.py --data shapes.yaml --imgsz 128 --transforms examples.custom_augmentation:add_noise
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

import tessera
from tessera.utils.types import Sample


def add_noise(sample: Sample, rng: np.random.Generator) -> Sample:
    """Add Gaussian noise to the image, uint8 (H, W, 3) RGB.

    All randomness comes from `rng`, which follows from the seed, the epoch and the position of the sample: the training
    stays reproducible, resumes exactly, and is the same on any number of ranks.
    """
    noise = rng.normal(0, rng.uniform(0, 8), sample.image.shape)
    sample.image[:] = np.clip(sample.image + noise, 0, 255)
    return sample


def main(epochs: int = 20, project: Path = Path("runs/train")) -> None:
    """Train on the synthetic shapes with noise, applied after all other augmentation.

    `transforms=[(add_noise, "mosaic")]` would apply it to each image before the mosaic.
    """
    tessera.train(data="shapes.yaml", imgsz=128, epochs=epochs, project=project, name="noise", transforms=[add_noise])


if __name__ == "__main__":
    main()
