from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from tests.conftest import MakeStrategy, here

from lockstep.config import DeviceRegistry
from lockstep.errors import ConfigError, UsageError
from lockstep.replicas.context import get_replica_context
from lockstep.strategies.base import DefaultStrategy, get_strategy, has_strategy, in_cross_replica_context
from lockstep.strategies.mirrored import MirroredStrategy


def test_a_scope_makes_the_strategy_ambient_and_may_be_nested(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    with strategy.scope() as entered, strategy.scope():
        assert entered is strategy
        assert get_strategy() is strategy
        assert has_strategy()
        assert in_cross_replica_context()
        assert get_replica_context() is None
    assert not has_strategy()
    assert not in_cross_replica_context()


def test_the_object_of_a_scope_may_be_entered_many_times_and_inside_itself(make_strategy: MakeStrategy):
    strategy, other = make_strategy(2), make_strategy(2)
    scope = strategy.scope()
    for _ in range(2):
        with scope as entered, scope:
            with strategy.scope(), scope:
                pass
            assert entered is get_strategy() is strategy
            assert strategy.local_results(strategy.run(in_cross_replica_context)) == (False, False)
        assert not has_strategy()
    with pytest.raises(KeyError), scope, scope:
        raise KeyError
    with other.scope():
        with pytest.raises(UsageError, match="cannot be used inside the scope of"):
            scope.__enter__()
        assert get_strategy() is other
    assert not has_strategy()


def test_threads_enter_the_object_of_a_scope_each_for_itself(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    scope, seen, both_in = strategy.scope(), [], threading.Barrier(2)

    def enter() -> None:
        with scope:
            both_in.wait(10)
            seen.append(get_strategy() is strategy)
        both_in.wait(10)
        seen.append(has_strategy())

    threads = [threading.Thread(target=enter) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)

    assert sorted(seen) == [False, False, True, True]


def test_a_scope_inside_a_replica_is_refused(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    scope = strategy.scope()
    with pytest.raises(UsageError, match=r"outside strategy\.run"):
        strategy.run(scope.__enter__)
    with pytest.raises(UsageError, match=r"outside strategy\.run"):
        strategy.run(strategy.scope)
    assert not has_strategy()


def test_a_scope_ends_with_an_error(make_strategy: MakeStrategy):
    with pytest.raises(KeyError), make_strategy(2).scope():
        raise KeyError
    assert not has_strategy()


def test_another_strategy_in_a_scope_is_refused(make_strategy: MakeStrategy):
    outer, inner = make_strategy(2), make_strategy(3)
    with outer.scope():
        for use in (lambda: inner.scope().__enter__(), lambda: inner.run(lambda: None)):
            with pytest.raises(
                UsageError, match=r"MirroredStrategy\(\[cpu:0, cpu:1, cpu:2\]\) cannot be used inside .*"
            ):
                use()
        assert get_strategy() is outer


def test_a_scope_belongs_to_its_thread(make_strategy: MakeStrategy):
    seen = []
    with make_strategy(2).scope():
        thread = threading.Thread(target=lambda: seen.append(has_strategy()))
        thread.start()
        thread.join(10)
    assert seen == [False]


def test_outside_every_scope_one_device_in_the_caller_s_thread(fresh_devices: DeviceRegistry):
    strategy = DefaultStrategy()
    threads = []

    def step(x: torch.Tensor) -> torch.Tensor:
        threads.append(threading.get_ident())
        context = here()
        gathered = context.all_gather(context.all_reduce("sum", x), 0)
        return context.merge_call(lambda _strategy, value: value * 2, (gathered,))  # type: ignore[no-any-return]

    assert isinstance(get_strategy(), DefaultStrategy)
    assert get_strategy() is get_strategy()
    assert strategy.num_replicas_in_sync == 1
    assert strategy.run(step, (torch.ones(2),)).tolist() == [2, 2]
    assert threads == [threading.get_ident()]
    with pytest.raises(ValueError, match="its own"):
        strategy.run(lambda: (_ for _ in ()).throw(ValueError("its own")))
    assert not has_strategy()


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (["cpu:7"], r"unknown device 'cpu:7'; known: cpu:0, cpu:1, cpu:2, cpu:3"),
        (["cpu:1", "/cpu:1"], r"cpu:1 is named twice in \['cpu:1', '/cpu:1'\]"),
        ("cpu:0", r"devices is a list, got the string 'cpu:0'; write devices=\['cpu:0'\]"),
        ([], "devices is an empty list"),
    ],
)
def test_devices_that_cannot_be_used(devices: list[str], message: str, split_cpu: Callable[[int], object]):
    split_cpu(4)
    with pytest.raises(ConfigError, match=message):
        MirroredStrategy(devices)


def test_all_devices_by_default_and_picked_ones_in_the_order_given(split_cpu: Callable[[int], object]):
    split_cpu(3)
    everything, picked = MirroredStrategy(), MirroredStrategy(["cpu:2", "/cpu:0"])
    assert [device.name for device in everything.devices] == ["cpu:0", "cpu:1", "cpu:2"]
    assert repr(picked) == "MirroredStrategy([cpu:2, cpu:0])"
    assert picked.num_replicas_in_sync == 2
    everything.close()
    picked.close()


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan")])
def test_a_time_limit_is_above_zero(timeout_s: float, make_strategy: MakeStrategy):
    with pytest.raises(ConfigError, match="was given, expected a number of seconds above 0"):
        make_strategy(2, timeout_s=timeout_s)
