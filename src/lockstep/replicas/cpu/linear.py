"""Linear layers of replicas on a CPU through oneDNN, where it is faster than the BLAS that torch was built with.

Intel's MKL is slow on AMD processors with AVX-512: 90 GFLOP/s a core on an EPYC of 2025, and 220 with oneDNN. A step
of bert_tiny, 64 lines a replica, took 765 ms with MKL and 501 with oneDNN. The choice follows from the processor alone,
so that a program's numbers stay the same from run to run.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep._torch_compat import functorch_is_active, mkldnn_linear, num_dispatch_modes, will_run_node

# By exact type: a subclass such as DTensor or a quantised weight has a linear layer of its own.
_PLAIN = (Tensor, torch.nn.Parameter)
_WORTH_IT = 1 << 22
"""The smallest product, in multiplications, for oneDNN: below it Python's overhead is as large as what is saved."""


@functools.cache
def onednn_is_faster() -> bool:
    """Whether linear layers are faster through oneDNN here: an AMD processor with AVX-512, and torch on MKL."""
    return (
        bool(torch.backends.mkl.is_available())  # type: ignore[no-untyped-call]
        and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and mkldnn_linear is not None
        and _vendor() == "AuthenticAMD"
    )


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear``, through oneDNN for large float32 products on the CPU; see ``_suits``."""
    if not _suits(input, weight, bias):
        return F.linear(input, weight, bias)
    if torch.is_grad_enabled() and (
        input.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        result: Tensor = _Linear.apply(input, weight, bias)  # type: ignore[no-untyped-call]
        return result
    return _product(input, weight, bias)


def may_suit(leaves: Iterable[Any], largest_weight: int) -> bool:
    """Whether a step on these leaves of a batch may have a product for oneDNN, by weights of so many elements.

    Told from the shapes of tensors alone, so that the same step takes the same products in every run. A row of the
    layer is taken for each integer, and for each vector of other numbers; without tensors it may.
    """
    rows = 0
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            is_vectors = leaf.ndim > 1 and (leaf.is_floating_point() or leaf.is_complex())
            rows = max(rows, leaf.numel() // max(leaf.shape[-1], 1) if is_vectors else leaf.numel())
    return largest_weight > 0 and (not rows or rows * largest_weight >= _WORTH_IT)


class _Linear(torch.autograd.Function):
    """y = x W^T + b and its gradients, each product by oneDNN."""

    @staticmethod
    def forward(context: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        for_input, for_weight, _ = context.needs_input_grad
        # The gradient of one needs the other: with frozen weights no activations are kept, as in torch.
        context.save_for_backward(input if for_weight else None, weight if for_input else None)
        return _product(input, weight, bias)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        input, weight = context.saved_tensors
        edges = (*context.next_functions, None)  # the None is for an absent bias, which has no edge
        for_input, for_weight, for_bias = map(_is_needed, context.needs_input_grad, edges)
        # With grad mode on, a gradient of the gradient is wanted: torch's own products have one, oneDNN's here do not.
        product = _differentiable_product if torch.is_grad_enabled() else _product
        rows = gradient.reshape(-1, gradient.shape[-1])
        return (
            product(rows, weight.t()).reshape(*gradient.shape[:-1], weight.shape[1]) if for_input else None,
            _weight_gradient(product, rows.t(), input.reshape(-1, input.shape[-1])) if for_weight else None,
            rows.sum(0) if for_bias else None,
        )


def _is_needed(needs_gradient: bool, edge: tuple[Any, int] | None) -> bool:
    """Whether this backward pass computes a gradient: a divided one, as zero-bubble's, computes some at a time."""
    if not needs_gradient or edge is None:
        return False
    try:
        return bool(will_run_node(edge[0]))
    except RuntimeError:  # a leaf that torch.autograd.grad was asked about
        return True


def matrix_product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes a b + bias by oneDNN, for [n, k] and [k, m] float32 on a CPU, and [m] or None; no gradients."""
    if bias is None and a.stride(0) == 1 < a.stride(1):
        return _weight_gradient(_product, a, b)
    return _product(a, b.t(), bias)


def is_worth_onednn(a: Tensor, b: Tensor, *added: Tensor) -> bool:
    """Whether ``matrix_product`` is for these tensors, which may be without values, and worth its overhead."""
    size = a.shape[0] * a.shape[1] * b.shape[1]
    return (
        all(matrix.dtype is torch.float32 and matrix.device.type == "cpu" for matrix in (a, b, *added))
        and (not isinstance(size, int) or size >= _WORTH_IT)  # no number yet in code for many shapes
    )


def _weight_gradient(product: Any, turned_rows: Tensor, examples: Tensor) -> Tensor:
    """rows^T examples, [out, in]. With the smaller of the two in front, oneDNN takes 0.7 to 0.9 of the time."""
    if turned_rows.shape[0] <= examples.shape[1]:
        result: Tensor = product(turned_rows, examples.t())
        return result
    turned: Tensor = product(examples.t(), turned_rows)
    return turned.t().contiguous()


def _product(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    result: Tensor = mkldnn_linear(input, weight, bias, "none", [], "")
    return result


def _differentiable_product(input: Tensor, weight: Tensor) -> Tensor:
    return input @ weight.t()


def _suits(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return (
        type(input) in _PLAIN
        and type(weight) in _PLAIN
        and weight.ndim == 2
        and input.numel() * weight.shape[0] >= _WORTH_IT  # before the others, which a small layer can do without
        and input.dtype is torch.float32
        and weight.dtype is torch.float32
        and (bias is None or bias.dtype is torch.float32)
        and input.device.type == weight.device.type == "cpu"
        and input.ndim >= 2
        and input.shape[-1] == weight.shape[1]
        and not torch.is_autocast_enabled("cpu")
        and not functorch_is_active()
        and not num_dispatch_modes()
        and bool(torch.backends.mkldnn.enabled)
    )


def _vendor() -> str:
    """The processor's vendor, as Linux names it; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")
