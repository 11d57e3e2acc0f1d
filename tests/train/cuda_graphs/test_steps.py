"""Trainings whose steps are recorded and replayed come out as those whose steps are not, bit for bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests import oracle
from tests.train.cuda_graphs.conftest import Net, Train, adam, alike, batches, halving
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

from lockstep.errors import NonFiniteLossError
from lockstep.train.callbacks.base import Callback, Logs


@pytest.mark.parametrize("shares", [(2048, 2048), None], ids=["own weights", "one replica"])
def test_dropout_and_a_schedule_and_adams_counters_and_batch_statistics_go_on(
    train: Train, shares: tuple[int, ...] | None
) -> None:
    torch.manual_seed(0)
    net = Net(dropout=0.4, norm=True)
    # The second keeps the outputs of all steps, which the next replay must not write to.
    metrics = {"accuracy": MulticlassAccuracy(num_classes=3), "auroc": MulticlassAUROC(num_classes=3, thresholds=None)}
    settings: dict[str, Any] = {"scheduler": halving, "clip_norm": 0.5, "metrics": metrics, "shares": shares}

    plain = train(net, batches(48), graphs=False, **settings)
    recorded = train(net, batches(48), **settings)

    assert plain.replays == []
    # 6 steps an epoch. The first epoch: one as it is, two looked at, then replays; the second: one looked at.
    assert recorded.replays == [3 + 5]
    assert recorded.reasons == []
    assert alike(plain, recorded)
    assert recorded.driver.waits == plain.driver.waits


def test_a_short_last_batch_is_recorded_when_it_has_come_often_enough(train: Train, net: Net) -> None:
    data = batches(8 * 3 + 5, weights=True)
    plain = train(net, data, graphs=False, epochs=5)
    recorded = train(net, data, epochs=5)
    # Of the whole batches the first three are not replays, and after that the first of each epoch; of the short ones
    # the first three are not.
    assert recorded.replays == [2 * 4, 2]
    assert alike(plain, recorded)


def test_the_numbers_are_those_of_a_loop_by_hand_on_one_device(train: Train, net: Net) -> None:
    data = batches(8 * 4 + 3, weights=True)
    recorded = train(net, data, epochs=2, scheduler=halving, clip_norm=1.0)
    assert sum(recorded.replays) > 2
    loss = nn.CrossEntropyLoss(reduction="none")
    oracle.train(net, data, adam, loss, epochs=2, scheduler=halving, clip_norm=1.0)
    oracle.assert_close(recorded.weights, net, 2e-5)


@pytest.mark.parametrize("recorded", [False, True])
def test_the_true_denominators_of_a_mean_are_recorded_too(train: Train, net: Net, recorded: bool) -> None:
    """Labels that do not count are spread unevenly over the replicas and the steps."""
    criterion = nn.CrossEntropyLoss(torch.tensor([0.2, 3.0, 1.0]))
    data = [
        (x, torch.where(torch.arange(len(y)) < step % 6, -100, y)) for step, (x, y) in enumerate(batches(8 * 6 + 3))
    ]
    trained = train(net, data, epochs=2, loss=criterion, graphs=recorded)
    assert (sum(trained.replays) > 2) == recorded

    oracle.train(net, data, adam, criterion, epochs=2)
    oracle.assert_close(trained.weights, net, 2e-5)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd(train: Train, net: Net, momentum: float) -> None:
    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, 2**-3, momentum=momentum, weight_decay=2**-6, nesterov=momentum > 0)

    plain = train(net, batches(), optimizer=sgd, scheduler=halving, graphs=False)
    recorded = train(net, batches(), optimizer=sgd, scheduler=halving)
    assert sum(recorded.replays) == 1 + 3
    assert alike(plain, recorded)


def test_a_loss_that_is_no_number_leaves_the_weights_of_the_last_good_update(train: Train, net: Net) -> None:
    data = batches(64)
    data[5][0][0, 0] = math.nan
    kept: list[dict[str, Tensor]] = []

    class Keep(Callback):
        def on_train_begin(self, logs: Logs | None = None) -> None:
            kept.append(self.model.module.state_dict())

    for graphs in (False, True):
        with pytest.raises(NonFiniteLossError, match="epoch 1, step 6: the loss is nan"):
            train(net, data, epochs=1, graphs=graphs, callbacks=[Keep()])
    plain, recorded = kept
    assert all(torch.equal(plain[name], recorded[name]) for name in plain)
    assert not torch.equal(recorded["inner.weight"], net.inner.weight)


@pytest.mark.parametrize(
    "of", [torch.backends.cuda.matmul, torch.backends.cudnn.conv], ids=["products", "convolutions"]
)
def test_a_precision_by_torch_s_newer_names_is_a_setting_like_any(train: Train, net: Net, of: Any) -> None:
    before = of.fp32_precision
    chosen = "ieee" if before == "tf32" else "tf32"

    class Changing(Callback):
        def on_train_batch_end(self, batch: int, logs: Logs) -> None:
            of.fp32_precision = before if batch == 3 else chosen

    of.fp32_precision = chosen  # with it torch's older names raise errors
    try:
        assert train(net, batches(48)).replays == [3 + 5]
        assert len(train(net, batches(48), callbacks=[Changing()]).replays) > 1
    finally:
        of.fp32_precision = before


def test_where_tensors_are_double_the_device_still_decides_and_reads_its_rates_in_float32(train: Train) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        net, data = Net(), [(x.double(), y) for x, y in batches(48)]
        plain, recorded = (train(net, data, graphs=graphs, scheduler=halving) for graphs in (False, True))
    finally:
        torch.set_default_dtype(torch.float32)
    assert recorded.replays == [3 + 5]
    assert alike(plain, recorded)
