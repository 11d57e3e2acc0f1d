"""BERT and MobileNetV2 in torch alone, for machines that have nothing else: what all contenders on a GPU train.

    images [rows, 3, pixels, pixels] -> stem -> 16 inverted residuals -> 1x1 -> mean -> logits [rows, classes]

Devlin et al. 2018, Sandler et al. 2018. The parts have the names that they have in transformers and compute what they
compute there, at its defaults: TensorFlow's padding, ReLU6, batch norm of momentum 0.997. A test loads transformers'
weights and compares.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.recipes.mlm.model import BertShape

_EPSILON, _TOKEN_TYPES = 1e-12, 2
_CHANNELS = (16, 24, 24, 32, 32, 32, 64, 64, 64, 64, 96, 96, 96, 160, 160, 160, 320)
_STRIDES = (2, 1, 2, 1, 1, 2, 1, 1, 1, 1, 1, 1, 2, 1, 1, 1)
_FIRST, _LAST, _EXPANSION = 32, 1280, 6
_MOBILENET_EPSILON, _MOMENTUM, _DROPOUT = 1e-3, 0.997, 0.8


def _initialize(module: nn.Module) -> None:
    """The initial values that both models have: normal, with a standard deviation of 0.02; biases zero."""
    if isinstance(module, (nn.Linear, nn.Embedding, nn.Conv2d)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


class PlainBert(nn.Module):
    """A BERT with the head of a masked language model, with random weights from torch's default generator."""

    def __init__(self, shape: BertShape) -> None:
        super().__init__()
        embeddings = _Embeddings(shape)
        layers = nn.ModuleList(_Layer(shape) for _ in range(shape.layers))
        self.bert = nn.ModuleDict({"embeddings": embeddings, "encoder": nn.ModuleDict({"layer": layers})})
        self.cls = nn.ModuleDict({"predictions": _Head(shape, embeddings.word_embeddings)})
        self.apply(_initialize)

    def forward(self, input_ids: Tensor, masked_positions: Tensor) -> Tensor:
        """Logits [rows * slots, vocabulary] of the masked tokens.

        Args:
            input_ids: [rows, tokens] int64, without padding.
            masked_positions: [rows, slots] int64.
        """
        hidden = self.bert["embeddings"](input_ids)
        for layer in self.bert["encoder"]["layer"]:  # type: ignore[index]
            hidden = layer(hidden)
        wide = masked_positions.unsqueeze(-1).expand(-1, -1, hidden.shape[-1])
        logits: Tensor = self.cls["predictions"](hidden.gather(1, wide).flatten(0, 1))
        return logits


class _Embeddings(nn.Module):
    def __init__(self, shape: BertShape) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(shape.vocabulary, shape.hidden, padding_idx=0)
        self.position_embeddings = nn.Embedding(shape.positions, shape.hidden)
        self.token_type_embeddings = nn.Embedding(_TOKEN_TYPES, shape.hidden)
        self.LayerNorm = nn.LayerNorm(shape.hidden, eps=_EPSILON)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, input_ids: Tensor) -> Tensor:
        kinds = self.token_type_embeddings(torch.zeros_like(input_ids))
        places = self.position_embeddings.weight[: input_ids.shape[1]]
        embedded: Tensor = self.dropout(self.LayerNorm(self.word_embeddings(input_ids) + kinds + places))
        return embedded


class _Layer(nn.Module):
    def __init__(self, shape: BertShape) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"self": _Attention(shape), "output": _Added(shape.hidden, shape)})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(shape.hidden, shape.feed_forward)})
        self.output = _Added(shape.feed_forward, shape)

    def forward(self, hidden: Tensor) -> Tensor:
        attended = self.attention["output"](self.attention["self"](hidden), hidden)
        result: Tensor = self.output(F.gelu(self.intermediate["dense"](attended)), attended)
        return result


class _Attention(nn.Module):
    def __init__(self, shape: BertShape) -> None:
        super().__init__()
        self._heads, self._dropout = shape.heads, shape.dropout
        self.query = nn.Linear(shape.hidden, shape.hidden)
        self.key = nn.Linear(shape.hidden, shape.hidden)
        self.value = nn.Linear(shape.hidden, shape.hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = (
            part(hidden).unflatten(-1, (self._heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        dropout = self._dropout if self.training else 0.0
        return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout).transpose(1, 2).flatten(2)


class _Added(nn.Module):
    """What a part of a layer found, added to what it was given."""

    def __init__(self, width: int, shape: BertShape) -> None:
        super().__init__()
        self.dense = nn.Linear(width, shape.hidden)
        self.LayerNorm = nn.LayerNorm(shape.hidden, eps=_EPSILON)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, found: Tensor, given: Tensor) -> Tensor:
        added: Tensor = self.LayerNorm(self.dropout(self.dense(found)) + given)
        return added


class _Head(nn.Module):
    def __init__(self, shape: BertShape, embedding: nn.Embedding) -> None:
        super().__init__()
        normalized = nn.LayerNorm(shape.hidden, eps=_EPSILON)
        self.transform = nn.ModuleDict({"dense": nn.Linear(shape.hidden, shape.hidden), "LayerNorm": normalized})
        self.decoder = nn.Linear(shape.hidden, shape.vocabulary)
        self.decoder.weight = embedding.weight

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.decoder(self.transform["LayerNorm"](F.gelu(self.transform["dense"](hidden))))
        return logits


class PlainMobileNetV2(nn.Module):
    """An image classifier, with random weights from torch's default generator."""

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
        self.apply(_initialize)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [rows, classes] of images [rows, 3, pixels, pixels]."""
        hidden = images
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
        self.normalization = nn.BatchNorm2d(after, eps=_MOBILENET_EPSILON, momentum=_MOMENTUM)
        self._activated = activated

    def forward(self, images: Tensor) -> Tensor:
        (kernel, _), (stride, _) = self.convolution.kernel_size, self.convolution.stride
        if kernel > 1:
            images = F.pad(images, same_padding(images.shape[-1], images.shape[-2], kernel, stride))
        normal: Tensor = self.normalization(self.convolution(images))
        return F.relu6(normal) if self._activated else normal


class _InvertedResidual(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        wide = before * _EXPANSION
        self._residual = stride == 1 and before == after
        self.expand_1x1 = _Convolution(before, wide, 1)
        self.conv_3x3 = _Convolution(wide, wide, 3, stride=stride, groups=wide)
        self.reduce_1x1 = _Convolution(wide, after, 1, activated=False)

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.reduce_1x1(self.conv_3x3(self.expand_1x1(images)))
        return images + found if self._residual else found


def same_padding(width: int, height: int, kernel: int, stride: int) -> tuple[int, int, int, int]:
    """TensorFlow's padding "SAME": left, right, top, bottom; what is odd goes to the right and the bottom.

    Example:
        >>> same_padding(224, 224, 3, 2)
        (0, 1, 0, 1)
    """
    across, down = (max(kernel - (length % stride or stride), 0) for length in (width, height))
    return across // 2, across - across // 2, down // 2, down - down // 2
