from __future__ import annotations

import copy
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric, MinMetric, PearsonCorrCoef, SumMetric
from torchmetrics.classification import (
    BinaryAUROC,
    MulticlassAccuracy,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
)
from torchmetrics.wrappers import ClasswiseWrapper, MinMaxMetric

from lockstep.collectives.communicator import SingleWorkerCommunicator
from lockstep.errors import ConfigError, UsageError
from lockstep.mirroring.metric import merge_metrics, merge_states, states_of
from lockstep.train.metrics import ReplicaMetrics, check_metrics


def replicas_of(metric: Metric, shards: list[tuple[Any, ...]]) -> list[Metric]:
    copies = [copy.deepcopy(metric) for _ in shards]
    for own, shard in zip(copies, shards, strict=True):
        if len(shard[0]):
            own.update(*shard)
    return copies


def merged_of(replicas: list[Metric]) -> Any:
    return merge_metrics(replicas, [states_of(metric) for metric in replicas])


def whole(metric: Metric, shards: list[tuple[Any, ...]]) -> Tensor:
    single = copy.deepcopy(metric)
    single.update(*(torch.cat(parts) for parts in zip(*shards, strict=True)))
    value: Tensor = single.compute()
    return value


def on_replicas(number: int, metrics: dict[str, Any]) -> ReplicaMetrics:
    device = SimpleNamespace(torch_device=torch.device("cpu"), kind="CPU", physical=SimpleNamespace(kind="CPU"))
    workers = SingleWorkerCommunicator(number)
    strategy: Any = SimpleNamespace(devices=[device] * number, workers=workers, computing_alike=nullcontext)
    return ReplicaMetrics(strategy, metrics)


def classes(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 4, generator=random), torch.randint(4, (rows,), generator=random)


CLASSES = [classes(5, 0), classes(5, 1), classes(2, 2), classes(0, 3)]
NUMBERS = [(torch.tensor([1.0, 9.0]),), (torch.tensor([4.0]),), (torch.tensor([]),)]
PAIRS = [(torch.randn(6), torch.randn(6)), (torch.randn(3), torch.randn(3)), (torch.randn(0), torch.randn(0))]


@pytest.mark.parametrize(
    ("metric", "shards"),
    [
        (MulticlassAccuracy(4, average="micro"), CLASSES),
        (MulticlassAccuracy(4, average="macro"), CLASSES),
        (MulticlassF1Score(4), CLASSES),
        (MulticlassConfusionMatrix(4), CLASSES),
        (MulticlassF1Score(4) + MulticlassAccuracy(4), CLASSES),
        (BinaryAUROC(), [(torch.rand(n), torch.arange(n) % 2) for n in (4, 3, 0)]),
        (SumMetric(), NUMBERS),
        (MeanMetric(), NUMBERS),
        (MaxMetric(), NUMBERS),
        (MinMetric(), NUMBERS),
        (CatMetric(), NUMBERS),
        (PearsonCorrCoef(), PAIRS),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Metric) else "",
)
def test_merged_replicas_give_the_value_over_all_rows(metric: Metric, shards: list[tuple[Any, ...]]):
    merged = merged_of(replicas_of(metric, shards))
    torch.testing.assert_close(merged.compute(), whole(metric, shards))


def test_the_average_of_the_replicas_would_be_another_number():
    replicas = replicas_of(MulticlassAccuracy(4, average="micro"), CLASSES[:3])
    average = torch.stack([metric.compute() for metric in replicas]).mean()
    assert not torch.isclose(average, merged_of(replicas).compute())


def test_merging_leaves_the_replicas_as_they_are():
    replicas = replicas_of(CatMetric(), NUMBERS)
    replicas[0].compute()  # a metric remembers what it computed; the merged one must not
    merged_of(replicas).compute()
    replicas[1].update(torch.tensor([5.0]))
    assert merged_of(replicas).compute().tolist() == [1.0, 9.0, 4.0, 5.0]
    assert replicas[0].compute().tolist() == [1.0, 9.0]


class _MeanState(Metric):
    value: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("value", torch.tensor(0.0), dist_reduce_fx="mean")

    def update(self, values: Tensor) -> None:
        self.value = self.value + values.mean()

    def compute(self) -> Tensor:
        return self.value


def test_a_replica_without_rows_does_not_pull_a_mean():
    replicas = replicas_of(_MeanState(), [(torch.tensor([4.0]),), (torch.tensor([]),), (torch.tensor([2.0]),)])
    assert float(merged_of(replicas).compute()) == 3.0


def test_the_first_replica_may_be_the_one_without_rows():
    replicas = replicas_of(MulticlassF1Score(4), [CLASSES[3], CLASSES[0], CLASSES[1]])
    torch.testing.assert_close(merged_of(replicas).compute(), whole(MulticlassF1Score(4), CLASSES[:2]))


def test_states_are_reduced_by_their_own_functions():
    states = [torch.tensor([1.0, 5.0]), torch.tensor([3.0, 2.0])]
    assert merge_states(states, None).tolist() == [[1.0, 5.0], [3.0, 2.0]]
    assert merge_states(states, lambda stacked: stacked.amax(0)).tolist() == [3.0, 5.0]
    assert merge_states([[torch.ones(2)], [], [torch.zeros(1)]], torch.cat).tolist() == [1.0, 1.0, 0.0]
    assert merge_states([[1], [2, 3]], None) == [1, 2, 3]
    assert merge_states([[], []], torch.cat) == []


def test_each_replica_has_its_own_copy_and_the_user_keeps_a_clean_one():
    given = SumMetric()
    metrics = on_replicas(2, {"sum": given})
    for number, own in enumerate(metrics.per_replica, start=1):
        own["sum"].update(torch.tensor(float(number)))
    assert metrics.compute() == {"sum": 3.0}
    assert not given.update_called


def test_reset_forgets_all_updates():
    metrics = on_replicas(2, {"sum": SumMetric()})
    metrics.per_replica[0]["sum"].update(torch.tensor(1.0))
    metrics.reset()
    metrics.per_replica[1]["sum"].update(torch.tensor(5.0))
    assert metrics.compute() == {"sum": 5.0}


def test_a_metric_that_computes_a_dict_gives_one_log_per_entry():
    metrics = on_replicas(2, {"accuracy": ClasswiseWrapper(MulticlassAccuracy(2, average=None), labels=["cat", "dog"])})
    for own in metrics.per_replica:
        own["accuracy"].update(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1]))
    assert metrics.compute() == {
        "accuracy_multiclassaccuracy_cat": 1.0,
        "accuracy_multiclassaccuracy_dog": 0.0,
    }


def test_a_metric_that_computes_a_vector_is_named():
    metrics = on_replicas(1, {"accuracy": MulticlassAccuracy(4, average=None)})
    metrics.per_replica[0]["accuracy"].update(*CLASSES[0])
    with pytest.raises(ConfigError, match=r"metric 'accuracy' computed a tensor of shape \(4,\); .* choose an average"):
        metrics.compute()


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"accuracy": lambda outputs, targets: 1.0}, "metric 'accuracy' is a function; give an instance"),
        ({"accuracy": MulticlassAccuracy}, "metric 'accuracy' is the class MulticlassAccuracy; give an instance"),
        ({"loss": SumMetric()}, "a metric is named 'loss'; choose"),
        ([SumMetric()], "metrics is a list; give a dict of name to torchmetrics Metric"),
    ],
)
def test_what_is_no_metric_is_named(metrics: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        check_metrics(metrics)


def test_a_wrapper_that_follows_the_values_is_for_one_replica():
    metrics = {"range": MinMaxMetric(MulticlassAccuracy(4))}
    on_replicas(1, metrics)
    with pytest.raises(UsageError, match="MinMaxMetric"):
        on_replicas(2, metrics)
