"""Fingerprints of rows, and a few values of each: what is kept of batches and of outputs. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from lockstep.verify.record import Rows

KEPT_VALUES = 256
"""Values of an output's row that are compared; of longer rows, as many at equal distances."""


def fingerprints(tensor: Tensor) -> Rows:
    """A 64-bit number for each row: equal rows have equal numbers, and others do not but by a chance of about 2^-64.

    Args:
        tensor: [rows, ...], any type.
    """
    rows = tensor.detach().cpu().contiguous().reshape(tensor.shape[0], math.prod(tensor.shape[1:]))
    if rows.numel() == 0:
        return (0,) * tensor.shape[0]
    words = _words(rows)
    # Integers wrap: a dot product with odd random numbers, modulo 2^64.
    return tuple((words * _factors(words.shape[1])).sum(1).tolist())


def some_values(tensor: Tensor) -> Tensor:
    """[rows, at most ``KEPT_VALUES``], a copy on the CPU: whole rows, or values at equal distances."""
    rows = tensor.detach().reshape(tensor.shape[0], math.prod(tensor.shape[1:]))
    stride = max(1, math.ceil(rows.shape[1] / KEPT_VALUES))
    return rows[:, ::stride].to("cpu", copy=True)


def tensors_with_rows(structure: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of at least one dimension in a structure, with the place of each."""
    for path, leaf in tree_flatten_with_path(structure)[0]:
        if isinstance(leaf, Tensor) and leaf.ndim > 0 and not leaf.is_sparse:
            yield keystr(path), leaf


def _words(rows: Tensor) -> Tensor:
    if rows.dtype == torch.bool:
        return rows.to(torch.int64)
    size = rows.element_size()
    if rows.is_complex():
        return _words(torch.view_as_real(rows).reshape(rows.shape[0], -1))
    return rows.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]).to(torch.int64)


@cache
def _factors(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(-(2**62), 2**62, (number,), generator=generator) * 2 + 1
