"""BERT and MobileNetV2 in torch alone, for machines that have nothing else: what all contenders on a GPU train.

    images [rows, 3, pixels, pixels] -> stem -> 17 blocks -> 1x1 -> mean -> logits [rows, classes]

Devlin et al. 2018, Sandler et al. 2018. They have as many parameters as transformers' own.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lockstep_tools.recipes.mlm.config import MlmConfig

_EPSILON, _TOKEN_TYPES = 1e-12, 2
_BLOCKS = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
"""Expansion, channels, repetitions and first stride: table 2 of Sandler et al."""
_FIRST, _LAST, _DROPOUT = 32, 1280, 0.8


def _initialize(module: nn.Module) -> None:
    """The initial values that both models have: normal, with a standard deviation of 0.02; biases zero."""
    if isinstance(module, (nn.Linear, nn.Embedding, nn.Conv2d)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.MultiheadAttention):
        nn.init.normal_(module.in_proj_weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


class PlainBert(nn.Module):
    """A BERT with the head of a masked language model, with random weights from torch's default generator."""

    def __init__(self, shape: MlmConfig) -> None:
        super().__init__()
        hidden = shape.hidden
        self.words = nn.Embedding(shape.vocabulary, hidden, padding_idx=0)
        self.positions = nn.Embedding(shape.sequence_length, hidden)
        self.token_types = nn.Embedding(_TOKEN_TYPES, hidden)
        self.embedded = nn.Sequential(nn.LayerNorm(hidden, eps=_EPSILON), nn.Dropout(shape.dropout))
        self.layers = nn.ModuleList(_layer(shape) for _ in range(shape.layers))
        self.head = nn.Sequential(nn.Linear(hidden, hidden), nn.GELU(), nn.LayerNorm(hidden, eps=_EPSILON))
        self.logits = nn.Linear(hidden, shape.vocabulary)
        self.apply(_initialize)
        self.logits.weight = self.words.weight

    def forward(self, input_ids: Tensor, masked_positions: Tensor) -> Tensor:
        """Logits [rows * slots, vocabulary] of the masked tokens.

        Args:
            input_ids: [rows, tokens] int64, without padding.
            masked_positions: [rows, slots] int64.
        """
        types = self.token_types(torch.zeros_like(input_ids))
        hidden = self.embedded(self.words(input_ids) + types + self.positions.weight[: input_ids.shape[1]])
        for layer in self.layers:
            hidden = layer(hidden)
        wide = masked_positions.unsqueeze(-1).expand(-1, -1, hidden.shape[-1])
        logits: Tensor = self.logits(self.head(hidden.gather(1, wide).flatten(0, 1)))
        return logits


def _layer(shape: MlmConfig) -> nn.Module:
    layer = nn.TransformerEncoderLayer(
        shape.hidden, shape.heads, shape.feed_forward, shape.dropout, "gelu", _EPSILON, batch_first=True
    )
    layer.dropout = nn.Identity()  # type: ignore[assignment]  # torch's has one inside the feed-forward, BERT's has not
    return layer


class PlainMobileNetV2(nn.Sequential):
    """An image classifier, with random weights from torch's default generator: images -> logits [rows, classes]."""

    def __init__(self, classes: int) -> None:
        blocks: list[nn.Module] = []
        before = _FIRST
        for expansion, after, repetitions, stride in _BLOCKS:
            for index in range(repetitions):
                blocks.append(_InvertedResidual(before, after, expansion, stride if index == 0 else 1))
                before = after
        mean = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(_DROPOUT))
        stem, last = _convolution(3, _FIRST, 3, stride=2), _convolution(before, _LAST, 1)
        super().__init__(stem, *blocks, last, *mean, nn.Linear(_LAST, classes))
        self.apply(_initialize)


def _convolution(
    before: int, after: int, kernel: int, *, stride: int = 1, groups: int = 1, activated: bool = True
) -> nn.Sequential:
    convolution = nn.Conv2d(before, after, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(after), *([nn.ReLU6()] if activated else []))


class _InvertedResidual(nn.Module):
    def __init__(self, before: int, after: int, expansion: int, stride: int) -> None:
        super().__init__()
        wide = before * expansion
        self._residual = stride == 1 and before == after
        self.inner = nn.Sequential(
            *([_convolution(before, wide, 1)] if expansion > 1 else []),
            _convolution(wide, wide, 3, stride=stride, groups=wide),
            _convolution(wide, after, 1, activated=False),
        )

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.inner(images)
        return images + found if self._residual else found
