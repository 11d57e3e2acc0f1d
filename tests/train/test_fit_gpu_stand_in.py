"""fit on GPUs waits for nothing between steps, and tells late what on a CPU it tells at once. On stand-ins for GPUs."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.stand_in import StandInDriver, stand_in_gpus
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from lockstep.errors import NonFiniteLossError
from lockstep.replicas.device.host_syncs import HostSyncs
from lockstep.strategies.mirrored import MirroredStrategy
from lockstep.train.callbacks import progress
from lockstep.train.callbacks.base import Callback, LambdaCallback, Logs
from lockstep.train.callbacks.checkpoints import BackupAndRestore
from lockstep.train.logs import LazyLogs
from lockstep.train.model import Model

Batch = tuple[Any, ...]
cross_entropy = nn.CrossEntropyLoss(reduction="none")


def batches(steps: int = 6) -> list[Batch]:
    random = torch.Generator().manual_seed(0)
    x = [torch.randn(6, 4, generator=random) for _ in range(steps)]
    return [(each, torch.randint(0, 3, (6,), generator=random)) for each in x]


@contextmanager
def on_gpus(
    *, lags: bool = False, loss: Any = cross_entropy, optimizer: Any = None, **options: Any
) -> Iterator[tuple[Model, StandInDriver]]:
    """A small classifier on two shares of a stand-in."""
    with stand_in_gpus() as (devices, driver):
        driver.lags = lags
        strategy = MirroredStrategy(devices, seed=0)
        try:
            torch.manual_seed(0)
            module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
            with strategy.scope():
                model = Model(module)
                optimizer = optimizer or (lambda p: torch.optim.Adam(p, 1e-2))
                model.compile(optimizer=optimizer, loss=loss, **{"graphs": False, **options})
            yield model, driver
        finally:
            strategy.close()


class Between(Callback):
    """Notes at every batch what there was of ``count`` by then. It looks at no number."""

    def __init__(self, count: Callable[[], int]) -> None:
        super().__init__()
        self.counts: list[int] = []
        self._count = count

    def on_train_batch_begin(self, batch: int, logs: Logs) -> None:
        self.counts.append(self._count())


class Accuracy(MulticlassAccuracy):
    """Of chosen classes, which torchmetrics checks for being known ones; for that it reads."""

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        super().update(outputs.argmax(1), targets)


def accuracy() -> dict[str, Any]:
    return {"accuracy": Accuracy(3, average="micro")}


@pytest.mark.parametrize("graphs", [False, True])
def test_between_steps_nothing_is_waited_for_or_read(graphs: bool):
    with (
        on_gpus(metrics=accuracy(), clip_norm=1.0, accumulate=2, graphs=graphs) as (model, driver),
        HostSyncs() as reads,
    ):
        between = Between(lambda: driver.waits + len(reads.syncs))
        model.fit(batches(8), epochs=2, verbose=0, callbacks=[between])

    first = between.counts[2]  # the metric has looked at its first batch, and been asked no more to
    assert between.counts[2:8] == [first] * 6
    assert between.counts[10:] == [between.counts[8]] * 6  # the end of an epoch reads its loss
    assert driver.waits == 0


def mixed(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets) + 0.1 * outputs.square().mean()


@pytest.mark.filterwarnings("ignore:.*as long as no label is ignored:UserWarning")
@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(torch.ones(3)), mixed])
def test_a_loss_is_compared_with_its_parts_in_the_first_step_only(loss: Any):
    with on_gpus(loss=loss) as (model, driver), HostSyncs() as reads:
        between = Between(lambda: driver.waits + len(reads.syncs))
        model.fit(batches(4), verbose=0, callbacks=[between])
    assert between.counts[1] > between.counts[0]
    assert between.counts[1:] == [between.counts[1]] * 3


def test_a_mean_of_labels_beside_something_else_is_warned_of():
    with (
        on_gpus(loss=mixed) as (model, _),
        pytest.warns(UserWarning, match="'mixed' .* as long as no label is ignored"),
    ):
        model.fit(batches(2), verbose=0)


def test_a_device_that_lags_is_given_two_steps_and_then_waited_for():
    with on_gpus(lags=True) as (model, driver):
        between = Between(lambda: driver.waits)
        model.fit(batches(6), verbose=0, callbacks=[between])
    assert between.counts == [0, 0, 0, 1, 2, 3]
    assert driver.waits == 6


def test_a_loss_that_reads_is_named_by_operator_and_line():
    def reading(outputs: Tensor, targets: Tensor) -> Tensor:
        values: Tensor = cross_entropy(outputs, targets)
        return values * 1.0 if values.sum().item() else values

    with on_gpus(loss=reading) as (model, _), HostSyncs() as reads:
        model.fit(batches(2), verbose=0)

    line = f"test_fit_gpu_stand_in.py:{reading.__code__.co_firstlineno + 2} in reading"
    assert ("aten._local_scalar_dense", line) in reads.syncs


@pytest.mark.parametrize("lags", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_bad_batch_leaves_the_weights_before_it_and_is_named(accumulate: int, lags: bool):
    good, update = batches(8), {1: 3, 2: 4}[accumulate]  # the third batch is bad; its update
    bad = [(x * math.inf if number == 2 else x, y) for number, (x, y) in enumerate(good)]
    with on_gpus(accumulate=accumulate) as (model, _):
        model.fit(good[: update - accumulate], verbose=0)
        weights = [each.detach().clone() for each in model.module.parameters()]

    with on_gpus(accumulate=accumulate, lags=lags) as (model, _):
        steps: list[int] = []
        counted = LambdaCallback(on_train_batch_begin=lambda batch, logs: steps.append(batch))
        with pytest.raises(
            NonFiniteLossError, match=rf"epoch 1, step {update}: the loss is nan; the weights are those"
        ):
            model.fit(bad, verbose=0, callbacks=[counted])

        assert all(map(torch.equal, model.module.parameters(), weights))
        assert len(steps) == (update + 2 if lags else update)
        model.fit(good, verbose=0)
        assert not torch.equal(next(iter(model.module.parameters())), weights[0])


def test_a_bad_last_batch_is_told_at_the_end_of_the_epoch_and_before_a_backup(tmp_path: Path):
    good = batches(4)
    bad = [*good[:3], (good[3][0] * math.nan, good[3][1])]
    with on_gpus(lags=True) as (model, _):
        with pytest.raises(NonFiniteLossError, match="epoch 1, step 4: "):
            model.fit(bad, verbose=0)
        saved = tmp_path / "backup"
        with pytest.raises(NonFiniteLossError, match="epoch 1, step 4: "):
            model.fit(bad, verbose=0, callbacks=[BackupAndRestore(saved, save_freq=8)])
        assert not list(saved.glob("*"))


def test_the_numbers_are_those_of_a_fit_that_reads_them():
    def with_hook(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(parameters, 1e-2, fused=True)
        optimizer.register_step_post_hook(lambda *_: None)  # which has to know whether there was an update
        return optimizer

    found = []
    for optimizer in (with_hook, lambda p: torch.optim.AdamW(p, 1e-2)):
        seen: list[dict[str, float]] = []
        with on_gpus(metrics=accuracy(), clip_norm=0.1, optimizer=optimizer, lags=True) as (model, _):
            keep = LambdaCallback(on_train_batch_end=lambda batch, logs, seen=seen: seen.append(logs))
            history = model.fit(batches(5), validation_data=batches(2), epochs=2, verbose=0, callbacks=[keep])
            found.append(
                (history.history, list(map(dict, seen)), [each.tolist() for each in model.module.parameters()])
            )

    assert found[0] == found[1]
    assert set(found[0][1][0]) == {"loss", "accuracy"}


def test_who_looks_at_no_number_makes_nobody_wait_and_who_does_sees_plain_ones():
    looked: list[Any] = []

    class Looks(Callback):
        def on_train_batch_end(self, batch: int, logs: Logs) -> None:
            looked.append(logs if batch % 2 else json.loads(json.dumps(logs)))

    with on_gpus(metrics=accuracy(), lags=True) as (model, driver):
        between = Between(lambda: driver.waits)
        model.fit(batches(4), verbose=0, callbacks=[Looks(), between])

    assert between.counts[:2] == [0, 2]  # the loss and the accuracy of the first
    assert isinstance(looked[1], LazyLogs)
    assert {**looked[1]} == dict(looked[1].items()) == looked[1]
    assert looked[1]["loss"] == pytest.approx(looked[0]["loss"], rel=0.5)
    assert all(type(value) is float for logs in looked for value in logs.values())


def test_the_live_line_shows_what_has_arrived(monkeypatch: pytest.MonkeyPatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(progress._TerminalBar, "first_s", 0.0)
    monkeypatch.setattr(progress._TerminalBar, "every_s", 0.0)
    with on_gpus(metrics=accuracy(), lags=True) as (model, driver), redirect_stdout(Terminal()) as terminal:
        between = Between(lambda: driver.waits)
        model.fit(batches(6), callbacks=[between])

    assert between.counts == [0, 0, 0, 1, 2, 3]  # as without a line
    drawn = [line for line in terminal.getvalue().split("\r") if "/6 [" in line]
    assert ["loss" in line and "accuracy" in line for line in drawn] == [False] * 4 + [True] * 3


def test_an_evaluation_reads_at_its_end():
    with on_gpus(metrics=accuracy(), lags=True) as (model, driver):
        between: list[int] = []

        class Notes(Callback):
            def on_test_batch_begin(self, batch: int, logs: Logs) -> None:
                between.append(driver.waits)

        late = model.evaluate(batches(4), verbose=0, callbacks=[Notes()])
        driver.lags = False
        assert late == model.evaluate(batches(4), verbose=0)
    assert between == [0, 0, 0, 1]


def test_fp16_overflows_lower_the_scale_without_a_read_and_the_schedule_goes_on():
    with on_gpus(
        loss=lambda outputs, targets: outputs.float().square().sum(1) * 3e4,
        precision="fp16",
        optimizer=lambda p: torch.optim.SGD(p, 1e-7, momentum=0.9),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 1.0),
    ) as (model, driver):
        before = next(iter(model.module.parameters())).detach().clone()
        with HostSyncs() as reads:
            between = Between(lambda: driver.waits + len(reads.syncs))
            model.fit(batches(6), verbose=0, callbacks=[between])
        assert between.counts[1:] == [between.counts[1]] * 5
        assert torch.equal(next(iter(model.module.parameters())), before)
        model.fit(batches(6), epochs=3, verbose=0)

        assert not torch.equal(next(iter(model.module.parameters())), before)
        assert model._setup is not None
        assert model._setup.precision.scaler is not None
        assert model._setup.precision.scaler.get_scale() < 8192.0 / 2**6  # the first is 65536 over 6 rows, rounded down
        assert model.scheduler is not None
        assert model.scheduler.last_epoch == 24
