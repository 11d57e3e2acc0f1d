"""MobileNetV2 in torch alone: what all contenders train on pictures, on machines of any outfit.

    pictures [rows, 3, pixels, pixels] -> stem -> 16 inverted residuals -> 1x1 -> mean -> logits [rows, classes]

Sandler et al. 2018. The parts have the names that they have in transformers and compute what they compute there, at its
defaults: TensorFlow's padding, ReLU6, batch norm of momentum 0.997. A test loads transformers' weights and compares.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_CHANNELS = (16, 24, 24, 32, 32, 32, 64, 64, 64, 64, 96, 96, 96, 160, 160, 160, 320)
_STRIDES = (2, 1, 2, 1, 1, 2, 1, 1, 1, 1, 1, 1, 2, 1, 1, 1)
_FIRST, _LAST, _EXPANSION = 32, 1280, 6
_EPSILON, _MOMENTUM, _DROPOUT, _SPREAD = 1e-3, 0.997, 0.8, 0.02


class PlainMobileNetV2(nn.Module):
    """The whole model, of random weights from torch's default generator.

    Args:
        classes: how many it tells apart.
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        pairs = zip(_CHANNELS[:-1], _CHANNELS[1:], _STRIDES, strict=True)
        self.mobilenet_v2 = nn.ModuleDict(
            {
                "conv_stem": nn.ModuleDict(
                    {
                        "first_conv": _Convolution(3, _FIRST, 3, stride=2),
                        "conv_3x3": _Convolution(_FIRST, _FIRST, 3, groups=_FIRST),
                        "reduce_1x1": _Convolution(_FIRST, _CHANNELS[0], 1, activated=False),
                    }
                ),
                "layer": nn.ModuleList(_InvertedResidual(before, after, stride) for before, after, stride in pairs),
                "conv_1x1": _Convolution(_CHANNELS[-1], _LAST, 1),
            }
        )
        self.dropout = nn.Dropout(_DROPOUT)
        self.classifier = nn.Linear(_LAST, classes)
        self.apply(_begin)

    def forward(self, pictures: Tensor) -> Tensor:
        """Logits [rows, classes] of pictures [rows, 3, pixels, pixels]."""
        hidden = pictures
        for part in self.mobilenet_v2["conv_stem"].values():  # type: ignore[operator]
            hidden = part(hidden)
        for part in self.mobilenet_v2["layer"]:  # type: ignore[attr-defined]
            hidden = part(hidden)
        hidden = self.mobilenet_v2["conv_1x1"](hidden)
        logits: Tensor = self.classifier(self.dropout(torch.flatten(F.adaptive_avg_pool2d(hidden, 1), 1)))
        return logits


class _Convolution(nn.Module):
    """Padding, convolution, batch norm and, but for the last of a block, ReLU6."""

    def __init__(
        self, before: int, after: int, kernel: int, *, stride: int = 1, groups: int = 1, activated: bool = True
    ) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(before, after, kernel, stride, groups=groups, bias=False)
        self.normalization = nn.BatchNorm2d(after, eps=_EPSILON, momentum=_MOMENTUM)
        self._activated = activated

    def forward(self, pictures: Tensor) -> Tensor:
        (kernel, _), (stride, _) = self.convolution.kernel_size, self.convolution.stride
        if kernel > 1:
            pictures = F.pad(pictures, same_padding(pictures.shape[-1], pictures.shape[-2], kernel, stride))
        normal: Tensor = self.normalization(self.convolution(pictures))
        return F.relu6(normal) if self._activated else normal


class _InvertedResidual(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        wide = before * _EXPANSION
        self._residual = stride == 1 and before == after
        self.expand_1x1 = _Convolution(before, wide, 1)
        self.conv_3x3 = _Convolution(wide, wide, 3, stride=stride, groups=wide)
        self.reduce_1x1 = _Convolution(wide, after, 1, activated=False)

    def forward(self, pictures: Tensor) -> Tensor:
        found: Tensor = self.reduce_1x1(self.conv_3x3(self.expand_1x1(pictures)))
        return pictures + found if self._residual else found


def same_padding(width: int, height: int, kernel: int, stride: int) -> tuple[int, int, int, int]:
    """TensorFlow's padding "SAME": left, right, top, bottom; what is odd goes to the right and the bottom.

    Example:
        >>> same_padding(224, 224, 3, 2)
        (0, 1, 0, 1)
    """
    across, down = (max(kernel - (length % stride or stride), 0) for length in (width, height))
    return across // 2, across - across // 2, down // 2, down - down // 2


def _begin(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Conv2d)):
        nn.init.normal_(module.weight, std=_SPREAD)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
