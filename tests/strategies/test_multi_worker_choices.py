"""Workers that are unlike, and what they may choose: two replicas on one and one on the other, bf16, own pipelines.

One job of two workers computes everything, one strategy after the other; the tests look at what its chief returned.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests import oracle
from torch import Tensor, nn

import lockstep as ls

pytestmark = [pytest.mark.workers, pytest.mark.slow]

SIZES = (9, 8, 1, 5, 2, 4)  # the small ones leave replicas, and a whole worker, without rows
REPLICAS = (2, 1)
TIMEOUT_S = 2.0  # long enough to hear twice from the others
Batch = tuple[Tensor, Tensor]


def batches() -> list[Batch]:
    random = torch.Generator().manual_seed(0)
    return [
        (torch.randn(rows, 4, generator=random, dtype=torch.float64), torch.randint(3, (rows,), generator=random))
        for rows in SIZES
    ]


def net(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


# What every worker runs.


def run_job() -> dict[str, Any]:
    torch.set_num_threads(1)
    (cpu,) = ls.config.list_physical_devices("CPU")
    worker = int(os.environ["RANK"])
    ls.config.set_logical_device_configuration(cpu, [ls.config.LogicalDeviceConfiguration()] * REPLICAS[worker])
    with closing(strategy_with()) as strategy:
        results = {
            "uneven": trained(strategy),
            "uneven evaluate": evaluated(strategy),
            "plain": first_gradients(strategy),
            "pipelines": pipelines(strategy),
        }
    with closing(strategy_with(compression="bf16")) as strategy:
        results["bf16"] = first_gradients(strategy)
        results["bf16 loop"] = trained(strategy, torch.float32)
        weights = torch.cat([value.flatten() for value in results["bf16 loop"][0].values()])
        everyones = strategy.workers.all_gather_bytes("weights", weights.numpy().tobytes())
        results["bf16 alike"] = len(set(everyones)) == 1
        results["bf16 integers"] = strategy.reduce("sum", 2**24 + 1)
    with closing(strategy_with()) as strategy:
        results["sparse"] = refused(lambda: sparse_step(strategy))
    with closing(strategy_with(timeout_s=TIMEOUT_S, lost_after_s=15.0)) as strategy:
        results["timeout"] = refused(lambda: one_does_not_come(strategy))
    return results


def strategy_with(**options: Any) -> ls.MultiWorkerMirroredStrategy:
    communication = ls.CommunicationOptions(**{"bucket_mb": 0.0005, "lost_after_s": 60.0, **options})
    return ls.MultiWorkerMirroredStrategy(seed=7, communication=communication)


def refused(act: Any) -> str:
    """The type of the error, and what it says."""
    try:
        act()
    except Exception as error:  # noqa: BLE001  the test looks at it
        return f"{type(error).__name__}: {error}"
    return ""


def trained(
    strategy: ls.Strategy, dtype: torch.dtype = torch.float64
) -> tuple[dict[str, Tensor], list[float], list[list[int]]]:
    module = net(dtype)
    replicated = strategy.mirror(module)
    optimizer = strategy.mirror(torch.optim.AdamW(module.parameters(), 0.05))

    def step(batch: Batch, rows: int) -> tuple[Tensor, Tensor]:
        x, y = batch
        outputs = replicated(x.to(dtype))
        loss = ls.compute_average_loss(F.cross_entropy(outputs, y, reduction="none"), global_batch_size=rows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), torch.tensor([len(x)])

    losses, shards = [], []
    for batch, (x, _) in zip(strategy.distribute_dataset(batches()), batches(), strict=True):
        loss, rows = strategy.run(step, (batch, len(x)))
        losses.append(strategy.reduce("sum", loss).item())
        shards.append(strategy.gather(rows, axis=0).tolist())
    return {name: value.clone() for name, value in module.state_dict().items()}, losses, shards


def evaluated(strategy: ls.Strategy) -> tuple[dict[str, float], Tensor]:
    with strategy.scope():
        model = ls.Model(net())
        model.compile(loss=lambda outputs, y: F.cross_entropy(outputs, y, reduction="none"))
        return model.evaluate(batches(), verbose=0), model.predict([x for x, _ in batches()])


class Both(nn.Module):
    """Gradients, in single and in double precision, that bfloat16 cannot hold."""

    VALUES = torch.tensor([1 / 3, 1 / 7, 1000.1])

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Parameter(torch.zeros(3))
        self.wide = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self) -> Tensor:
        return (self.narrow * self.VALUES).sum() + (self.wide * self.VALUES.double()).sum()


def first_gradients(strategy: ls.Strategy) -> dict[str, Tensor]:
    """Summed over all replicas."""
    module = Both()
    replicated = strategy.mirror(module)
    optimizer = strategy.mirror(torch.optim.SGD(module.parameters(), 1.0))

    def update() -> None:
        replicated().backward()
        optimizer.step()

    strategy.run(update)
    return {name: -value.detach().clone() for name, value in module.named_parameters()}


def pipelines(strategy: ls.Strategy) -> list[list[list[int]]]:
    """The batches of all replicas, step by step: worker 0 numbers its own from 0, worker 1 from 100."""

    def make(context: ls.InputContext) -> Iterator[Tensor]:
        assert (context.num_input_pipelines, context.num_replicas_in_sync) == (2, 3)
        start = 100 * context.input_pipeline_id
        rows = context.get_per_replica_batch_size(6)
        steps = 2 * len(strategy.devices)
        return iter([start + rows * index + torch.arange(rows) for index in range(steps)])

    dataset = strategy.distribute_datasets_from_function(make)
    return [strategy.gather(batch, axis=0).tolist() for batch in dataset]


def sparse_step(strategy: ls.Strategy) -> None:
    module = nn.Embedding(5, 2, sparse=True)
    replicated = strategy.mirror(module)
    optimizer = strategy.mirror(torch.optim.SGD(module.parameters(), 0.1))

    def step() -> None:
        replicated(torch.tensor([1, 3])).sum().backward()
        optimizer.step()

    strategy.run(step)


def one_does_not_come(strategy: ls.Strategy) -> None:
    if strategy.workers.is_chief:
        strategy.reduce("sum", 1.0)
        return
    strategy.workers.set_status("a walk in the park")
    with suppress(ls.errors.ClusterError):  # when the chief has given up
        strategy.workers.membership.run_with_watchdog(lambda: torch.multiprocessing.Event().wait(), "the park")


# What the chief returned.


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return ls.launch(run_job, workers=2, timeout_s=120)


def on_one_device(dtype: torch.dtype = torch.float64) -> oracle.Training:
    data = [(x.to(dtype), y) for x, y in batches()]
    return oracle.train(net(dtype), data, lambda parameters: torch.optim.AdamW(parameters, 0.05))


def test_workers_of_two_replicas_and_of_one_train_like_one_device(result: dict[str, Any]):
    expected = on_one_device()
    oracle.assert_close(result["uneven"][1], expected.losses)
    oracle.assert_close(result["uneven"][0], expected.module)


def test_all_replicas_have_equal_shards_whatever_worker_they_are_of(result: dict[str, Any]):
    assert result["uneven"][2] == [[3, 3, 3], [3, 3, 2], [1, 0, 0], [2, 2, 1], [1, 1, 0], [2, 1, 1]]


def test_workers_of_two_replicas_and_of_one_evaluate_and_predict_like_one_device(result: dict[str, Any]):
    logs, outputs = result["uneven evaluate"]
    x, y = torch.cat([x for x, _ in batches()]), torch.cat([y for _, y in batches()])
    expected = net()(x).detach()
    torch.testing.assert_close(outputs, expected, rtol=1e-9, atol=1e-9)
    assert logs["loss"] == pytest.approx(F.cross_entropy(expected, y).item(), abs=1e-9)


def test_bf16_is_close_to_what_is_sent_as_it_is_and_rounds_nothing_but_floats_of_single_precision(result):
    values = Both.VALUES
    torch.testing.assert_close(result["plain"]["narrow"], 3 * values)
    torch.testing.assert_close(result["bf16"]["narrow"], 3 * values, rtol=2**-7, atol=0)
    assert not torch.allclose(result["bf16"]["narrow"], 3 * values, rtol=2**-14)
    assert torch.equal(result["bf16"]["wide"], result["plain"]["wide"])
    assert result["bf16 integers"] == 3 * (2**24 + 1)


def test_bf16_trains_nearly_the_same_and_leaves_the_same_bits_on_all_workers(result: dict[str, Any]):
    expected = on_one_device(torch.float32)
    assert result["bf16 alike"]
    torch.testing.assert_close(result["bf16 loop"][1], expected.losses, rtol=0.02, atol=0.02)
    weights = expected.module.state_dict()
    assert any(not torch.equal(result["bf16 loop"][0][name], weight) for name, weight in weights.items())


def test_every_worker_s_function_gives_its_own_replicas_their_batches(result: dict[str, Any]):
    assert result["pipelines"] == [[0, 1, 2, 3, 100, 101], [4, 5, 6, 7, 102, 103]]


def test_sparse_gradients_are_refused_in_one_line(result: dict[str, Any]):
    said = "a parameter of shape (5, 2) has a sparse gradient, and gradients travel dense between workers; make its"
    assert said in result["sparse"]
    assert result["sparse"].startswith(("UsageError", "ClusterError"))  # its own, or that of the other worker


def test_a_worker_that_does_not_come_is_named_when_the_time_is_over(result: dict[str, Any]):
    assert result["timeout"].startswith(f"CollectiveError: nothing came for {TIMEOUT_S:g} s in reduce(sum)")
    assert "worker 1 (" in result["timeout"]
    assert "was last in a walk in the park" in result["timeout"]
