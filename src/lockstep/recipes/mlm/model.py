"""BERT with a masked-token head that is asked about the masked positions only.

    input_ids [rows, tokens] -> BertModel -> [rows, tokens, hidden] -> the masked positions -> [masked, hidden]
      -> transform -> times the word embeddings -> logits [masked, vocabulary]

The parts and the keys of the state_dict are those of transformers' BertForMaskedLM, so weights go both ways.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.extras import require
from lockstep.recipes.mlm.masking import NO_POSITION


@dataclass(frozen=True, kw_only=True)
class BertShape:
    """The size of a BERT; the defaults are bert_tiny's, with 4,385,920 parameters before the head.

    Args:
        layers: encoder layers.
        hidden: width of a token's vector.
        heads: attention heads; divides ``hidden``.
        feed_forward: width inside a layer's feed-forward part.
        vocabulary: tokens that have an embedding.
        positions: longest sequence, in tokens.
        dropout: probability, for activations and attention weights.
    """

    layers: int = 2
    hidden: int = 128
    heads: int = 2
    feed_forward: int = 512
    vocabulary: int = 30522
    positions: int = 512
    dropout: float = 0.1

    def __post_init__(self) -> None:
        sizes = ("layers", "hidden", "heads", "feed_forward", "vocabulary", "positions")
        for name in sizes:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} was given, expected at least 1")
        if self.hidden % self.heads:
            divisors = ", ".join(str(n) for n in range(1, self.hidden + 1) if self.hidden % n == 0)
            raise ConfigError(f"heads={self.heads} does not divide hidden={self.hidden}; choose one of {divisors}")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout={self.dropout} was given, expected a probability in [0, 1); try 0.1")


class MaskedLanguageModel(nn.Module):
    """BertModel, its pooler frozen because nothing here asks it, and the tied masked-token head.

    Args:
        bert: a transformers BertModel.
        predictions: the BertLMPredictionHead that belongs to it; transformers has tied it to the word embeddings.

    Attributes:
        config: transformers' own; with the names of the parts it says how the model may be divided among workers.
        static: whether no shape and no choice depends on what the rows hold. A GPU then waits for nothing within a
            step, and can record it; but empty slots have logits too, and rows without padding are masked like others.
    """

    base_model_prefix = "bert"
    static = False

    def __init__(self, bert: Any, predictions: Any) -> None:
        super().__init__()
        self.config = bert.config
        self.bert = bert
        self.cls = nn.ModuleDict({"predictions": predictions})
        if bert.pooler is not None:
            bert.pooler.requires_grad_(False)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        masked_positions: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Logits of the masked tokens.

        Args:
            input_ids: [rows, tokens] int64.
            attention_mask: [rows, tokens] int64: 1 for real tokens, 0 for padding; None where all are real.
            masked_positions: [rows, slots] int64; ``NO_POSITION`` pads. None asks about every token.
            inputs_embeds: [rows, tokens, hidden] float, in place of ``input_ids``: what a pipeline's stage is handed.

        Returns:
            [masked, vocabulary] float, in the order of the rows and of the slots in each, or where ``static`` [rows,
            slots, vocabulary]; where every token was asked about, [rows, tokens, vocabulary].
        """
        hidden = self._encode(input_ids, attention_mask, inputs_embeds)
        if masked_positions is not None and not self.static:
            rows, slots = (masked_positions != NO_POSITION).nonzero(as_tuple=True)
            hidden = hidden[rows, masked_positions[rows, slots]]
        elif masked_positions is not None:
            places = masked_positions.clamp(min=0).unsqueeze(-1)
            hidden = hidden.gather(1, places.expand(-1, -1, hidden.shape[-1]))
        logits: Tensor = self.cls["predictions"](hidden)
        return logits

    def _init_weights(self, module: nn.Module) -> None:
        """Writes the first values of a module's own tensors, as transformers' models do: for one on the meta device."""
        self.bert._init_weights(module)

    def _encode(self, input_ids: Tensor | None, attention_mask: Tensor | None, embedded: Tensor | None) -> Tensor:
        if input_ids is not None and not len(input_ids):  # an empty shard, which transformers cannot reshape
            nothing: Tensor = self.bert.embeddings.word_embeddings(input_ids)
            return nothing
        if self.static and attention_mask is not None:
            attention_mask = self._whole_mask(attention_mask)
        encoded = self.bert(input_ids=input_ids, inputs_embeds=embedded, attention_mask=attention_mask)
        hidden: Tensor = encoded.last_hidden_state
        return hidden

    def _whole_mask(self, real: Tensor) -> Tensor:
        """[rows, 1, tokens, tokens] for [rows, tokens]: one of four dimensions transformers takes without looking."""
        keys = real.bool()[:, None, None, :].expand(-1, 1, real.shape[1], -1)
        if self.config._attn_implementation == "sdpa":
            return keys
        unseen = torch.finfo(self.bert.dtype).min
        return torch.zeros_like(keys, dtype=self.bert.dtype).masked_fill(~keys, unseen)


def new_bert(shape: BertShape, *, attention: str = "sdpa") -> MaskedLanguageModel:
    """A model of random weights, drawn from torch's default generator.

    Args:
        shape: its size.
        attention: transformers' name of an attention implementation.
    """
    bert = require("transformers.models.bert.modeling_bert", "text")
    config = bert.BertConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=shape.feed_forward,
        max_position_embeddings=shape.positions,
        hidden_dropout_prob=shape.dropout,
        attention_probs_dropout_prob=shape.dropout,
        attn_implementation=attention,
    )
    whole = bert.BertForPreTraining(config)
    return MaskedLanguageModel(whole.bert, whole.cls.predictions)
