"""``gather_rows`` and ``row_numbers``: contrastive losses on replicas against hand-written loops on one device."""

from __future__ import annotations

import os
import warnings
from contextlib import closing
from functools import cache, partial
from typing import Any

import pytest
import torch
from tests.conftest import MakeStrategy, here
from tests.strategies.programs import contrastive
from torch import Tensor

import lockstep as ls
from lockstep.collectives.per_replica import PerReplica
from lockstep.errors import CollectiveError, ConfigError, UsageError

TOLERANCE = {"rtol": 0.0, "atol": 1e-12}  # in float64


def assert_alike(trained: tuple[Any, list[float]], name: str) -> None:
    weights, losses = contrastive.train_on_one_device(contrastive.LOSSES[name][0])
    assert losses == pytest.approx(trained[1], abs=1e-12)
    torch.testing.assert_close(trained[0], weights, **TOLERANCE)


@pytest.mark.parametrize("whole", [False, True], ids=["anchors", "whole"])
@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("name", contrastive.LOSSES)
def test_a_contrastive_loss_is_that_of_one_device(name: str, replicas: int, whole: bool, make_strategy: MakeStrategy):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of the watch: rows of the shard are compared with gathered ones
        assert_alike(contrastive.train(make_strategy(replicas), name, whole=whole), name)


@pytest.mark.parametrize("whole", [False, True], ids=["anchors", "whole"])
def test_a_replica_without_rows_leaves_out_its_module_and_takes_part(whole: bool, make_strategy: MakeStrategy):
    trained = contrastive.train(make_strategy(4), "CLIP", whole=whole, refuses_none=True)
    assert_alike(trained, "CLIP")


@pytest.mark.parametrize("whole", [False, True], ids=["anchors", "whole"])
@pytest.mark.parametrize("replicas", [1, 3])
def test_a_batch_that_is_encoded_in_chunks_has_the_whole_loss(replicas: int, whole: bool, make_strategy: MakeStrategy):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_alike(contrastive.train(make_strategy(replicas), "CLIP", whole=whole, chunk=2), "CLIP")


def test_a_loss_of_fit_may_gather_rows(make_strategy: MakeStrategy):
    class Pairs(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = contrastive.Encoder()

        def forward(self, both: Tensor) -> tuple[Tensor, Tensor]:
            return self.encoder(both[:, :6]), self.encoder(both[:, 6:])

    data = [(torch.cat([x, pairs], dim=1), labels) for x, pairs, labels in contrastive.batches() if len(x) > 2]
    alone = Pairs()
    optimizer = torch.optim.SGD(alone.parameters(), 0.5)
    for both, labels in data:
        contrastive.clip(*alone(both), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    strategy, module = make_strategy(3), Pairs()
    with strategy.scope():
        model = ls.Model(module)
        loss = lambda outputs, labels: contrastive.clip_of_shard(*outputs, labels)  # noqa: E731
        model.compile(optimizer=torch.optim.SGD(module.parameters(), 0.5), loss=loss)
        model.fit(data, verbose=0)
        torch.testing.assert_close(module.state_dict(), alone.state_dict(), **TOLERANCE)
        too_few = [tuple(tensor[:2] for tensor in data[0])]
        with pytest.raises(CollectiveError, match="did not meet at the same collective") as raised:
            model.fit(too_few, verbose=0)
    assert "make every batch of at least 3 rows" in "".join(raised.value.__notes__)


def test_rows_are_in_the_order_of_the_global_batch_and_numbered(make_strategy: MakeStrategy):
    shards = PerReplica([torch.arange(2), torch.arange(2, 2), torch.arange(2, 5)])

    def step(rows: Tensor) -> tuple[Any, Tensor]:
        return ls.gather_rows({"rows": rows, "even": [rows % 2 == 0]}), ls.row_numbers(rows)

    gathered, numbers = make_strategy(3).run(step, (shards,))
    assert [rows.tolist() for rows in gathered["rows"]] == [[0, 1, 2, 3, 4]] * 3
    assert [even.tolist() for even in gathered["even"][0]] == [[True, False, True, False, True]] * 3
    assert [rows.tolist() for rows in numbers] == [[0, 1], [], [2, 3, 4]]


def test_what_needs_no_gradient_anywhere_has_none(make_strategy: MakeStrategy):
    shards = PerReplica([torch.ones(2), torch.ones(1)])
    assert make_strategy(2).run(lambda rows: ls.gather_rows(rows).requires_grad, (shards,)) is False


def test_what_needs_a_gradient_in_one_replica_needs_it_in_all(make_strategy: MakeStrategy):
    shards = PerReplica([torch.ones(2, requires_grad=True), torch.ones(1)])

    def step(rows: Tensor) -> Tensor | None:
        (ls.gather_rows(rows) * (here().replica_id_in_sync_group + 1)).sum().backward()
        return rows.grad

    gradients = make_strategy(2).run(step, (shards,))
    assert gradients[0].tolist() == [3.0, 3.0]
    assert gradients[1] is None


def test_outside_a_scope_all_rows_are_there(make_strategy: MakeStrategy):
    rows = torch.ones(3, 2, requires_grad=True)
    assert ls.gather_rows(rows) is rows
    assert ls.row_numbers(rows).tolist() == [0, 1, 2]
    with make_strategy(2).scope():
        for function in (ls.gather_rows, ls.row_numbers):
            with pytest.raises(UsageError, match=f"{function.__name__} is about one replica's rows"):
                function(rows)
    with pytest.raises(ConfigError, match="without dimensions"):
        ls.row_numbers(torch.ones(()))


def test_a_loss_of_the_shard_alone_is_warned_of_by_this_name(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    encoder = contrastive.Encoder()
    model = strategy.mirror(encoder)
    optimizer = strategy.mirror(torch.optim.SGD(encoder.parameters(), 0.5))

    def step(x: Tensor, pairs: Tensor, labels: Tensor) -> None:
        losses = torch.nn.functional.cross_entropy(model(x) @ model(pairs).T, torch.arange(len(x)), reduction="none")
        ls.compute_average_loss(losses).backward()
        optimizer.step()
        optimizer.zero_grad()

    batches = strategy.distribute_dataset(contrastive.batches())
    with pytest.warns(UserWarning, match=r"combines the rows of its shard .*ls\.gather_rows"):
        [strategy.run(step, batch) for batch in batches]


WORKERS = (2, 1)
"""The replicas of each worker."""


def job(replicas: int | None) -> dict[str, Any]:
    cpu = ls.config.list_physical_devices("CPU")[0]
    ls.config.set_logical_device_configuration(cpu, [ls.config.LogicalDeviceConfiguration()] * 2)
    devices = [f"cpu:{number}" for number in range(WORKERS[int(os.environ["RANK"])])]
    with_deadline = ls.CommunicationOptions(lost_after_s=60)
    strategy = ls.MultiWorkerMirroredStrategy(devices, replicas=replicas, communication=with_deadline)
    trained = {
        (name, whole): contrastive.train(strategy, name, whole=whole)
        for name in contrastive.LOSSES
        for whole in (False, True)
    }
    strategy.close()
    return trained


@cache
def of_workers(replicas: int | None) -> dict[Any, Any]:
    return ls.launch(partial(job, replicas), workers=len(WORKERS), timeout_s=250)  # what the chief returns


@pytest.mark.workers
@pytest.mark.parametrize("whole", [False, True], ids=["anchors", "whole"])
@pytest.mark.parametrize("name", contrastive.LOSSES)
def test_workers_train_as_one_device(name: str, whole: bool):
    assert_alike(of_workers(None)[name, whole], name)


@pytest.mark.workers
def test_the_bits_are_those_of_any_layout_of_as_many_replicas(split_cpu: Any):
    """4 replicas on 2 workers with 2 and 1 devices, and in this process on 1, twice."""
    trained = of_workers(4)
    for _ in range(2):
        with closing(ls.MirroredStrategy(split_cpu(1), replicas=4)) as strategy:
            for name, whole in trained:
                weights, losses = contrastive.train(strategy, name, whole=whole)
                assert losses == trained[name, whole][1], name
                assert all(torch.equal(weights[key], value) for key, value in trained[name, whole][0].items()), name
