"""Train a detector, read its metrics, and evaluate its best checkpoint.

uv run -m examples.train_and_evaluate
"""

from __future__ import annotations

from pathlib import Path

import tessera


def main(epochs: int = 20, project: Path = Path("runs/train")) -> Path:
    """Train on the synthetic shapes; return the best checkpoint."""
    metrics = tessera.train(
        data="shapes.yaml",
        cfg="tessera-n.yaml",
        imgsz=128,
        batch_size=16,
        epochs=epochs,
        project=project,
        name="shapes",
    )
    assert metrics is not None  # only with resume="auto" of a finished run, and with check_data
    print(f"mAP50-95 {metrics.map:.3f}, mAP50 {metrics.map50:.3f}, best confidence {metrics.confidence:.2f}")
    for class_id, (_, _, ap50, ap) in zip(metrics.class_ids, metrics.per_class, strict=True):
        print(f"{metrics.names[class_id]:10} AP50 {ap50:.3f}, AP {ap:.3f}")

    best = max(project.glob("shapes*/weights/best.pt"), key=lambda path: path.stat().st_mtime)
    again = tessera.val(weights=best, project=project.parent / "val")
    print(f"val: mAP50-95 {again.map:.3f} on {again.images} images")
    return best


if __name__ == "__main__":
    main()
