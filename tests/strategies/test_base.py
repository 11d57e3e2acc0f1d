"""run, reduce, gather, local_results: structures in and out, and the errors of wrong use."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from tests.conftest import MakeStrategy, here
from torch import Tensor

from lockstep.collectives.per_replica import PerReplica
from lockstep.collectives.reduce import ReduceOp
from lockstep.data.dataset import InputContext
from lockstep.errors import ConfigError, UsageError


class Pair(NamedTuple):
    x: Any
    y: Any


def replica() -> int:
    return here().replica_id_in_sync_group


def test_run_calls_once_per_replica_and_unwraps_arguments(make_strategy: MakeStrategy):
    strategy = make_strategy(3)
    values, plain = PerReplica([1.5, 2.5, 3.5]), object()
    seen: dict[int, Any] = {}

    def step(a: Any, b: Any, *, c: Any, d: Any) -> None:
        seen[replica()] = (a, b, c, d)

    strategy.run(step, (values, [{"deep": (values,)}, plain]), {"c": Pair(values, plain), "d": plain})

    assert seen == {
        n: (n + 1.5, [{"deep": (n + 1.5,)}, plain], Pair(n + 1.5, plain), plain) for n in range(3)
    }  # fmt: skip


def test_run_returns_the_structure_with_per_replica_leaves(make_strategy: MakeStrategy):
    strategy = make_strategy(3)
    shared = torch.ones(1)

    def step() -> Any:
        return Pair({"number": replica() + 0.5, "none": None}, [shared, (torch.tensor(replica()),)])

    result = strategy.run(step)

    assert isinstance(result, Pair)
    assert list(result.x["number"]) == [0.5, 1.5, 2.5]
    assert result.x["none"] is None
    assert result.y[0] is shared
    assert [int(value) for value in result.y[1][0]] == [0, 1, 2]


def test_one_replica_s_results_come_back_bare(make_strategy: MakeStrategy):
    strategy = make_strategy(1)
    result = strategy.run(lambda x: {"doubled": 2 * x}, (PerReplica([torch.tensor(3)]),))
    assert int(result["doubled"]) == 6
    assert int(strategy.reduce("sum", result["doubled"])) == 6
    assert len(strategy.local_results(result["doubled"])) == 1


def test_args_may_be_a_list_and_may_be_left_out(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    assert strategy.run(lambda: None) is None
    assert strategy.run(lambda a: a, ["given"]) == "given"
    assert strategy.run(lambda *, a: a, kwargs={"a": "named"}) == "named"


@pytest.mark.parametrize("args", [torch.ones(2), 3, "ab", PerReplica([1, 2]), {"a": 1}])
def test_args_that_are_no_tuple_say_what_to_write(args: Any, make_strategy: MakeStrategy):
    with pytest.raises(TypeError, match=r"args must be a tuple or list .*got \w+; write args=\(x,\)"):
        make_strategy(2).run(lambda x: x, args)


def test_a_per_replica_of_another_strategy_is_refused(make_strategy: MakeStrategy):
    with pytest.raises(ConfigError, match="has 3 values, but the strategy has 2 replicas; make it with the same"):
        make_strategy(2).run(lambda x: x, (PerReplica([1, 2, 3]),))


@pytest.mark.parametrize("op", ["sum", "SUM", ReduceOp.SUM])
def test_reduce_looks_into_structures(op: Any, make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    value = {"a": PerReplica([torch.tensor(1.0), torch.tensor(2.0)]), "b": [PerReplica([1, 2]), 5]}
    assert strategy.reduce(op, value) == {"a": 3.0, "b": [3, 10]}  # a plain value counts once per replica


def test_reduce_along_an_axis_divides_sums_by_counts(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    for uneven in (PerReplica([[0.0], [1.0, 1.0]]), PerReplica([torch.tensor([0.0]), torch.tensor([1.0, 1.0])])):
        assert float(strategy.reduce("sum", uneven, axis=0)) == 2.0
        assert float(strategy.reduce("mean", uneven, axis=0)) == pytest.approx(2 / 3)
    assert strategy.reduce("mean", PerReplica([1, 2])) == 1.5
    assert strategy.reduce("mean", 4.0) == 4.0
    with pytest.raises(ConfigError, match="unknown reduction 'max'"):
        strategy.reduce("max", uneven)


def test_gather_and_local_results(make_strategy: MakeStrategy):
    strategy = make_strategy(3)
    uneven = PerReplica([torch.tensor([[1]]), torch.zeros(0, 1, dtype=torch.long), torch.tensor([[2], [3]])])

    assert strategy.gather(uneven, 0).tolist() == [[1], [2], [3]]
    assert strategy.gather({"rows": torch.ones(1)}, 0)["rows"].tolist() == [1, 1, 1]
    assert strategy.local_results(PerReplica([1, 2, 3])) == (1, 2, 3)
    assert strategy.local_results("plain") == ("plain",) * 3
    assert strategy.local_results({"a": PerReplica([1, 2, 3])}) == ({"a": 1}, {"a": 2}, {"a": 3})
    with pytest.raises(ConfigError, match="they may differ in that dimension only"):
        strategy.gather(PerReplica([torch.ones(1, 1), torch.ones(1, 2), torch.ones(1, 1)]), 0)


def test_a_dataset_through_the_strategy(make_strategy: MakeStrategy):
    strategy = make_strategy(3)
    dataset = strategy.distribute_dataset([torch.arange(4), torch.arange(4, 8)])
    rounds = [[shard.tolist() for shard in batch] for batch in dataset]
    assert rounds == [[[0, 1], [2], [3]], [[4, 5], [6], [7]]]
    lengths = [strategy.run(len, (batch,)) for batch in dataset]
    assert [list(strategy.local_results(length)) for length in lengths] == [[2, 1, 1]] * 2


def test_a_dataset_of_per_replica_batches(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    contexts: list[InputContext] = []

    def make(context: InputContext) -> list[Tensor]:
        contexts.append(context)
        size = context.get_per_replica_batch_size(4)
        return list(torch.arange(6).split(size))

    rounds = [[shard.tolist() for shard in batch] for batch in strategy.distribute_datasets_from_function(make)]

    assert rounds == [[[0, 1], [2, 3]], [[4, 5], []]]
    assert [context.num_replicas_in_sync for context in contexts] == [2]


def test_running_inside_a_replica_of_another_strategy_is_refused(make_strategy: MakeStrategy):
    first, second = make_strategy(2), make_strategy(2)
    with pytest.raises(UsageError, match="run is for all replicas together and was called inside one"):
        first.run(lambda: second.run(lambda: None))
