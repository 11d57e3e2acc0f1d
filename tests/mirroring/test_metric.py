"""Mirrored torchmetrics metrics against one plain metric that is fed the global batches."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.conftest import MakeStrategy, here
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.mirroring.metric import MirroredMetric

torchmetrics = pytest.importorskip("torchmetrics")
classification = pytest.importorskip("torchmetrics.classification")
regression = pytest.importorskip("torchmetrics.regression")

pytestmark = pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")

Batch = tuple[Tensor, Tensor]


def batches(kind: str, sizes: tuple[int, ...] = (10, 7, 2)) -> list[Batch]:
    """Batches whose sizes no number of replicas divides, and one that leaves a replica of three without rows."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for rows in sizes:
        scores, labels = torch.rand(rows, 4, generator=generator), torch.randint(4, (rows,), generator=generator)
        values = torch.randn(rows, generator=generator)
        found.append(
            {
                "classes": (scores.softmax(1), labels),
                "binary": (scores[:, 0], (labels > 1).long()),
                "numbers": (values + scores[:, 1], values),
                "two outputs": (torch.stack([values, scores[:, 0]], 1), scores[:, 1:3]),
                "one value": (values, scores[:, 0]),
            }[kind]
        )
    return found


class Deviation(torchmetrics.Metric):  # type: ignore[misc, name-defined]
    """With states of all kinds, one of them reduced by a function of its own."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("lowest", torch.tensor(torch.inf), dist_reduce_fx="min")
        self.add_state("highest", torch.tensor(-torch.inf), dist_reduce_fx="max")
        self.add_state("norm", torch.tensor(0.0), dist_reduce_fx=lambda norms: norms.square().sum(0).sqrt())
        self.add_state("seen", [], dist_reduce_fx="cat")

    def update(self, preds: Tensor, target: Tensor) -> None:
        self.total += (preds - target).abs().sum()
        self.count += len(preds)
        self.lowest = torch.minimum(self.lowest, preds.min())
        self.highest = torch.maximum(self.highest, preds.max())
        self.norm = (self.norm.square() + preds.square().sum()).sqrt()
        self.seen.append(preds)

    def compute(self) -> dict[str, Tensor]:
        seen = torchmetrics.utilities.data.dim_zero_cat(self.seen)
        return {
            "deviation": self.total / self.count,
            "spread": self.highest - self.lowest,
            "norm": self.norm,
            "order": seen[1:] - seen[:-1],
        }


METRICS: dict[str, tuple[Callable[[], Any], str]] = {
    "accuracy": (lambda: classification.MulticlassAccuracy(4), "classes"),
    "accuracy per class": (lambda: classification.MulticlassAccuracy(4, average=None), "classes"),
    "F1": (lambda: classification.MulticlassF1Score(4, average="macro"), "classes"),
    "confusion": (lambda: classification.MulticlassConfusionMatrix(4), "classes"),
    "AUROC": (lambda: classification.BinaryAUROC(), "binary"),
    "AUROC in bins": (lambda: classification.BinaryAUROC(thresholds=5), "binary"),
    "average precision": (lambda: classification.MulticlassAveragePrecision(4), "classes"),
    "squared error": (lambda: regression.MeanSquaredError(), "numbers"),
    "absolute error": (lambda: regression.MeanAbsoluteError(), "numbers"),
    "R2": (lambda: regression.R2Score(), "numbers"),
    "Pearson": (lambda: regression.PearsonCorrCoef(), "numbers"),
    "Pearson of two": (lambda: regression.PearsonCorrCoef(num_outputs=2), "two outputs"),
    "concordance": (lambda: regression.ConcordanceCorrCoef(), "numbers"),
    "Spearman": (lambda: regression.SpearmanCorrCoef(), "numbers"),
    "explained variance": (lambda: regression.ExplainedVariance(), "numbers"),
    "cosine": (lambda: regression.CosineSimilarity(), "two outputs"),
    "mean": (lambda: torchmetrics.MeanMetric(), "one value"),
    "sum": (lambda: torchmetrics.SumMetric(), "one value"),
    "max": (lambda: torchmetrics.MaxMetric(), "one value"),
    "min": (lambda: torchmetrics.MinMetric(), "one value"),
    "cat": (lambda: torchmetrics.CatMetric(), "one value"),
    "own": (Deviation, "numbers"),
    "sum of two": (lambda: regression.MeanSquaredError() + regression.MeanAbsoluteError(), "numbers"),
    "per class": (
        lambda: torchmetrics.wrappers.ClasswiseWrapper(classification.MulticlassAccuracy(4, average=None)),
        "classes",
    ),
    "of several outputs": (
        lambda: torchmetrics.wrappers.MultioutputWrapper(regression.MeanSquaredError(), 2),
        "two outputs",
    ),
    "collection": (
        lambda: torchmetrics.MetricCollection(
            {"p": classification.MulticlassPrecision(4), "r": classification.MulticlassRecall(4)}, prefix="val_"
        ),
        "classes",
    ),
    "collection in groups": (
        lambda: torchmetrics.MetricCollection(
            [classification.MulticlassPrecision(4), classification.MulticlassRecall(4)],
            compute_groups=[["MulticlassPrecision", "MulticlassRecall"]],
        ),
        "classes",
    ),
}


def update(metric: Any, preds: Tensor, target: Tensor) -> None:
    if isinstance(metric, (torchmetrics.aggregation.BaseAggregator,)) or "value" in weighted(metric):
        metric.update(preds)
    else:
        metric.update(preds, target)


def weighted(metric: Any) -> tuple[str, ...]:
    plain = metric.copies[0] if isinstance(metric, MirroredMetric) else metric
    return ("value",) if isinstance(plain, torchmetrics.aggregation.BaseAggregator) else ()


@pytest.mark.parametrize("name", METRICS)
def test_it_computes_the_number_of_one_device(name: str, make_strategy: MakeStrategy):
    make, kind = METRICS[name]
    plain, strategy = make(), make_strategy(3)
    mirrored = strategy.mirror(make())

    def step(batch: Batch) -> Any:
        update(mirrored, *batch)
        return mirrored.compute()

    for epoch in range(2):
        data = batches(kind)[epoch:]
        for batch, shards in zip(data, strategy.distribute_dataset(data), strict=True):
            update(plain, *batch)
            for inside in strategy.local_results(strategy.run(step, args=(shards,))):
                torch.testing.assert_close(inside, plain.compute())
            torch.testing.assert_close(mirrored.compute(), plain.compute())
        plain.reset()
        mirrored.reset()


def test_a_call_counts_and_updates_outside_count_once(make_strategy: MakeStrategy):
    plain, strategy = regression.MeanSquaredError(), make_strategy(2)
    mirrored = strategy.mirror(regression.MeanSquaredError())
    data = batches("numbers")
    for batch, shards in zip(data, strategy.distribute_dataset(data), strict=True):
        plain.update(*batch)
        strategy.run(lambda shard: mirrored(*shard), args=(shards,))
    plain.update(*data[0])
    assert torch.equal(mirrored(*data[0]), regression.MeanSquaredError()(*data[0]))

    torch.testing.assert_close(mirrored.compute(), plain.compute())
    torch.testing.assert_close(mirrored.sum_squared_error, plain.sum_squared_error)
    assert mirrored.total == plain.total
    torch.testing.assert_close(mirrored.clone().compute(), plain.compute())
    assert mirrored.higher_is_better is plain.higher_is_better


def test_what_was_counted_before_is_counted_once(make_strategy: MakeStrategy):
    data = batches("classes")
    for make in (METRICS["accuracy"][0], METRICS["collection"][0]):
        plain, before, strategy = make(), make(), make_strategy(3)
        for metric in (plain, before):
            metric.update(*data[0])
        mirrored = strategy.mirror(before)
        assert strategy.mirror(before) is mirrored is strategy.mirror(mirrored)
        for shards in strategy.distribute_dataset(data[1:2]):
            strategy.run(lambda shard, mirrored=mirrored: mirrored.update(*shard), args=(shards,))
        plain.update(*data[1])

        torch.testing.assert_close(mirrored.compute(), plain.compute())


def test_the_plain_metric_leads_to_the_mirrored_one(make_strategy: MakeStrategy):
    strategy, plain, data = make_strategy(2), METRICS["collection"][0](), batches("classes")
    given = METRICS["collection"][0]()
    strategy.mirror(given)
    for batch, shards in zip(data, strategy.distribute_dataset(data), strict=True):
        plain.update(*batch)
        strategy.run(lambda shard: given.update(*shard), args=(shards,))

    torch.testing.assert_close(given.compute(), plain.compute())
    torch.testing.assert_close(given["p"].compute(), plain["p"].compute())
    given.reset()
    given.update(*data[0])
    torch.testing.assert_close(given.compute(), METRICS["collection"][0]()(*data[0]))
    with pytest.raises(UsageError, match="clone"):
        copy.deepcopy(given)
    with pytest.raises(UsageError, match="another strategy"):
        make_strategy(2).mirror(given)


def test_metrics_of_a_collection_are_found_by_name(make_strategy: MakeStrategy):
    strategy, plain, data = make_strategy(2), METRICS["collection"][0](), batches("classes")
    mirrored: Any = strategy.mirror(METRICS["collection"][0]())
    plain.update(*data[0])
    for shards in strategy.distribute_dataset(data[:1]):
        strategy.run(lambda shard: [metric.update(*shard) for metric in mirrored.values()], args=(shards,))

    assert [name for name, _ in mirrored.items()] == [name for name, _ in plain.items()]
    assert len(mirrored) == len(plain)
    assert list(mirrored) == list(plain)
    for name, metric in plain.items():
        torch.testing.assert_close(mirrored[name].compute(), metric.compute())
    torch.testing.assert_close(mirrored.r.compute(), plain["r"].compute())
    mirrored["p"].reset()
    assert int(mirrored.p.tp.sum()) == 0
    assert mirrored


def test_a_metric_inside_a_module_is_mirrored_with_it(make_strategy: MakeStrategy):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(4, 4)
            self.metrics = nn.ModuleDict({"accuracy": classification.MulticlassAccuracy(4)})

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            outputs: Tensor = self.linear(x)
            self.metrics["accuracy"].update(outputs.detach(), labels)
            return outputs

    plain, net, strategy, data = Net(), Net(), make_strategy(3), batches("classes")
    mirrored = strategy.mirror(net)
    for batch, shards in zip(data, strategy.distribute_dataset(data), strict=True):
        plain(*batch)
        strategy.run(lambda shard: mirrored(*shard), args=(shards,))

    expected = plain.metrics["accuracy"].compute()  # type: ignore[operator]
    assert torch.equal(mirrored.metrics["accuracy"].compute(), expected)
    assert torch.equal(net.metrics["accuracy"].compute(), expected)  # type: ignore[operator]
    assert mirrored.state_dict().keys() == plain.state_dict().keys()


def test_a_metric_that_a_module_calls_in_its_forward_is_merged(make_strategy: MakeStrategy):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.accuracy = classification.MulticlassAccuracy(4)

        def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
            self.accuracy(outputs, labels)
            return outputs

    plain, strategy, data = Net(), make_strategy(3), batches("classes")
    mirrored = strategy.mirror(Net())
    for batch, shards in zip(data, strategy.distribute_dataset(data), strict=True):
        plain(*batch)
        strategy.run(lambda shard: mirrored(*shard), args=(shards,))

    assert torch.equal(mirrored.accuracy.compute(), plain.accuracy.compute())


def test_persistent_states_are_saved_merged_and_loaded(make_strategy: MakeStrategy):
    strategy, data = make_strategy(2), batches("numbers")
    plain, given = regression.MeanSquaredError(), regression.MeanSquaredError()
    mirrored = strategy.mirror(given)
    for metric in (plain, mirrored):
        metric.persistent(True)
    plain.update(*data[0])
    for shards in strategy.distribute_dataset(data[:1]):
        strategy.run(lambda shard: mirrored.update(*shard), args=(shards,))
    state = mirrored.state_dict()
    torch.testing.assert_close(state, plain.state_dict())

    other = strategy.mirror(regression.MeanSquaredError())
    other.persistent(True)
    other.load_state_dict(state)
    fresh = regression.MeanSquaredError()
    fresh.persistent(True)
    fresh.load_state_dict(plain.state_dict())
    assert torch.equal(other.state_dict()["total"], fresh.state_dict()["total"])
    torch.testing.assert_close(other.sum_squared_error, fresh.sum_squared_error)


def test_settings_reach_all_copies(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    mirrored: Any = strategy.mirror(classification.MulticlassAccuracy(4))
    mirrored.validate_args = False

    assert [each.validate_args for each in mirrored.copies] == [False, False]
    with pytest.raises(UsageError, match="tp"):
        mirrored.tp = torch.ones(4)
    with pytest.raises(UsageError, match="merge_state"):
        mirrored.merge_state({})
    with pytest.raises(UsageError, match="load_state_dict"):
        strategy.run(lambda: mirrored.load_state_dict({}))
    with pytest.raises(UsageError, match="another strategy"):
        make_strategy(2).run(mirrored.compute)


@pytest.mark.parametrize("use", ["update", "call"])
@pytest.mark.parametrize("name", ["accuracy", "mean", "cat", "own", "Pearson", "collection", "per class"])
def test_a_plain_metric_of_all_replicas_is_refused(name: str, use: str, make_strategy: MakeStrategy):
    make, kind = METRICS[name]
    strategy, metric = make_strategy(2), make()

    def step(batch: Batch) -> None:
        arguments = batch[:1] if weighted(metric) else batch
        (metric.update if use == "update" else metric)(*arguments)

    for shards in strategy.distribute_dataset(batches(kind)[:1]):
        with pytest.raises(UsageError, match=r"strategy\.mirror"):
            strategy.run(step, args=(shards,))


def test_a_plain_metric_of_one_replica_is_its_own_business(make_strategy: MakeStrategy):
    strategy, data = make_strategy(2), batches("classes")
    metric, plain = METRICS["accuracy"][0](), METRICS["accuracy"][0]()

    def step(batch: Batch) -> None:
        context = here()
        scores, labels = (context.all_gather(each, 0) for each in batch)
        if context.replica_id_in_sync_group == 0:
            metric.update(scores, labels)

    for batch, shards in zip(data, strategy.distribute_dataset(data), strict=True):
        plain.update(*batch)
        strategy.run(step, args=(shards,))

    assert torch.equal(metric.compute(), plain.compute())


def test_wrappers_that_follow_the_values_are_refused(make_strategy: MakeStrategy):
    for wrapper in (
        torchmetrics.wrappers.MinMaxMetric(torchmetrics.MeanMetric()),
        torchmetrics.wrappers.Running(torchmetrics.MeanMetric(), 2),
        torchmetrics.wrappers.MetricTracker(regression.MeanSquaredError()),
        torchmetrics.MetricCollection({"a": torchmetrics.wrappers.MinMaxMetric(torchmetrics.MeanMetric())}),
    ):
        with pytest.raises(UsageError, match="mirror the metric inside"):
            make_strategy(2).mirror(wrapper)


class Forgetful(torchmetrics.Metric):  # type: ignore[misc, name-defined]
    """Its author has not thought of several processes."""

    def __init__(self, reduction: str | None, attribute: bool) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx=reduction)
        self.attribute = attribute
        self.rows = 0

    def update(self, values: Tensor) -> None:
        self.total += values.sum()
        if self.attribute:
            self.rows += len(values)

    def compute(self) -> Tensor:
        return self.total / max(self.rows, 1)


def test_what_cannot_be_merged_is_refused_or_said(make_strategy: MakeStrategy):
    strategy = make_strategy(2)
    values = batches("one value")[1][0]

    def fed(metric: Any) -> Any:
        mirrored = strategy.mirror(metric)
        for shards in strategy.distribute_dataset([values]):
            strategy.run(mirrored.update, args=(shards,))
        return mirrored

    with pytest.raises(UsageError, match=r"rows.*add_state"):
        fed(Forgetful("sum", attribute=True)).compute()
    with pytest.raises(UsageError, match=r"total.*dist_reduce_fx"):
        fed(Forgetful(None, attribute=False)).compute()
    with pytest.warns(UserWarning, match=r"total.*dist_reduce_fx"):
        fed(Forgetful("mean", attribute=False)).compute()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.allclose(fed(Forgetful("sum", attribute=False)).compute(), values.sum())


def test_a_plain_metric_that_several_replicas_update_is_refused_in_the_first_step_and_later(
    make_strategy: MakeStrategy,
):
    plain, strategy = regression.MeanSquaredError(), make_strategy(2)
    module = strategy.mirror(torch.nn.Linear(4, 1))
    update = False

    def step(x: torch.Tensor) -> None:
        with torch.no_grad():
            outputs = module(x)
            if update:
                plain.update(outputs, x[:, :1])

    for update in (True, False, True):  # the rows of the first steps are followed, which adds frames to every call
        for batch in strategy.distribute_dataset([torch.ones(4, 4)] * (12 if not update else 1)):
            if update:
                with pytest.raises(UsageError, match="both update one MeanSquaredError"):
                    strategy.run(step, (batch,))
            else:
                strategy.run(step, (batch,))
