"""Types of the Python API. `python -m tests.api_stub` writes this file from the flags of the commands."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from tessera.commands.detect import DetectionSummary
from tessera.analysis.comparison.comparison import Comparison
from tessera.deploy.inference.detector import Detector as Detector
from tessera.utils.types import Metrics

__version__: str

def train(
    *,
    weights: str | Path = "auto",
    cfg: str | Path = "",
    head: str | type[Any] = "",
    freeze: int | Sequence[int] = (),
    noautoanchor: bool = False,
    data: str | Path | Mapping[str, Any] = "shapes.yaml",
    imgsz: int = 640,
    img: int = 640,
    img_size: int = 640,
    batch_size: int = 16,
    batch: int = 16,
    rect: bool = False,
    tile: int = 0,
    overlap: float = 0.2,
    single_cls: bool = False,
    cache: Literal["none", "ram", "disk"] | bool = "none",
    check_data: bool = False,
    report: str | Path | bool = "",
    epochs: int = 100,
    hyp: str | Path | Mapping[str, Any] | Sequence[str | Path] = (),
    optimizer: Literal["", "SGD", "Adam", "AdamW"] = "",
    cos_lr: bool = False,
    label_smoothing: float = 0.0,
    patience: int = 100,
    noval: bool = False,
    seed: int = 0,
    evolve: int | bool = 0,
    objective: str = "fitness",
    close_mosaic: int = -1,
    multi_scale: bool = False,
    sampling: Literal["shuffled", "balanced"] = "shuffled",
    image_weights: bool = False,
    device: str | int = "",
    sync_bn: bool = False,
    workers: int = 8,
    amp: Literal["auto", "bf16", "fp16", "off"] = "auto",
    compile: bool = False,
    deterministic: bool = False,
    profile: bool = False,
    resume: str | Path | bool = "",
    project: str | Path = "runs/train",
    name: str = "exp",
    exist_ok: bool = False,
    nosave: bool = False,
    save_period: int = -1,
    save_steps: int = 0,
    noplots: bool = False,
    noreport: bool = False,
    loggers: str = "tensorboard",
    log: str = "tensorboard",
) -> Metrics | None:
    """Train from Python with the names of the flags; return the metrics of the best epoch.

    Args:
        weights: initial weights: a checkpoint, a published file by name (--list-weights) or imagenet
            (backbone); '' = from scratch; auto = tessera-n (pretrained on synthetic shapes) below 300 images
            without --cfg, else from scratch.
        cfg: model YAML, searched for in models/ too (default: the model of the weights, else tessera-n.yaml).
        head: head of your own, module:name of a class, in place of the last layer of the model YAML
            (docs/model-yaml.md).
        freeze: freeze the first N layers, or the listed ones (default: from the hyperparameters).
        noautoanchor: disable AutoAnchor: keep the model's anchors.
        data: dataset YAML, searched for in data/ too.
        imgsz: image size in pixels.
        batch_size: total batch size over all ranks; -1 = AutoBatch.
        rect: rectangular training: each batch holds images of similar aspect ratio.
        tile: split large images into tiles of N pixels, in addition to the whole image (0 = off).
        overlap: minimum overlap of neighbouring tiles, as a fraction of a tile.
        single_cls: treat all classes as one.
        cache: cache decoded images, once per node, in ram (bare) or on disk.
        check_data: check the dataset, print all problems, and exit.
        report: with --check-data: also write data_report.html to this folder (bare: runs/data).
        epochs: number of epochs.
        hyp: hyperparameters: key=value and YAML files, searched for in data/hyps/ too; what they leave out is
            chosen by model, weights and length.
        optimizer: optimizer (default: from the hyperparameters).
        cos_lr: cosine learning-rate schedule instead of a linear one.
        label_smoothing: label smoothing epsilon.
        patience: stop after N epochs without improvement (0 = off).
        noval: validate only after the last epoch.
        seed: random seed.
        evolve: search hyperparameters in N trials, and train the best ones again (bare: 300).
        objective: metric that --evolve maximises, such as map, recall@p=0.95 or "map - 0.01*ms".
        close_mosaic: disable mosaic and mixup for the last N epochs (-1 = from the hyperparameters).
        multi_scale: vary the image size by ±50 % from batch to batch.
        sampling: shuffled = each image once per epoch; balanced = images of rare classes more often.
        image_weights: sample images of classes with low mAP more often.
        device: cpu, 0, 0,1 or mps; under torchrun each rank takes its own GPU.
        sync_bn: synchronise BatchNorm statistics across ranks.
        workers: data loader workers per rank, at most its CPUs.
        amp: mixed precision.
        compile: torch.compile the model.
        deterministic: use deterministic kernels, for bit-reproducible runs.
        profile: print times per epoch, and write a torch.profiler trace of a few steps.
        resume: resume a run: a checkpoint or run directory; auto = the run --project/--name, started if
            missing; bare = the newest under --project.
        project: parent folder of run directories.
        name: name of the run directory.
        exist_ok: write into an existing run directory instead of a new one.
        nosave: save only after the last epoch.
        save_period: also save epochN.pt every N epochs (-1 = off).
        save_steps: also save last.pt every N optimizer steps (0 = off).
        noplots: save no plots or sample images.
        noreport: do not write report.html.
        loggers: comma-separated list of tensorboard, wandb, mlflow, clearml, comet; or none.

    None for `check_data`, and if the run of `resume="auto"` is finished.

    Raises:
        UserError: invalid flags, data, weights or directories.
    """

def val(
    *,
    weights: str | Path = "",
    trust_file: bool = False,
    data: str | Path | Mapping[str, Any] = "",
    task: Literal["val", "train", "test", "speed"] = "val",
    imgsz: int = 0,
    img: int = 0,
    img_size: int = 0,
    batch_size: int = 32,
    batch: int = 32,
    tile: int = 0,
    overlap: float = 0.2,
    single_cls: bool = False,
    conf_thres: float | str = 0.001,
    conf: float | str = 0.001,
    iou_thres: float = 0.6,
    iou: float = 0.6,
    max_det: int = 300,
    augment: bool = False,
    end2end: bool = False,
    device: str | int = "",
    workers: int = 8,
    threads: int = 0,
    half: bool = False,
    project: str | Path = "runs/val",
    name: str = "exp",
    exist_ok: bool = False,
    noreport: bool = False,
    verbose: bool = False,
    find_errors: bool = False,
    save_txt: bool = False,
    save_conf: bool = False,
    save_json: bool = False,
) -> Metrics:
    """Validate from Python; takes the names of the flags.

    Args:
        weights: checkpoint, exported file, or published file by name (--list-weights) (default: best.pt of the
            newest run in runs/train).
        trust_file: run a .torchscript or .pt2 file; such a file can run any code, so trust its author.
        data: dataset YAML, searched for in data/ too (default: the one the weights were trained on).
        task: split to evaluate; speed = time it at deployment thresholds.
        imgsz: image size in pixels (0 = as trained).
        batch_size: batch size per rank.
        tile: split large images into tiles of N pixels, in addition to the whole image (0 = off).
        overlap: minimum overlap of neighbouring tiles, as a fraction of a tile.
        single_cls: treat all classes as one.
        conf_thres: confidence threshold of mAP; a higher one is also that of P, R and errors, else the best
            F1's.
        iou_thres: NMS IoU threshold.
        max_det: maximum detections per image.
        augment: test-time augmentation.
        end2end: use the one-to-one branch, without NMS.
        device: cpu, 0, 0,1 or mps; under torchrun each rank takes its own GPU.
        workers: data loader workers per rank, at most its CPUs.
        threads: CPU threads per process (0 = one per available core).
        half: compute in half precision.
        project: parent folder of run directories.
        name: name of the run directory.
        exist_ok: write into an existing run directory instead of a new one.
        noreport: do not write report.html.
        verbose: print metrics per class.
        find_errors: rank labels that are likely wrong: label_errors.jsonl and .html.
        save_txt: save detections as YOLO label files.
        save_conf: add confidences to the label files.
        save_json: save detections as COCO results (predictions.json).

    Raises:
        UserError: a mistake in the flags, the data or the weights.
    """

def detect(
    *,
    weights: str | Path = "",
    trust_file: bool = False,
    source: str | Path | int | Sequence[str | Path] = (),
    data: str | Path | Mapping[str, Any] = "",
    imgsz: int = 0,
    img: int = 0,
    img_size: int = 0,
    tile: int = 0,
    overlap: float = 0.2,
    conf_thres: float | str = "",
    conf: float | str = "",
    iou_thres: float = 0.45,
    iou: float = 0.45,
    max_det: int = 1000,
    classes: int | str | Sequence[int | str] = (),
    agnostic_nms: bool = False,
    augment: bool = False,
    track: bool = False,
    vid_stride: int = 1,
    every_frame: bool = False,
    device: str | int = "",
    threads: int = 0,
    half: bool = False,
    project: str | Path = "runs/detect",
    name: str = "exp",
    exist_ok: bool = False,
    nosave: bool = False,
    save_txt: bool = False,
    save_conf: bool = False,
    save_json: bool = False,
    save_csv: bool = False,
    save_crop: bool = False,
    auto_label: bool = False,
    line_thickness: int = 0,
    hide_labels: bool = False,
    hide_conf: bool = False,
) -> DetectionSummary:
    """Detect from Python; keyword arguments are the flags.

    Args:
        weights: checkpoint, exported file, or published file by name (--list-weights) (default: best.pt of the
            newest run in runs/train).
        trust_file: run a .torchscript or .pt2 file; such a file can run any code, so trust its author.
        source: images, videos, folders, globs, lists (.txt), URLs, camera numbers; - = standard input.
        data: with --auto-label: dataset YAML that gives the class numbers of the labels.
        imgsz: image size in pixels, long side (0 = as trained).
        tile: split large images into tiles of N pixels, in addition to the whole image (0 = off).
        overlap: minimum overlap of neighbouring tiles, as a fraction of a tile.
        conf_thres: confidence threshold; auto = the best of each class (default: the weights' best, else 0.25).
        iou_thres: NMS IoU threshold.
        max_det: maximum detections per image.
        classes: detect only these classes, by number or name.
        agnostic_nms: class-agnostic NMS.
        augment: test-time augmentation.
        track: track objects over the frames of videos and streams.
        vid_stride: process every Nth frame of videos and streams.
        every_frame: process every frame of streams in order, instead of the newest.
        device: cpu, 0 or mps.
        threads: CPU threads per process (0 = one per available core).
        half: compute in half precision.
        project: parent folder of run directories.
        name: name of the run directory.
        exist_ok: write into an existing run directory instead of a new one.
        nosave: do not save annotated images and videos.
        save_txt: save detections as YOLO label files.
        save_conf: add confidences to the label files.
        save_json: save predictions.jsonl, one line per image or event.
        save_csv: save predictions.csv.
        save_crop: save each detection as a cropped image.
        auto_label: save label files for training, each class above its best threshold, marked as model-made.
        line_thickness: line thickness of boxes in pixels (0 = by image size).
        hide_labels: draw boxes without class names.
        hide_conf: draw class names without confidences.

    Raises:
        UserError: a mistake in the flags, the sources or the weights.
    """

def export(
    *,
    weights: str | Path = "",
    data: str | Path | Mapping[str, Any] = "",
    imgsz: int | Sequence[int] = (),
    img: int | Sequence[int] = (),
    img_size: int | Sequence[int] = (),
    conf_thres: float | str = "",
    conf: float | str = "",
    iou_thres: float = 0.45,
    iou: float = 0.45,
    max_det: int = 1000,
    end2end: bool = False,
    include: str | Sequence[str] = ("onnx",),
    raw: bool = False,
    batched: bool = False,
    int8: bool = False,
    opset: int = 18,
    max_drop: float = 0.01,
    license: str = "",
    device: str | int = "cpu",
    half: bool = False,
    output: str | Path = "",
) -> list[Path]:
    """Export from Python; keyword arguments are the flags. Returns the files.

    Args:
        weights: checkpoint, or published file by name (--list-weights) (default: best.pt of the newest run in
            runs/train).
        data: dataset YAML for calibration and evaluation (default: the one the weights were trained on).
        imgsz: image size in pixels, long side (default: as trained); with --raw: one fixed side, or height
            width.
        conf_thres: default confidence threshold of the file (default: where F1 is best, else 0.25).
        iou_thres: default NMS IoU threshold of the file.
        max_det: default maximum detections per image of the file.
        end2end: use the one-to-one branch, without NMS.
        include: formats to write.
        raw: export the network alone: letterboxed images in, raw predictions out.
        batched: accept a batch of equally sized images: (B, H, W, 3).
        int8: 8-bit quantisation, calibrated on the training images.
        opset: ONNX opset version.
        max_drop: largest accepted loss of mAP50-95.
        license: licence of the weights, stored in the metadata.
        device: device that exports are evaluated on: cpu, 0 or mps.
        half: float16 weights and activations.
        output: output folder, created if missing (default: the checkpoint's; for a bare name, the working
            directory).

    Raises:
        UserError: a mistake in the flags, the weights or the data.
    """

def compare(
    *models: str | Path,
    a: str | Path | Sequence[str | Path] = (),
    b: str | Path | Sequence[str | Path] = (),
    trust_file: bool = False,
    data: str | Path | Mapping[str, Any] = "",
    task: Literal["val", "train", "test"] = "val",
    imgsz: int = 0,
    img: int = 0,
    img_size: int = 0,
    batch_size: int = 32,
    batch: int = 32,
    tile: int = 0,
    overlap: float = 0.2,
    single_cls: bool = False,
    conf_thres: float | str = 0.001,
    conf: float | str = 0.001,
    iou_thres: float = 0.6,
    iou: float = 0.6,
    max_det: int = 300,
    augment: bool = False,
    end2end: bool = False,
    device: str | int = "",
    workers: int = 8,
    threads: int = 0,
    half: bool = False,
    project: str | Path = "runs/compare",
    name: str = "exp",
    exist_ok: bool = False,
    verbose: bool = False,
    require: str | Sequence[str] = (),
) -> Comparison:
    """Compare from Python: two models, or sides of several as `a=[…], b=[…]`; takes the names of the flags.

    Args:
        models: A and B: each a run directory, checkpoint, published file by name (--list-weights) or exported
            file.
        a: side A: several run directories, checkpoints or exported files of one kind, e.g. seeds of one
            training.
        b: side B; differences are B − A.
        trust_file: run a .torchscript or .pt2 file; such a file can run any code, so trust its author.
        data: dataset YAML, searched for in data/ too (default: the one the weights were trained on).
        task: split to evaluate.
        imgsz: image size in pixels (0 = as trained).
        batch_size: batch size per rank.
        tile: split large images into tiles of N pixels, in addition to the whole image (0 = off).
        overlap: minimum overlap of neighbouring tiles, as a fraction of a tile.
        single_cls: treat all classes as one.
        conf_thres: confidence threshold of mAP; a higher one is also that of P, R and errors, else the best
            F1's.
        iou_thres: NMS IoU threshold.
        max_det: maximum detections per image.
        augment: test-time augmentation.
        end2end: use the one-to-one branch, without NMS.
        device: cpu, 0, 0,1 or mps; under torchrun each rank takes its own GPU.
        workers: data loader workers per rank, at most its CPUs.
        threads: CPU threads per process (0 = one per available core).
        half: compute in half precision.
        project: parent folder of run directories.
        name: name of the run directory.
        exist_ok: write into an existing run directory instead of a new one.
        verbose: print metrics per class.
        require: exit with 1 if a difference violates a limit, such as "map >= -0.01" "ms <= 1".

    Raises:
        UserError: a mistake in the flags, the data or the weights.
    """
