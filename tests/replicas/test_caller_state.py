"""What holds where run is called holds in the replicas: grad mode, inference mode, autocast, context variables."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from contextvars import ContextVar

import pytest
import torch
from tests.conftest import MakeStrategy, here

setting: ContextVar[str] = ContextVar("setting", default="default")
State = tuple[bool, bool, bool, torch.dtype, str]


def state() -> State:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        setting.get(),
    )


@pytest.mark.parametrize(
    "make",
    [
        nullcontext,
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch.autocast("cpu", dtype=torch.float16),
        lambda: torch.autocast("cpu", enabled=False),
    ],
    ids=["nothing", "no_grad", "inference_mode", "bfloat16", "float16", "autocast off"],
)
def test_the_torch_modes_of_the_caller(make: Callable[[], AbstractContextManager[object]], make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    before: list[State] = []
    inside: list[State] = []
    after: list[State] = []
    strategy.run(lambda: before.append(state()))
    with make():
        expected = state()
        strategy.run(lambda: inside.append(state()))
    strategy.run(lambda: after.append(state()))

    assert inside == [expected] * 2
    assert before == after == [state()] * 2


def test_enable_grad_inside_no_grad(make_strategy: MakeStrategy):
    with torch.no_grad(), torch.enable_grad():
        assert make_strategy(2).run(torch.is_grad_enabled) is True


def test_context_variables_of_the_caller_are_seen_and_stay_the_caller_s(make_strategy: MakeStrategy):
    seen: list[str] = []

    def step() -> None:
        seen.append(setting.get())
        setting.set("of a replica")

    token = setting.set("of the caller")
    make_strategy(3).run(step)

    assert seen == ["of the caller"] * 3
    assert setting.get() == "of the caller"
    setting.reset(token)


def test_autocast_works_in_a_replica_as_outside(make_strategy: MakeStrategy):
    layer = torch.nn.Linear(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = make_strategy(2).run(layer, (torch.ones(1, 2),))
    assert [output.dtype for output in outputs] == [torch.bfloat16] * 2


def test_the_end_of_a_replicas_autocast_changes_nothing_in_another(make_strategy: MakeStrategy):
    """torch's cache of casts is one for all threads, and whoever leaves autocast clears it."""
    strategy = make_strategy(2)
    layers = [torch.nn.Linear(16, 16) for _ in range(2)]
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))

    def twice(*, leaves: bool) -> torch.Tensor | None:
        context = here()
        layer = layers[context.replica_id_in_sync_group]
        layer.zero_grad()
        with ExitStack() as stack:
            stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
            y = layer(x)
            context.merge_call(lambda _strategy: None)
            if leaves and context.replica_id_in_sync_group == 1:
                stack.close()
            context.merge_call(lambda _strategy: None)
            if context.replica_id_in_sync_group == 0:
                layer(torch.tanh(y)).float().square().sum().backward()
            context.merge_call(lambda _strategy: None)
        return layer.weight.grad

    alone, beside = (strategy.run(twice, kwargs={"leaves": leaves})[0] for leaves in (False, True))

    assert torch.equal(alone, beside)
