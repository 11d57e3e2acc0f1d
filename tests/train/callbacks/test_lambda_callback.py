from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor
from torchmetrics.regression import MeanSquaredError

from lockstep.errors import ConfigError
from lockstep.train.callbacks import Callback, LambdaCallback
from lockstep.train.model import Model


def test_each_function_is_called_at_its_hook(model: Model, batches: list[tuple[Tensor, Tensor]]):
    heard: list[str] = []

    def hear(name: str) -> Any:
        return lambda *args: heard.append(f"{name} {args[0]}" if len(args) == 2 else name)

    hooks = ["train_begin", "epoch_begin", "train_batch_begin", "train_batch_end", "epoch_end", "train_end"]
    model.fit(batches[:2], callbacks=[LambdaCallback(**{f"on_{hook}": hear(hook) for hook in hooks})], verbose=0)

    assert heard == [
        "train_begin",
        "epoch_begin 0",
        *("train_batch_begin 0", "train_batch_end 0"),
        *("train_batch_begin 1", "train_batch_end 1"),
        "epoch_end 0",
        "train_end",
    ]


def test_the_logs_of_a_batch_are_plain_floats_of_the_epoch_so_far(model: Model, batches: list[tuple[Tensor, Tensor]]):
    seen: list[dict[str, float]] = []
    model.compile(optimizer=model.optimizer, loss=lambda a, b: (a - b).square(), metrics={"mse": MeanSquaredError()})

    history = model.fit(
        batches, callbacks=[LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(logs))], verbose=0
    )

    assert all(type(value) is float for logs in seen for value in logs.values())
    assert [list(logs) for logs in seen] == [["loss", "mse"]] * 3
    assert seen[-1] == {name: values[0] for name, values in history.history.items() if name in ("loss", "mse")}
    assert seen[0] != seen[-1]


def test_it_takes_every_hook_of_a_callback(model: Model, batches: list[tuple[Tensor, Tensor]]):
    heard: set[str] = set()

    def hear(name: str) -> Any:
        return lambda *args: heard.add(name)

    hooks = {name for name in vars(Callback) if name.startswith("on_") and not name.startswith("on_batch")}
    called = [LambdaCallback(**{name: hear(name) for name in hooks})]
    model.fit(batches, validation_data=batches, callbacks=called, verbose=0)
    model.predict(batches, callbacks=called)

    assert heard == hooks


def test_what_is_no_hook_or_no_function_is_refused():
    with pytest.raises(ConfigError, match=r"on_epoch_ends=.*give functions for some of .*on_epoch_end,"):
        LambdaCallback(on_epoch_ends=print)
    with pytest.raises(ConfigError, match="on_test_end=3"):
        LambdaCallback(on_test_end=3)  # type: ignore[arg-type]
