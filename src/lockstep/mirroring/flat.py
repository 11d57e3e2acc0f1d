"""Several gradients as one flat tensor, which travels better than each by itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def views_of(flat: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Each parameter's part of ``flat``, one behind the other, in the parameter's own shape and memory format.

    Args:
        flat: [numbers or more], contiguous.
        parameters: of that many numbers in all.
    """
    numbers = [parameter.numel() for parameter in parameters]
    parts = flat[: sum(numbers)].split(numbers)  # type: ignore[no-untyped-call]
    return [
        part.as_strided(parameter.shape, parameter.stride(), part.storage_offset())
        if _is_permuted(parameter)
        else part.view(parameter.shape)
        for part, parameter in zip(parts, parameters, strict=True)
    ]


def _is_permuted(parameter: torch.Tensor) -> bool:
    """Whether it is in channels_last, so that its gradients are too."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    layout = formats.get(parameter.ndim)
    return layout is not None and parameter.is_contiguous(memory_format=layout)
