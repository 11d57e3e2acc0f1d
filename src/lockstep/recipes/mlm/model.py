"""BERT with a masked-token head that is asked about the masked positions only.

    input_ids [rows, tokens] -> BertModel -> [rows, tokens, hidden] -> the masked positions -> [masked, hidden]
      -> transform -> times the word embeddings -> logits [masked, vocabulary]

The parts and the keys of the state_dict are those of transformers' BertForMaskedLM, so weights go both ways.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lockstep.errors import ConfigError, UsageError
from lockstep.extras import require
from lockstep.recipes.from_hub import check_kind, load_named
from lockstep.recipes.mlm.batches import IGNORED_LABEL, NO_POSITION
from lockstep.recipes.text.tokenizer import Vocabulary


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


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """What was loaded: the module and the vocabulary that belongs to it."""

    module: MaskedLanguageModel
    vocabulary: Vocabulary


def load_pretrained(name: str, *, attention: str, dropout: float) -> Pretrained:
    """Loads a BERT and its tokenizer.

    Args:
        name: folder written by ``save_pretrained`` or by this recipe, or a Hugging Face name.
        attention: transformers' name of an attention implementation.
        dropout: probability, for activations and attention weights.

    Raises:
        ConfigError: not found, unreadable, or no BERT with a tokenizer that can mask.
    """
    transformers = require("transformers", "text")
    check_kind(
        name, load_named(name, transformers.AutoConfig, extra="text"), kind="bert", example="prajjwal1/bert-tiny"
    )
    whole = load_named(
        name,
        transformers.BertForPreTraining,
        extra="text",
        attn_implementation=attention,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    vocabulary = _vocabulary(name, load_named(name, transformers.AutoTokenizer, extra="text"))
    if vocabulary.size > whole.config.vocab_size:
        raise ConfigError(
            f"pretrained={name!r} has {whole.config.vocab_size} embeddings for a tokenizer of {vocabulary.size} tokens;"
            " expected one for each; give weights and tokenizer that belong together"
        )
    return Pretrained(module=MaskedLanguageModel(whole.bert, whole.cls.predictions), vocabulary=vocabulary)


def _vocabulary(name: str, tokenizer: Any) -> Vocabulary:
    if tokenizer.mask_token_id is None or tokenizer.pad_token_id is None:
        raise ConfigError(
            f"pretrained={name!r} has a tokenizer without a mask or padding token; expected BERT's [MASK] and [PAD];"
            " give a folder whose tokenizer was saved with its special tokens"
        )
    ids = {kind: getattr(tokenizer, f"{kind}_token_id") for kind in ("pad", "unk", "cls", "sep", "mask")}
    known = {kind: number for kind, number in ids.items() if number is not None}
    return Vocabulary(tokenizer=tokenizer.backend_tokenizer, named_ids=known)


_ROWS_AT_ONCE = 16  # 16 rows of 30,522 float32 are 2 MB: they stay in a core's cache between the passes below


def masked_token_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The pair (total, count): the summed cross-entropy of this shard's masked tokens, and how many there are.

    Args:
        logits: [masked, vocabulary], the masked tokens in the order of their rows and positions; or [rows, slots,
            vocabulary], of every slot, where nothing then depends on how many are empty.
        labels: [rows, slots] int64; ``IGNORED_LABEL`` pads.

    Returns:
        Total, [] float32 on the device of the logits, and count, [] int64.

    Example:
        >>> total, count = masked_token_loss(torch.zeros(2, 4), torch.tensor([[3, -100], [0, -100]]))
        >>> round(float(total / count), 4), int(count)
        (1.3863, 2)
    """
    if logits.ndim == 3:
        whole = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")  # skips IGNORED_LABEL
        return whole, (labels != IGNORED_LABEL).sum()
    targets = masked_labels(labels)
    count = torch.tensor(len(targets), device=labels.device)
    if logits.is_cuda or type(logits) is not Tensor:  # which scores that are divided among workers are not
        return F.cross_entropy(logits.float(), targets, reduction="sum"), count
    total: Tensor = _SummedCrossEntropy.apply(logits, targets)  # type: ignore[no-untyped-call]
    return total, count


def masked_labels(labels: Tensor) -> Tensor:
    """The labels of the masked tokens, [masked], in the order of the logits."""
    return labels[labels != IGNORED_LABEL]


class _SummedCrossEntropy(torch.autograd.Function):
    """``F.cross_entropy(logits.float(), targets, reduction="sum")`` in fewer passes.

    At [608, 30522] float32 on one core, forward and backward: 50 ms, against 124 ms of F.cross_entropy (log-softmax,
    then a gradient of zeros for the picked entries, then its product with the softmax, each a new 74 MB).
    The softmax becomes the gradient in place, so a second backward through the same loss is refused.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        softmax = logits.new_empty(logits.shape, dtype=torch.float32) if ctx.needs_input_grad[0] else None
        losses = [_losses(logits, targets, rows, softmax) for rows in _groups(len(logits))]
        ctx.softmax, ctx.targets, ctx.dtype = softmax, targets, logits.dtype
        return torch.cat(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.softmax is None:
            raise UsageError("backward was called twice through one masked loss; compute the loss again before it")
        gradient, ctx.softmax = ctx.softmax, None
        gradient[torch.arange(len(gradient)), ctx.targets] -= 1
        return gradient.mul_(grad).to(ctx.dtype), None


def _groups(rows: int) -> list[slice]:
    return [slice(start, start + _ROWS_AT_ONCE) for start in range(0, max(1, rows), _ROWS_AT_ONCE)]


def _losses(logits: Tensor, targets: Tensor, rows: slice, softmax: Tensor | None) -> Tensor:
    """-log p(target) of some rows; their probabilities are left in ``softmax`` where the gradient will want them.

    The likeliest token's log p loses nothing in float32, and the target's is that less the distance of their logits.
    """
    scores = logits[rows].float()
    probabilities = torch.softmax(scores, dim=1, out=None if softmax is None else softmax[rows])
    distance = scores.amax(dim=1) - scores.gather(1, targets[rows, None])[:, 0]
    return distance - probabilities.amax(dim=1).log()
