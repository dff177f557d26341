"""YOLOv9's detection head: its own branches, with decoding and loss of the anchor-free head."""

from __future__ import annotations

from torch import nn

from tessera.models.heads.free.head import MAX_BINS, Branches, DetectFree
from tessera.models.heads.head import HeadSpec
from tessera.models.layers.blocks import Conv
from tessera.models.layers.yaml_arguments import count, one_of, read_arguments, up_to

GROUPS = 4  # of the box branch: one for each side
REG_MAX = 16


class DetectYOLOv9(DetectFree):
    """`[[…], 1, DetectYOLOv9, [nc, width, reg_max]]`, the head of YOLOv9 (Wang et al., arXiv 2402.13616).

    It differs from `DetectFree` in its branches: no stem, two 3×3 convolutions, and boxes in four groups. `width` is
    the number of channels of the class branches. YOLOv9 derives it from the number of classes, as max(channels of the
    finest map, min(2 · nc, 128)). Here it is explicit: with other classes, only the last layer of the pretrained
    branches is reinitialised. `reg_max` is 16 by default.
    """

    @classmethod
    def from_spec(cls, spec: HeadSpec) -> DetectYOLOv9:
        readers = (("nc", one_of("nc")), ("width", count), ("reg_max", up_to(MAX_BINS)))
        _, width, *rest = read_arguments(spec.where, spec.arguments, readers, required=2)
        (reg_max,) = rest or (REG_MAX,)
        box_width = max(-(-(spec.channels[0] // 4) // GROUPS) * GROUPS, 4 * reg_max)
        branches = Branches(
            [nn.Identity() for _ in spec.channels],
            [
                nn.Sequential(
                    Conv(c, box_width, 3),
                    Conv(box_width, box_width, 3, groups=GROUPS),
                    nn.Conv2d(box_width, 4 * reg_max, 1, groups=GROUPS),
                )
                for c in spec.channels
            ],
            [
                nn.Sequential(Conv(c, width, 3), Conv(width, width, 3), nn.Conv2d(width, spec.nc, 1))
                for c in spec.channels
            ],
        )
        branches.init_from_priors(spec.nc, spec.strides, reg_max)
        return cls(spec.nc, spec.strides, reg_max, branches)
