"""The replica context inside a run: who am I, merge_call, and what a failed meeting of replicas looks like."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from tests.conftest import MakeStrategy, here

from lockstep.collectives.per_replica import PerReplica
from lockstep.errors import CollectiveError, UsageError
from lockstep.replicas.context import get_replica_context
from lockstep.strategies.base import get_strategy, has_strategy, in_cross_replica_context
from lockstep.strategies.mirrored import MirroredStrategy


def replica() -> int:
    return here().replica_id_in_sync_group


def test_a_replica_knows_who_it_is(make_strategy: MakeStrategy):
    strategy = make_strategy(3)

    def step() -> Any:
        context = here()
        assert context.strategy is strategy
        assert context.num_replicas_in_sync == 3
        assert get_strategy() is strategy
        assert has_strategy()
        assert not in_cross_replica_context()
        return {"number": context.replica_id_in_sync_group, "name": context.device.name, "text": repr(context)}

    result = strategy.run(step)

    assert list(result["number"]) == [0, 1, 2]
    assert list(result["name"]) == ["cpu:0", "cpu:1", "cpu:2"]
    assert result["text"][1] == "ReplicaContext(replica 1 of 3 on cpu:1)"
    assert get_replica_context() is None
    assert not has_strategy()


def test_merge_call_runs_once_with_per_replica_arguments_in_cross_replica_context(make_strategy: MakeStrategy):
    strategy = make_strategy(3)
    calls: list[Any] = []
    shared = object()

    def merged(given: MirroredStrategy, values: PerReplica[float], nested: dict[str, Any], same: object) -> Any:
        assert get_replica_context() is None
        assert in_cross_replica_context()
        assert get_strategy() is strategy
        assert given is strategy
        calls.append(threading.get_ident())
        total = strategy.reduce("sum", values)
        assert same is shared
        return {"total": total, "own": PerReplica([value * 10 for value in nested["deep"]])}

    def step() -> Any:
        mine = float(replica() + 1.5)
        result = here().merge_call(merged, (mine, {"deep": mine}, shared))
        assert replica() == round(mine - 1.5)  # back in the replica
        return result

    result = strategy.run(step)

    assert len(calls) == 1
    assert result["total"] == 7.5
    assert list(result["own"]) == [15.0, 25.0, 35.0]


def test_merge_call_takes_keywords_and_merges_each_argument_by_itself(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    got: list[Any] = []

    def merged(_strategy: MirroredStrategy, *args: Any, **kwargs: Any) -> None:
        got.append((args, kwargs))

    def step() -> None:
        mine = torch.full((), float(replica()))
        unlike = (mine, mine) if replica() else None
        here().merge_call(merged, (unlike, mine), {"named": mine})

    strategy.run(step)

    ((unlike, both), named), *others = got
    assert not others
    assert unlike.values[0] is None
    assert [float(value) for value in unlike.values[1]] == [1, 1]
    assert [float(value) for value in both] == [float(value) for value in named["named"]] == [0, 1]


def test_a_merge_call_of_a_function_without_the_strategy_says_so(make_strategy: MakeStrategy):
    strategy = make_strategy(2)

    def total(values: PerReplica[int]) -> int:
        return sum(values)

    def fail(_strategy: MirroredStrategy) -> None:
        raise TypeError("its own")

    with pytest.raises(TypeError, match="total") as raised:
        strategy.run(lambda: here().merge_call(total, (replica(),)))
    assert "merge_call calls fn(strategy, *args, **kwargs), as TensorFlow does" in raised.value.__notes__
    with pytest.raises(TypeError, match="its own"):
        strategy.run(lambda: here().merge_call(fail))
    with pytest.raises(UsageError, match=r"0 args.*1 args"):
        strategy.run(lambda: here().merge_call(lambda _strategy, *_: None, (1,) * replica()))


def test_an_error_in_a_merge_call_is_raised_and_the_strategy_goes_on(make_strategy: MakeStrategy):
    strategy = make_strategy(2)

    def fail(_strategy: MirroredStrategy) -> None:
        raise KeyError("of the merge")

    with pytest.raises(KeyError, match="of the merge"):
        strategy.run(lambda: here().merge_call(fail))
    assert strategy.run(lambda: here().all_reduce("sum", 1)) == 2


def test_replicas_in_different_collectives_are_told_where_each_waits(make_strategy: MakeStrategy):
    strategy = make_strategy(3)

    def step() -> None:
        if replica() == 1:
            here().all_gather(torch.ones(1), 0)
        else:
            here().all_reduce("sum", torch.ones(1))

    with pytest.raises(CollectiveError) as caught:
        strategy.run(step)

    message = str(caught.value)
    # Two are enough to know; the third may or may not have come.
    assert "replica 1 (cpu:1) waits in all_gather(axis=0) at test_context.py:" in message
    assert "waits in all_reduce(sum) at test_context.py:" in message
    assert "in step" in message
    assert message.endswith("Every replica must call the same collectives in the same order")
    assert strategy.run(lambda: here().all_reduce("sum", 1)) == 3


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_a_replica_that_returns_early_is_named(op: str, make_strategy: MakeStrategy):
    strategy = make_strategy(2)

    def step() -> None:
        if replica() == 0:
            here().all_reduce(op, 1.0)

    for _ in range(20):  # whoever comes first
        with pytest.raises(
            CollectiveError,
            match=rf"replica 0 \(cpu:0\) waits in all_reduce\({op}\) .*; replica 1 \(cpu:1\) has returned",
        ):
            strategy.run(step)
    assert strategy.run(lambda: here().all_reduce("sum", 1)) == 2


def test_swallowing_the_stop_does_not_hide_the_error(make_strategy: MakeStrategy):
    strategy = make_strategy(2)

    def step() -> None:
        if replica() == 1:
            raise ValueError("the first error")
        for _ in range(3):
            with suppress(BaseException):
                here().all_reduce("sum", 1)

    with pytest.raises(ValueError, match="the first error"):
        strategy.run(step)


def test_after_the_time_limit_the_missing_replica_is_named(make_strategy: MakeStrategy):
    strategy = make_strategy(2, timeout_s=0.2)
    released = threading.Event()

    def step() -> None:
        if replica() == 1:
            released.wait(20)
        here().all_reduce("sum", 1)

    threading.Timer(0.5, released.set).start()
    with pytest.raises(CollectiveError, match=r"nobody else came within 0.2 s.*replica 1 \(cpu:1\) is still running"):
        strategy.run(step)
    assert strategy.run(lambda: here().all_reduce("sum", 1)) == 2


@pytest.mark.parametrize(
    ("method", "call"),
    [
        ("run", lambda strategy: strategy.run(lambda: None)),
        ("reduce", lambda strategy: strategy.reduce("sum", 1)),
        ("gather", lambda strategy: strategy.gather(torch.ones(1), 0)),
        ("scope", lambda strategy: strategy.scope()),
        ("mirror", lambda strategy: strategy.mirror(torch.nn.Linear(1, 1))),
        ("variable", lambda strategy: strategy.variable(1.0)),
        ("distribute_dataset", lambda strategy: strategy.distribute_dataset([])),
        ("distribute_datasets_from_function", lambda strategy: strategy.distribute_datasets_from_function(iter)),
    ],
)
def test_a_cross_replica_method_inside_a_replica_says_what_to_do(
    method: str, call: Callable[[MirroredStrategy], Any], make_strategy: MakeStrategy
):
    strategy = make_strategy(2)
    with pytest.raises(UsageError, match=f"{method} is for all replicas together .*all_reduce, .all_gather"):
        strategy.run(lambda: call(strategy))
