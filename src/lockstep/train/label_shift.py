"""Whether the loss that a module computes itself compares the outputs at each token with the label of the next one.

Causal language models of transformers do: they get the tokens as labels, and shift them inside. Metrics get the outputs
and the same labels, so they have to shift too. Masked, sequence-to-sequence and token classification models do not.
The numbers tell them apart, whatever the module's class: which of the two cross-entropies the loss is.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.parallel.vocab_parallel import has_sharded_logits
from lockstep.train.loss_reduction import LabelMean
from lockstep.train.string_identifiers import logits_of

_CLOSE = 1e-4  # float32; the loss of half precision logits has 1e-2


def shifts_labels(outputs: Any, targets: Any) -> bool | None:
    """Returns whether the loss among the outputs shifts labels; None if these rows do not tell.

    Warns if it is neither of the cross-entropies, so that metrics may compare other labels than the loss does.
    """
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    logits = logits_of(outputs)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not _are_tokens(logits, targets):
        return False
    if has_sharded_logits(outputs):
        _warn("its logits are divided among workers")
        return False
    with torch.no_grad():
        same = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten().long())
        following = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets[:, 1:].flatten().long())
        # Stacked, so that the host waits for the device once and not three times.
        numbers = torch.stack([loss.detach().reshape(()).to(same.dtype), same, following]).tolist()
    return _decide(*numbers, tolerance=_CLOSE if logits.dtype in (torch.float32, torch.float64) else 100 * _CLOSE)


def traced_shift(label_means: Sequence[LabelMean], targets: Any) -> bool | None:
    """Whether a loss of which torch's calls were traced shifts labels; None if the calls do not tell.

    It shifts if it was computed with the targets of the next tokens. Waits for the device.
    """
    if len(label_means) != 1 or not isinstance(targets, Tensor) or targets.dim() != 2 or targets.shape[1] < 2:
        return None
    loss_labels = label_means[0].target.flatten()
    following = F.pad(targets[:, 1:], (0, 1), value=label_means[0].ignored)
    same, shifts = (
        loss_labels.shape == labels.shape and torch.equal(loss_labels, labels.to(loss_labels.dtype))
        for labels in (targets.flatten(), following.flatten())
    )
    shifts = shifts or (loss_labels.numel() != targets.numel() and loss_labels.numel() == targets[:, 1:].numel())
    return shifts if same != shifts else None


def _decide(loss: float, same: float, following: float, *, tolerance: float) -> bool | None:
    is_same, is_following = (abs(loss - value) <= tolerance * max(1.0, abs(loss)) for value in (same, following))
    if is_same != is_following:
        return is_following
    if is_same or loss != loss:  # both, as for outputs that are all alike; or NaN, as for rows without labels
        return None
    _warn("it is neither the cross-entropy of each token nor of the next one")
    return False


def shifted(outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the logits of all tokens but the last, and the labels of all but the first."""
    return logits_of(outputs)[:, :-1], targets[:, 1:]


def _are_tokens(logits: Any, targets: Any) -> bool:
    tensors = isinstance(logits, Tensor) and isinstance(targets, Tensor)
    if not tensors or logits.dim() != 3 or targets.is_floating_point():
        return False
    return bool(targets.shape == logits.shape[:2] and targets.shape[1] > 1)


def _warn(reason: str) -> None:
    warnings.warn(
        "the module computes its own loss, and whether that shifts the labels by one token, as causal language models"
        f" do, cannot be told: {reason}; metrics compare the logits of each token with the label of the same token. If"
        " the loss shifts, give metrics of your own that do, or shifted targets y: F.pad(labels[:, 1:], (0, 1),"
        " value=-100)",
        stacklevel=2,
    )
