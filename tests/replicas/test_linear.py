"""Linear layers through oneDNN: torch's numbers to rounding, gradients too; and torch's own where it does not suit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.replicas.cpu import linear as onednn
from lockstep.strategies.mirrored import MirroredStrategy

pytestmark = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")),
    reason="this torch has no oneDNN",
)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """The shapes of the products given to oneDNN."""
    seen: list[tuple[int, ...]] = []
    real = onednn._product

    def noted(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        seen.append(tuple(input.shape))
        return real(input, weight, bias)

    monkeypatch.setattr(onednn, "_product", noted)
    return seen


def tensors(*shape: int, outputs: int, bias: bool = True) -> tuple[Tensor, Tensor, Tensor | None]:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(*shape, generator=random)
    weight = torch.randn(outputs, shape[-1], generator=random)
    return x, weight, torch.randn(outputs, generator=random) if bias else None


def gradients(function: Callable[..., Tensor], *leaves: Tensor | None, dtype: torch.dtype) -> list[Tensor]:
    own = [None if leaf is None else leaf.to(dtype).clone().requires_grad_() for leaf in leaves]
    y = function(*own)
    (y * torch.linspace(-1, 1, y.numel(), dtype=dtype).reshape(y.shape)).sum().backward()
    return [y.detach(), *(leaf.grad for leaf in own if leaf is not None and leaf.grad is not None)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("shape", "outputs"), [((300, 128), 256), ((4, 75, 256), 128), ((40, 33), 5000)])
def test_values_and_gradients_are_those_of_double_precision(
    shape: tuple[int, ...], outputs: int, bias: bool, products: list[tuple[int, ...]]
):
    leaves = tensors(*shape, outputs=outputs, bias=bias)
    ours = gradients(onednn.linear, *leaves, dtype=torch.float32)
    exact = gradients(F.linear, *leaves, dtype=torch.float64)
    assert len(products) == 3  # forward, the input's gradient, the weight's
    assert len(ours) == len(exact) == 3 + bias
    for own, right in zip(ours, exact, strict=True):
        assert own.is_contiguous()
        torch.testing.assert_close(own.double(), right, rtol=1e-4, atol=1e-4 * float(right.abs().max()))


def test_only_the_gradients_that_are_needed_are_computed(products: list[tuple[int, ...]]):
    x, weight, bias = tensors(300, 128, outputs=256)
    weight.requires_grad_()
    onednn.linear(x, weight, bias).sum().backward()
    assert len(products) == 2
    assert x.grad is None


@pytest.mark.parametrize("leaf", [True, False])
def test_a_backward_pass_that_is_divided_computes_each_gradient_once(leaf: bool, products: list[tuple[int, ...]]):
    """As a zero-bubble pipeline divides it: the inputs' gradients first, the weights' later."""
    leaves = tensors(300, 128, outputs=256)
    whole = gradients(onednn.linear, *leaves, dtype=torch.float32)
    x, weight, bias = (tensor.requires_grad_() for tensor in leaves if tensor is not None)
    y = onednn.linear(x if leaf else x * 1.0, weight, bias)
    outer = torch.linspace(-1, 1, y.numel()).reshape(y.shape)
    products.clear()

    (for_input,) = torch.autograd.grad(y, x, outer, retain_graph=True)
    assert len(products) == 1
    for_weight, for_bias = torch.autograd.grad(y, (weight, bias), outer)
    assert len(products) == 2
    for ours, expected in zip((for_input, for_weight, for_bias), whole[1:], strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("frozen", ["input", "weight"])
def test_what_no_gradient_needs_is_not_kept(frozen: str):
    x, weight, bias = tensors(300, 128, outputs=256)
    (weight if frozen == "input" else x).requires_grad_()
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        onednn.linear(x, weight, bias)

    assert [tensor is (x if frozen == "input" else weight) for tensor in kept] == [True]


def test_without_gradients_there_is_one_product_and_no_graph(products: list[tuple[int, ...]]):
    x, weight, bias = tensors(300, 128, outputs=256)
    with torch.no_grad():
        y = onednn.linear(x, weight.requires_grad_(), bias)
    assert len(products) == 1
    assert y.grad_fn is None


def test_a_gradient_of_the_gradient_is_right():
    def penalty(function: Callable[..., Tensor], dtype: torch.dtype) -> Tensor:
        x, weight, _ = (None if leaf is None else leaf.to(dtype) for leaf in tensors(300, 128, outputs=256))
        assert x is not None
        weight.requires_grad_()
        (slope,) = torch.autograd.grad(function(x, weight).square().mean(), weight, create_graph=True)
        slope.square().sum().backward()
        return weight.grad.double()

    exact = penalty(F.linear, torch.float64)
    torch.testing.assert_close(
        penalty(onednn.linear, torch.float32), exact, rtol=1e-3, atol=1e-5 * float(exact.abs().max())
    )


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # what torch says when oneDNN is switched
@pytest.mark.parametrize(
    ("change", "within"),
    [
        (lambda x, w: (x[:4], w), nullcontext),
        (lambda x, w: (x.double(), w.double()), nullcontext),
        (lambda x, w: (x, w), lambda: torch.autocast("cpu", torch.bfloat16)),
        (lambda x, w: (x, w), lambda: torch.backends.mkldnn.flags(enabled=False)),
        (lambda x, w: (x.as_subclass(_Tagged), w), nullcontext),
    ],
    ids=["small", "double", "autocast", "switched off", "subclass"],
)
def test_the_rest_is_left_to_torch(
    change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    within: Callable[[], AbstractContextManager[Any]],
    products: list[tuple[int, ...]],
):
    x, weight, _ = tensors(300, 128, outputs=256)
    with within():
        ours, theirs = onednn.linear(*change(x, weight)), F.linear(*change(x, weight))
    assert products == []
    assert torch.equal(ours, theirs)


class _Tagged(torch.Tensor):
    pass


def test_functorch_is_left_to_torch(products: list[tuple[int, ...]]):
    x, weight, _ = tensors(300, 128, outputs=256)
    torch.testing.assert_close(torch.func.vmap(lambda row: onednn.linear(row[None], weight))(x)[:, 0], x @ weight.T)
    torch.func.grad(lambda w: onednn.linear(x, w).sum())(weight)
    assert products == []


@pytest.mark.parametrize("faster", [True, False])
def test_replicas_use_it_where_it_is_faster(
    faster: bool,
    products: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
    make_strategy: Callable[..., MirroredStrategy],
):
    monkeypatch.setattr("lockstep.replicas.runner.onednn_is_faster", lambda: faster)
    strategy = make_strategy(2)
    module = nn.Linear(128, 256)
    mirrored = strategy.mirror(module)
    (batch,) = strategy.distribute_dataset([torch.randn(600, 128)])

    def step(x: torch.Tensor) -> None:
        mirrored(x).sum().backward()

    strategy.run(step, (batch,))  # in the first run the rows are followed by products of their own
    products.clear()
    strategy.run(step, (batch,))

    assert sorted(products) == sorted([(300, 128), (128, 300)] * 2 if faster else [])  # forward, the weight's gradient
    products.clear()
    module(torch.randn(600, 128))  # outside a replica the module is plain
    assert products == []
