"""`--label-next`: collects what a model makes of unlabelled pictures, and writes those to label next."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tessera.data.source.annotations.label_files import label_path
from tessera.utils.checkpoints.provenance import written_by
from tessera.utils.errors import ConfigError, UserError
from tessera.utils.evaluation.label_files import LABELS
from tessera.utils.files import write_whole
from tessera.utils.inference.choosing import FLOOR, Choice, Unsure, choose, class_weights, unsure_of, worths
from tessera.utils.inference.detector import Detector
from tessera.utils.inference.outputs import AutoLabelFiles, Output
from tessera.utils.inference.places import unwritable
from tessera.utils.inference.results import Result
from tessera.utils.inference.sources.frames import Frame
from tessera.utils.inference.sources.origins import Origin
from tessera.utils.report.albums.queue_page import Queued, queue_page
from tessera.utils.report.console import print_lines
from tessera.utils.runtime.checkpoint import TorchNetwork
from tessera.utils.text import first_of, shown, strict_json

SCHEMA = "tessera-label-next 1"
LIST, LINES, PAGE = "label_next.txt", "label_next.jsonl", "label_next.html"
_DOUBT, _NAMED = 0.5, 4  # bits from which on a doubt is named, and classes that are
_NO_PIXELS = np.zeros((0, 0, 3), np.uint8)  # label files need none

log = logging.getLogger(__name__)


def unlabelled_pictures(origins: Sequence[Origin]) -> list[Origin]:
    """The pictures that have no label file yet, and what cannot be read.

    Raises:
        ConfigError: a source is a video, a stream, a camera, an address or standard input.
        UserError: every picture has labels.
    """
    other = next((origin for origin in origins if origin.form not in ("picture", "unreadable")), None)
    if other is not None:
        raise ConfigError(
            f"--label-next: {shown(other.source)} is no picture on this machine ({other.form}). It chooses among files "
            "of pictures: save the frames to choose from as pictures first."
        )
    found = [origin for origin in origins if origin.form == "unreadable" or not _has_labels(origin)]
    nameless = next((origin for origin in found if not _is_a_line(origin.where)), None)
    if nameless is not None:
        raise UserError(
            f"--label-next: {shown(Path(nameless.where))}: no line of a list can name this file, as its name has a "
            "line end, or a space at an end. Rename it."
        )
    labelled = len(origins) - len(found)
    if not found:
        raise UserError(
            f"--label-next: each of the {labelled:,} pictures has a label file already, such as "
            f"{shown(label_path(str(Path(origins[0].where).absolute())))}. Name pictures without."
        )
    if labelled:
        log.info(f"--label-next: {labelled:,} of {len(origins):,} pictures have a label file already; passed over.")
    return found


def _is_a_line(path: str) -> bool:
    return path.splitlines() == [path.strip()]


def _has_labels(origin: Origin) -> bool:
    return Path(label_path(str(Path(origin.where).absolute()))).is_file()


@dataclass(frozen=True, eq=False)
class _Seen:
    """What is kept of a picture until all are seen; the pixels are not."""

    result: Result
    place: PurePath
    unsure: Unsure
    features: NDArray[np.float16]


class LabelNext(Output):
    """Finds objects and collects; at the end it chooses, and writes the list, the reasons and labels to begin with.

    Of each picture it keeps the finds that are sure, eight doubts and the mean of the coarsest map in half precision:
    about a kilobyte.

    Args:
        detector: a checkpoint's.
        count: pictures to choose.
        folder: of the run.
        weights: as they were given.

    Raises:
        ConfigError: the weights are an exported file, which shows no features.
    """

    def __init__(self, detector: Detector, count: int, folder: Path, weights: str) -> None:
        network = detector.pipeline.backend
        if not isinstance(network, TorchNetwork):
            raise ConfigError(
                f"--label-next: {network.source} is an exported file, whose features cannot be read, so that pictures "
                "which are alike cannot be told. Give the checkpoint it was made from, such as best.pt."
            )
        rules = detector.rules
        self._limits = np.array(rules.class_confs or (rules.conf,) * len(detector.names), np.float32)
        self._rules = replace(rules, conf=min(FLOOR, rules.conf), class_confs=_floors(rules.class_confs))
        self._detector, self._count, self._folder, self._weights = detector, count, folder, weights
        self._maps: list[NDArray[np.float32]] = []
        self._seen: list[_Seen] = []
        self._unsure: Unsure | None = None
        network.watch(self._take)

    def _take(self, maps: list[Tensor]) -> None:
        coarsest = min(maps, key=lambda found: found.shape[-1] * found.shape[-2])
        self._maps += [*coarsest.float().mean((2, 3)).cpu().numpy()]

    def detect(self, frame: Frame) -> Result:
        """The sure finds of a picture, as `Detector.detect` has them; `add` comes after it."""
        self._maps.clear()
        result = self._detector.detect(frame, rules=self._rules)
        self._unsure = unsure_of(result, self._limits)
        sure = result.scores > self._limits[result.classes]
        return replace(
            result, boxes_xyxy=result.boxes_xyxy[sure], scores=result.scores[sure], classes=result.classes[sure]
        )

    def add(self, result: Result, frame: Frame, place: PurePath) -> None:
        """As Output."""
        assert self._unsure is not None, "detect comes first"
        features = np.mean(self._maps, 0).astype(np.float16)  # over its tiles
        self._seen.append(_Seen(result, place, self._unsure, features))

    def close(self) -> None:
        """As Output."""
        if not self._seen:
            return
        columns = zip(*(seen.unsure for seen in self._seen), strict=True)
        doubts, classes, found = (np.stack(column) for column in columns)
        weights = class_weights(found.sum(0, dtype=np.float64))
        chosen = choose(worths(doubts, classes, weights), np.stack([seen.features for seen in self._seen]), self._count)
        labels = AutoLabelFiles(self._folder / LABELS, self._weights, self._detector.names)
        for choice in chosen:
            seen = self._seen[choice.place]
            labels.add(seen.result, Frame(_NO_PIXELS, seen.result.source), seen.place)
        labels.close()
        lines = [self._head(weights), *map(self._line, chosen)]
        self._write(LINES, "".join(strict_json(line) + "\n" for line in lines))
        self._write(PAGE, self._page(chosen, weights))
        self._write(LIST, "".join(f"{_path(self._seen[choice.place].result)}\n" for choice in chosen))
        print_lines(
            f"To label next: {len(chosen):,} of {len(self._seen):,} pictures, the best first: {self._folder / LIST}"
        )

    def _page(self, chosen: Sequence[Choice], weights: NDArray[np.float64]) -> str:
        queued = []
        for choice in chosen:
            seen = self._seen[choice.place]
            queued.append(
                Queued(
                    _path(seen.result),
                    choice.score,
                    f"{self._doubts(seen)}; distance {choice.distance:.2f}",
                    seen.result.boxes_xyxy,
                    seen.result.size_hw,
                )
            )
        return queue_page(
            queued,
            weights=self._weights,
            pictures=len(self._seen),
            class_weights=list(zip(self._detector.names, weights.tolist(), strict=True)),
            rule=self._detector.pipeline.backend.pixels,
        )

    def _doubts(self, seen: _Seen) -> str:
        """What the model is unsure of, in words."""
        names = [self._detector.names[c] for c in seen.unsure.classes[seen.unsure.doubts > _DOUBT].tolist()]
        counts = {name: names.count(name) for name in names}
        listed = first_of([f"{number} {name}" for name, number in counts.items()], _NAMED)
        return f"unsure of {listed}" if names else "nothing found, or all of it surely"

    def _write(self, name: str, text: str) -> None:
        path = self._folder / name
        try:
            write_whole(path, text.encode("utf-8", "surrogateescape"))
        except OSError as error:
            raise unwritable(path, error) from error

    def _head(self, weights: NDArray[np.float64]) -> dict[str, object]:
        named = dict(zip(self._detector.names, weights.round(3).tolist(), strict=True))
        return {
            "schema": SCHEMA,
            "weights": self._weights,
            "pictures": len(self._seen),
            "class_weights": named,
            **written_by(),
        }

    def _line(self, choice: Choice) -> dict[str, object]:
        seen = self._seen[choice.place]
        names = self._detector.names
        doubts = [
            {"class": names[c], "doubt": round(float(doubt), 3)}
            for doubt, c in zip(seen.unsure.doubts, seen.unsure.classes.tolist(), strict=True)
            if doubt > 0
        ]
        return {
            "image": _path(seen.result),
            "score": round(choice.score, 4),
            "worth": round(choice.worth, 4),
            "distance": round(choice.distance, 4),
            "doubts": doubts,
            "labels": len(seen.result),
        }


def _floors(class_confs: tuple[float, ...]) -> tuple[float, ...]:
    """Limits of classes at the floor, but for classes that are not to be found at all."""
    return tuple(1.0 if conf >= 1 else min(conf, FLOOR) for conf in class_confs)


def _path(result: Result) -> str:
    return str(Path(result.source).absolute())
