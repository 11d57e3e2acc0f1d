"""Gradient clipping by the global norm, as ``torch.nn.utils.clip_grad_norm_`` does it (Pascanu et al. 2013).

each replica: the norms of its slice -> [barrier: GradientExchange.norm, of all parameters] -> each scales its slice
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lockstep._torch_compat import foreach_mul_, foreach_norm
from lockstep.mirroring.gradients.exchange import Copies


def gradient_norms(parameters: Sequence[Copies], indices: Iterable[int], replica: int) -> dict[int, Tensor]:
    """The norm of each gradient that ``replica`` has of the parameters with these numbers, by number."""
    found = {index: grad for index in indices if (grad := parameters[index][replica].grad) is not None}
    return dict(zip(found, foreach_norm(list(found.values())) if found else (), strict=True))


def scale_to_norm(gradients: Sequence[Tensor], norm: Tensor, clip_norm: float) -> None:
    """Scales gradients in place, so that a global ``norm`` above ``clip_norm`` becomes that."""
    if gradients:
        coefficient = torch.clamp(clip_norm / (norm + 1e-6), max=1.0)
        foreach_mul_(list(gradients), coefficient.to(gradients[0].device))
