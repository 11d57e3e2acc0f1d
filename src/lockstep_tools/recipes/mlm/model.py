"""BERT with a masked-token head that computes logits at the masked positions only, its loss and its accuracy.

    input_ids [rows, tokens] -> BertModel -> [rows, tokens, hidden] -> the masked positions -> [masked, hidden]
      -> transform -> times the word embeddings -> logits [masked, vocabulary]

Submodules and state_dict keys are those of transformers' BertForMaskedLM: each loads the other's weights.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lockstep.errors import ConfigError, UsageError
from lockstep.extras import require
from lockstep.train.summed_metric import SummedMetric
from lockstep_tools.recipes.from_hub import check_embeddings, load_named
from lockstep_tools.recipes.mlm.config import MlmConfig
from lockstep_tools.recipes.text.tokenizer import load_tokenizer

IGNORED_LABEL = -100
"""Label of an unused slot in a row's list of masked positions (the default ``ignore_index`` of torch)."""
NO_POSITION = -1
"""Position in an unused slot of a row's list of masked positions."""


class MaskedLanguageModel(nn.Module):
    """BertModel and the masked-token head that is tied to its word embeddings. The unused pooler is frozen.

    Args:
        bert: a transformers BertModel.
        predictions: its BertLMPredictionHead, tied to the word embeddings by transformers.

    Attributes:
        config: the config of transformers; with the names of the submodules it says how workers may divide the model.
        static_shapes: whether all shapes are independent of the content of the rows. The step then needs no
            synchronisation with the GPU and can be captured as a CUDA graph; but unused slots have logits too, and the
            attention mask is applied to rows without padding as well.
    """

    base_model_prefix = "bert"
    static_shapes = False

    def __init__(self, bert: Any, predictions: Any) -> None:
        super().__init__()
        self.config = bert.config
        self.bert = bert
        self.cls = nn.ModuleDict({"predictions": predictions})
        # It takes part in no loss, so it gets no gradient; frozen, optimizers and the checks of unused parameters pass
        # it over.
        if bert.pooler is not None:
            bert.pooler.requires_grad_(False)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        masked_positions: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Computes the logits of the masked tokens.

        Args:
            input_ids: [rows, tokens] int64.
            attention_mask: [rows, tokens] int64: 1 for real tokens, 0 for padding; None where all are real.
            masked_positions: [rows, slots] int64; ``NO_POSITION`` in unused slots. None: every token.
            inputs_embeds: [rows, tokens, hidden] float, in place of ``input_ids``: the input of a pipeline stage.

        Returns:
            [masked, vocabulary] float, in the order of rows and slots; with ``static_shapes`` [rows, slots,
            vocabulary]; without ``masked_positions`` [rows, tokens, vocabulary].
        """
        hidden = self._encode(input_ids, attention_mask, inputs_embeds)
        # Logits at 15% of the tokens only: the product with 30,522 words is the largest of a small model
        # (test_the_vocabulary_projection_sees_masked_tokens_only).
        if masked_positions is not None and not self.static_shapes:
            rows, slots = (masked_positions != NO_POSITION).nonzero(as_tuple=True)
            hidden = hidden[rows, masked_positions[rows, slots]]
        elif masked_positions is not None:
            index = masked_positions.clamp(min=0).unsqueeze(-1)
            # ``nonzero`` above would wait for the GPU, to learn how many there are.
            hidden = hidden.gather(1, index.expand(-1, -1, hidden.shape[-1]))
        logits: Tensor = self.cls["predictions"](hidden)
        return logits

    def _init_weights(self, module: nn.Module) -> None:
        """Initialises a submodule that was on the meta device, as transformers' models do."""
        self.bert._init_weights(module)

    def _encode(self, input_ids: Tensor | None, attention_mask: Tensor | None, embedded: Tensor | None) -> Any:
        if input_ids is not None and not len(input_ids):  # an empty shard, which transformers cannot reshape
            return self.bert.embeddings.word_embeddings(input_ids)
        if self.static_shapes and attention_mask is not None:
            # transformers takes a mask [rows, 1, tokens, tokens] as it is.
            attention_mask = attention_mask.bool()[:, None, None, :].expand(-1, 1, attention_mask.shape[1], -1)
        encoded = self.bert(input_ids=input_ids, inputs_embeds=embedded, attention_mask=attention_mask)
        return encoded.last_hidden_state


def new_bert(config: MlmConfig) -> MaskedLanguageModel:
    """Returns a model with random weights, drawn from torch's default generator."""
    bert = require("transformers.models.bert.modeling_bert", "text")
    bert_config = bert.BertConfig(
        vocab_size=config.vocabulary,
        hidden_size=config.hidden,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        intermediate_size=config.feed_forward,
        max_position_embeddings=config.sequence_length,
        hidden_dropout_prob=config.dropout,
        attention_probs_dropout_prob=config.dropout,
        attn_implementation="sdpa",
    )
    # The head and its tie to the embeddings are made by transformers; the classifier of next sentences is dropped.
    whole = bert.BertForPreTraining(bert_config)
    return MaskedLanguageModel(whole.bert, whole.cls.predictions)


def load_pretrained(name: str, *, dropout: float) -> tuple[MaskedLanguageModel, Any]:
    """Loads a BERT and its tokenizer, from a folder of ``save_pretrained`` or this recipe, or by Hugging Face name.

    Raises:
        ConfigError: the model was not found, cannot be read, or is not a BERT with a mask token.
    """
    transformers = require("transformers", "text")
    model_type = load_named(name, transformers.AutoConfig).model_type
    if model_type != "bert":
        raise ConfigError(f"pretrained={name!r} is a model of type {model_type!r}, expected a BERT")
    settings = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    bert = load_named(name, transformers.BertForPreTraining, attn_implementation="sdpa", **settings)
    tokenizer = load_tokenizer(name, masks=True)
    check_embeddings(name, bert.config.vocab_size, len(tokenizer))
    return MaskedLanguageModel(bert.bert, bert.cls.predictions), tokenizer


_ROWS_AT_ONCE = 16  # 16 rows of 30,522 float32 are 2 MB: they stay in a core's cache between the passes below


def masked_token_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (total, count): the summed cross-entropy of this shard's masked tokens, and their number.

    Logits are [masked, vocabulary], in the order of rows and positions; or [rows, slots, vocabulary], which keeps all
    shapes independent of the number of unused slots. Labels are [rows, slots] int64 with ``IGNORED_LABEL`` in these.
    """
    real = labels != IGNORED_LABEL
    if logits.ndim == 3:
        summed = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")  # skips IGNORED_LABEL
        return summed, real.sum()
    targets = labels[real]
    count = torch.tensor(len(targets), device=labels.device)
    if logits.is_cuda or type(logits) is not Tensor:  # vocabulary-parallel logits are of a subclass
        return F.cross_entropy(logits.float(), targets, reduction="sum"), count
    total: Tensor = _SummedCrossEntropy.apply(logits, targets)  # type: ignore[no-untyped-call]
    return total, count


class _SummedCrossEntropy(torch.autograd.Function):
    """``F.cross_entropy(logits.float(), targets, reduction="sum")`` in fewer passes over memory.

    Forward and backward at [608, 30522] float32 on one core take 50 ms, and 124 ms with F.cross_entropy (log-softmax,
    then a gradient of zeros but for the targets, then its product with the softmax, each a new tensor of 74 MB).
    The softmax becomes the gradient in place, so a second backward through the same loss is an error.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        softmax = logits.new_empty(logits.shape, dtype=torch.float32) if ctx.needs_input_grad[0] else None
        starts = range(0, max(1, len(logits)), _ROWS_AT_ONCE)
        losses = [_losses(logits, targets, slice(start, start + _ROWS_AT_ONCE), softmax) for start in starts]
        ctx.softmax, ctx.targets, ctx.dtype = softmax, targets, logits.dtype
        return torch.cat(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.softmax is None:
            raise UsageError(
                "backward was called twice through one masked-token loss; compute the loss again before the second call"
            )
        # Taken out of the context, so that the memory is free after the backward pass and a second one is told.
        gradient, ctx.softmax = ctx.softmax, None
        gradient[torch.arange(len(gradient)), ctx.targets] -= 1
        return gradient.mul_(grad).to(ctx.dtype), None


def _losses(logits: Tensor, targets: Tensor, rows: slice, softmax: Tensor | None) -> Tensor:
    """Returns -log p(target) of some rows; writes their probabilities to ``softmax`` for the backward pass.

    The log p of the likeliest token is exact in float32; that of the target is this less the difference of the logits.
    """
    block = logits[rows].float()
    probabilities = torch.softmax(block, dim=1, out=None if softmax is None else softmax[rows])
    difference = block.amax(dim=1) - block.gather(1, targets[rows, None])[:, 0]
    return difference - probabilities.amax(dim=1).log()


class MaskedTokenAccuracy(SummedMetric):
    """The fraction of masked tokens whose likeliest prediction is correct.

    torchmetrics' MulticlassAccuracy expects as many labels as rows of logits, and our labels are padded row by row. At
    [608, 30522] on one core an update takes 12 ms here, 12 ms in MulticlassAccuracy(average="micro"), and 6,050 ms with
    its default average.
    """

    correct: Tensor
    masked: Tensor

    def __init__(self) -> None:
        super().__init__("correct", "masked")

    def count(self, logits: Tensor, labels: Tensor) -> None:
        """Adds logits [masked, vocabulary] or [rows, slots, vocabulary], and padded labels [rows, slots]."""
        real = labels != IGNORED_LABEL
        targets = labels if logits.ndim == 3 else labels[real]
        self.correct += (logits.argmax(dim=-1) == targets).sum()
        self.masked += real.sum()

    def compute(self) -> Tensor:
        """Returns correct tokens / masked tokens; NaN before the first batch."""
        return self.correct / self.masked
