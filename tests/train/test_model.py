from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.oracle import assert_close, conv_net, images, sgd, train
from tests.train.conftest import MakeStrategy, compiled, equal, weights
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics.regression import MeanSquaredError

from lockstep.config import DeviceRegistry
from lockstep.errors import CheckpointError
from lockstep.train.callbacks import LambdaCallback
from lockstep.train.model import Model

Batches = list[tuple[Tensor, Tensor]]


def stop_at_first_batch(error: BaseException) -> LambdaCallback:
    def stop(batch: int, logs: Any) -> None:
        raise error

    return LambdaCallback(on_train_batch_end=stop)


def test_fit_trains_the_users_own_module_and_keeps_a_record(model: Model, batches: Batches):
    before = copy.deepcopy(model.module)

    history = model.fit(batches, validation_data=batches[:1], epochs=3, verbose=0)

    assert list(history.history) == ["loss", "val_loss", "learning_rate"]
    assert [len(values) for values in history.history.values()] == [3, 3, 3]
    assert history.history["learning_rate"] == [0.05] * 3
    assert history.history["loss"][2] < history.history["loss"][0]
    assert history.epoch == [0, 1, 2]
    assert [(timing.steps, timing.examples) for timing in history.timing] == [(3, 10)] * 3
    assert model.history is history
    assert not torch.equal(model.module.weight, before.weight)


def test_without_a_scope_there_is_one_device(fresh_devices: DeviceRegistry, batches: Batches):
    module = nn.Linear(3, 1)
    model = Model(module)
    model.compile(optimizer=torch.optim.SGD(module.parameters(), 0.05), loss=nn.functional.mse_loss)
    history = model.fit(batches, epochs=2, verbose=0)
    assert model.strategy.num_replicas_in_sync == 1
    assert history.history["loss"][1] < history.history["loss"][0]


def test_the_loss_is_the_mean_over_all_examples_of_the_epoch(make_strategy: MakeStrategy, batches: Batches):
    module = nn.Linear(3, 1)
    model = compiled(module, make_strategy(3), optimizer=lambda p: torch.optim.SGD(p, 0.0), loss=nn.functional.mse_loss)
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    history = model.fit(batches, verbose=0)
    assert history.history["loss"][0] == pytest.approx(nn.functional.mse_loss(module(x), y).item())


def test_a_dict_of_inputs_becomes_keyword_arguments_and_a_tuple_positional_ones(make_strategy: MakeStrategy):
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return self.scale * (left - right)

    model = compiled(Two(), make_strategy(2), metrics={"mse": MeanSquaredError()})
    left, right, y = torch.full((3,), 5.0), torch.full((3,), 2.0), torch.zeros(3)

    named = model.evaluate([({"right": right, "left": left}, y)], verbose=0)
    placed = model.evaluate([((left, right), y)], verbose=0)

    assert named == placed == {"loss": 9.0, "mse": 9.0}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_scheduler_steps_once_per_update(accumulate: int, make_strategy: MakeStrategy, batches: Batches):
    made = []

    def scheduler(optimizer: torch.optim.Optimizer) -> LambdaLR:
        made.append(LambdaLR(optimizer, lambda update: 0.5**update))
        return made[0]

    model = compiled(nn.Linear(3, 1), make_strategy(2), scheduler=scheduler, accumulate=accumulate)
    model.fit(batches, epochs=2, verbose=0)

    updates = {1: 6, 2: 4}[accumulate]  # three batches an epoch: two and one
    assert made[0].last_epoch == updates
    assert model.learning_rate == pytest.approx(0.05 * 0.5**updates)


def test_an_epoch_can_be_a_number_of_steps_and_the_next_goes_on(make_strategy: MakeStrategy):
    seen: list[float] = []

    class Spy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x[0, 0].item())
            return super().forward(x)

    model = compiled(Spy(1, 1), make_strategy(1))
    data = [(torch.full((2, 1), float(n)), torch.zeros(2, 1)) for n in range(3)]

    history = model.fit(data, epochs=2, steps_per_epoch=2, verbose=0)

    assert seen == [0.0, 1.0, 2.0, 0.0]
    assert [timing.steps for timing in history.timing] == [2, 2]


def test_ctrl_c_ends_the_reading_ahead_at_once(model: Model, batches: Batches):
    def endless() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield batches[0]

    stop = stop_at_first_batch(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt) as raised:
        model.fit(endless(), steps_per_epoch=3, callbacks=[stop], verbose=0)

    # The traceback still holds fit's frames, so only an explicit close can have ended the thread.
    assert raised.traceback
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lockstep-prefetch")]


def test_metrics_begin_anew_each_epoch(make_strategy: MakeStrategy, batches: Batches):
    model = compiled(nn.Linear(3, 1), make_strategy(2), metrics={"mse": MeanSquaredError()})
    history = model.fit(batches, epochs=3, verbose=0)
    assert history.history["mse"] == pytest.approx(history.history["loss"])


def test_validation_can_be_every_few_epochs_and_epochs_can_go_on(model: Model, batches: Batches):
    history = model.fit(batches, validation_data=batches, epochs=5, initial_epoch=1, validation_freq=2, verbose=0)
    assert history.epoch == [1, 2, 3, 4]
    assert (len(history.history["loss"]), len(history.history["val_loss"])) == (4, 2)


def test_a_distributed_dataset_is_taken_as_it_is(model: Model, batches: Batches):
    distributed = model.strategy.distribute_dataset(batches)
    history = model.fit(distributed, epochs=2, verbose=0)
    assert [timing.examples for timing in history.timing] == [10, 10]


def test_the_same_program_twice_gives_bit_equal_weights_with_dropout(make_strategy: MakeStrategy, batches: Batches):
    def train(seed: int) -> list[Tensor]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(3, 16), nn.Dropout(0.5), nn.Linear(16, 1))
        strategy = make_strategy(3, seed=seed)
        model = compiled(module, strategy, clip_norm=1.0)
        model.fit(batches, epochs=3, verbose=0)
        return weights(model)

    assert equal(train(7), train(7))
    assert not equal(train(7), train(8))


def test_synchronised_batch_norm_trains_as_on_one_device_with_an_empty_shard_too(make_strategy: MakeStrategy):
    module, data = conv_net(), images((8, 3))
    with make_strategy(4).scope():
        model = Model(module, sync_batchnorm=True)
        model.compile(optimizer=sgd, loss=nn.functional.cross_entropy)
    model.fit(data, epochs=2, verbose=0)
    assert_close(module, train(conv_net(), data, epochs=2).module)


def test_fit_and_evaluate_put_the_modes_back(make_strategy: MakeStrategy, batches: Batches):
    modes: list[tuple[bool, bool]] = []

    class Spy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            modes.append((self.training, torch.is_grad_enabled()))
            return super().forward(x)

    module = nn.Sequential(Spy(3, 1), nn.Dropout(0.0))
    model = compiled(module, make_strategy(1))
    module.eval()
    module[1].train()

    model.fit(batches[:1], validation_data=batches[:1], epochs=2, verbose=0)
    model.predict(batches[:1])

    assert modes == [(True, True), (False, False), (True, True), (False, False), (False, False)]
    assert [part.training for part in module.modules()] == [False, False, True]


def test_saved_weights_are_the_plain_modules_and_load_everywhere(model: Model, batches: Batches, tmp_path: Path):
    path = tmp_path / "w.safetensors"
    model.fit(batches, verbose=0)
    expected = model.predict(batches)
    model.save_weights(path)
    model.fit(batches, verbose=0)
    model.load_weights(path)
    assert torch.equal(model.predict(batches), expected)
    assert list(model.state_dict()) == ["weight", "bias"]


def test_weights_that_do_not_fit_load_nothing(model: Model, make_strategy: MakeStrategy, tmp_path: Path):
    path = tmp_path / "w.safetensors"
    before = weights(model)
    with make_strategy(2).scope():
        Model(nn.Linear(3, 2)).save_weights(path)
    with pytest.raises(CheckpointError, match=r"wrong shapes: weight has shape \(2, 3\) instead of \(1, 3\)"):
        model.load_weights(path)
    assert equal(weights(model), before)


def test_batch_norm_statistics_are_averaged_before_evaluation_and_in_the_file(
    make_strategy: MakeStrategy, tmp_path: Path
):
    module = nn.BatchNorm1d(1)
    model = compiled(module, make_strategy(2))
    x = torch.tensor([[0.0], [0.0], [10.0], [20.0]])
    model.fit([(x, x)], verbose=0)
    assert model.state_dict()["running_mean"].item() == pytest.approx(0.75)  # 0.1 * the mean of 0 and 15
    halves = [model.evaluate([(half, half)], verbose=0)["loss"] for half in (x, x.flip(0))]
    assert halves[0] == pytest.approx(halves[1])
