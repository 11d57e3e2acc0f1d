from __future__ import annotations

from typing import Any

import pytest

from lockstep.train.callbacks import Callback
from lockstep.train.callbacks.base import Logs


def test_every_hook_of_keras_is_there_and_does_nothing():
    callback = Callback()
    for part in ("train", "test", "predict"):
        for edge in ("begin", "end"):
            getattr(callback, f"on_{part}_{edge}")({})
            getattr(callback, f"on_{part}_batch_{edge}")(0, {})
    for edge in ("begin", "end"):
        getattr(callback, f"on_epoch_{edge}")(0, {})
    callback.close()


def test_the_older_names_of_the_batch_hooks_work():
    heard: list[Any] = []

    class Old(Callback):
        def on_batch_begin(self, batch: int, logs: Logs) -> None:
            heard.append(("begin", batch))

        def on_batch_end(self, batch: int, logs: Logs) -> None:
            heard.append(("end", batch))

    Old().on_train_batch_begin(3, {})
    Old().on_train_batch_end(3, {})

    assert heard == [("begin", 3), ("end", 3)]


def test_a_callback_without_a_model_says_so():
    with pytest.raises(AttributeError, match="Callback has no model yet; hand it to fit"):
        _ = Callback().model
