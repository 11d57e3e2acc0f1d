"""A BERT with a masked-token head, in torch alone: the model that all contenders train on machines of any outfit.

    input_ids [rows, tokens] -> embeddings -> layers -> [rows, tokens, hidden] -> the masked positions
      -> transform -> times the word embeddings -> logits [rows * slots, vocabulary]

The parts have the names that they have in transformers and compute what they compute there: a test loads transformers'
weights and compares. What differs: every row has as many masked positions, so no shape depends on the data.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.recipes.mlm.model import BertShape

_EPSILON = 1e-12
_KINDS_OF_TOKENS = 2
_SPREAD = 0.02


class PlainBert(nn.Module):
    """The whole model, of random weights from torch's default generator.

    Args:
        shape: its size.
    """

    def __init__(self, shape: BertShape) -> None:
        super().__init__()
        embeddings = _Embeddings(shape)
        layers = nn.ModuleList(_Layer(shape) for _ in range(shape.layers))
        self.bert = nn.ModuleDict({"embeddings": embeddings, "encoder": nn.ModuleDict({"layer": layers})})
        self.cls = nn.ModuleDict({"predictions": _Head(shape, embeddings.word_embeddings)})
        self.apply(_begin)

    def forward(self, input_ids: Tensor, masked_positions: Tensor) -> Tensor:
        """Logits of the masked tokens.

        Args:
            input_ids: [rows, tokens] int64, all of them real tokens.
            masked_positions: [rows, slots] int64.

        Returns:
            [rows * slots, vocabulary] float.
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
        self.token_type_embeddings = nn.Embedding(_KINDS_OF_TOKENS, shape.hidden)
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
    def __init__(self, shape: BertShape, words: nn.Embedding) -> None:
        super().__init__()
        normalized = nn.LayerNorm(shape.hidden, eps=_EPSILON)
        self.transform = nn.ModuleDict({"dense": nn.Linear(shape.hidden, shape.hidden), "LayerNorm": normalized})
        self.decoder = nn.Linear(shape.hidden, shape.vocabulary)
        self.decoder.weight = words.weight

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.decoder(self.transform["LayerNorm"](F.gelu(self.transform["dense"](hidden))))
        return logits


def _begin(module: nn.Module) -> None:
    """The first values that BERT's authors chose: normal, of a small spread; biases zero."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=_SPREAD)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
