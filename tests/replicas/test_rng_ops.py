"""Our dropouts and attention against torch's: the same functions, but for where the numbers come from."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.replicas.context import ReplicaContext, in_context
from lockstep.replicas.rng import ops
from lockstep.replicas.rng.function_mode import ReplicaRng
from lockstep.replicas.rng.generators import replica_generator

MANY = 200_000


class _Here(ReplicaContext):
    """A context that only has to be there."""

    num_replicas_in_sync = 1

    def __init__(self) -> None:
        pass


def in_replica(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    with ReplicaRng(replica_generator(0, 0)), in_context(_Here()):
        return function(*args, **kwargs)


@pytest.mark.parametrize("function", [F.dropout, F.alpha_dropout, F.rrelu], ids=["dropout", "alpha_dropout", "rrelu"])
@pytest.mark.parametrize("value", [-2.0, 1.0])
def test_mean_and_variance_are_torch_s(function: Callable[..., Tensor], value: float):
    input = torch.full((MANY,), value)
    arguments = {"training": True} if function is F.rrelu else {"p": 0.3, "training": True}
    ours = in_replica(function, input, **arguments)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        theirs = function(input, **arguments)
    assert float(ours.mean()) == pytest.approx(float(theirs.mean()), abs=0.02)
    assert float(ours.var()) == pytest.approx(float(theirs.var()), abs=0.02)


@pytest.mark.parametrize("p", [0.0, 0.25, 1.0])
def test_dropout_keeps_or_zeroes_as_torch_does(p: float):
    values = in_replica(F.dropout, torch.ones(MANY), p, True)
    assert {round(value, 6) for value in values.unique().tolist()} <= {0.0, round(1 / max(1 - p, 1e-9), 6)}
    assert float((values == 0).float().mean()) == pytest.approx(p, abs=0.01)


@pytest.mark.parametrize("function", [F.dropout, F.alpha_dropout, F.rrelu, F.dropout2d])
def test_in_place_changes_the_input_and_gradients_agree(function: Callable[..., Tensor]):
    input = torch.linspace(-2, 2, 3 * 5 * 4 * 4, dtype=torch.float64).reshape(3, 5, 4, 4)
    gradients, outputs = [], []
    for inplace in (False, True):
        leaf = input.clone().requires_grad_()
        before = leaf * 1
        after = in_replica(function, before, training=True, inplace=inplace)
        assert (after.data_ptr() == before.data_ptr()) == inplace
        after.square().sum().backward()
        gradients.append(leaf.grad)
        outputs.append(after.detach())

    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("call", [lambda: F.dropout(torch.ones(3), 0.5, False), lambda: F.rrelu(torch.ones(3))])
def test_outside_training_nothing_is_drawn(call: Callable[[], Tensor]):
    generator = replica_generator(0, 0)
    before = generator.get_state()
    with ReplicaRng(generator), in_context(_Here()):
        output = call()
    assert torch.equal(output, torch.ones(3))
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("p", [-0.1, 1.1])
def test_a_bad_probability_is_torch_s_error(p: float):
    with pytest.raises(ValueError, match="dropout probability"):
        in_replica(F.dropout, torch.ones(3), p)


MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "boolean": {"attn_mask": torch.tensor([[True, False, True, True, False]])},
    "added": {"attn_mask": torch.linspace(-1, 1, 5 * 5).reshape(5, 5)},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "no key": {"attn_mask": torch.zeros(5, 5, dtype=torch.bool)},
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("groups", [1, 2])
def test_attention_is_torch_s(name: str, groups: int):
    random = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 5, 8, generator=random, dtype=torch.float64)
    key, value = torch.randn(2, 2, 4 // groups, 5, 8, generator=random, dtype=torch.float64)
    options: dict[str, Any] = dict(MASKS[name], enable_gqa=groups > 1)
    if options.get("attn_mask") is not None and options["attn_mask"].is_floating_point():
        options["attn_mask"] = options["attn_mask"].double()
    ours = in_replica(F.scaled_dot_product_attention, query, key, value, dropout_p=1e-12, **options)
    torch.testing.assert_close(ours, F.scaled_dot_product_attention(query, key, value, **options))


def test_attention_weights_are_dropped_and_scaled():
    keys = 100_000
    # All scores are equal, so that the output is the mean of what dropout made of ones.
    generator = replica_generator(0, 0)
    output = ops.attention(
        generator, torch.zeros(1, 1, 4), torch.zeros(1, keys, 4), torch.ones(1, keys, 1), dropout_p=0.4
    )
    assert float(output) == pytest.approx(1.0, abs=5 * math.sqrt(0.4 / 0.6 / keys))
    assert float(output) != 1.0


@pytest.mark.parametrize("autocast", [False, True], ids=["as they are", "autocast"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_attention_with_dropout_has_the_bits_of_torch_s(name: str, dtype: torch.dtype, autocast: bool):
    # A replica alone may run without the function mode, where torch's own attention draws the same numbers.
    random = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, 5, 8, generator=random).to(dtype).requires_grad_()
    options = dict(MASKS[name])
    if options.get("attn_mask") is not None and options["attn_mask"].is_floating_point():
        options["attn_mask"] = options["attn_mask"].to(dtype)
    results = []
    for attend in (F.scaled_dot_product_attention, ops.attention):
        generator = [] if attend is F.scaled_dot_product_attention else [torch.Generator().manual_seed(7)]
        with torch.random.fork_rng(), torch.autocast("cpu", enabled=autocast):
            torch.manual_seed(7)
            output = attend(*generator, query, key, value, dropout_p=0.3, **options)
            results.append([output, *torch.autograd.grad(output.float().square().sum(), (query, key, value))])
    assert all(map(torch.equal, *results))
    assert results[0][0].dtype == results[1][0].dtype
