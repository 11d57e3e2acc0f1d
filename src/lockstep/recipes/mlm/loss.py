"""Cross-entropy summed over masked tokens, with their number beside it: exact however the tokens fall on the replicas.

    logits [masked, vocabulary], labels [rows, slots] -> total = sum of -log p(label), count = masked tokens

The vocabulary dimension is so wide that passes over the logits are what the loss costs, so on a CPU the softmax is
worked out once, a few rows at a time, and turned into the gradient where it lies.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lockstep.errors import UsageError
from lockstep.recipes.mlm.masking import IGNORED_LABEL

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
