from __future__ import annotations

from typing import Any

import pytest

from lockstep.errors import CallbackError, ConfigError, MissingExtraError
from lockstep.train.callbacks import Callback, CallbackList, LambdaCallback
from lockstep.train.callbacks.base import Logs
from lockstep.train.model import Model


class Recorder(Callback):
    def __init__(self, name: str, heard: list[Any]) -> None:
        super().__init__()
        self.name = name
        self.heard = heard

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        self.heard.append((self.name, epoch, dict(logs)))

    def close(self) -> None:
        self.heard.append((self.name, "close"))


class Broken(Callback):
    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        raise KeyError("val_loss")


class Incomplete(Callback):
    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        raise MissingExtraError("run: pip install 'torch-lockstep[plots]'")


class BrokenAtClose(Callback):
    def close(self) -> None:
        raise OSError("disk full")


def test_hooks_are_called_in_order_and_everything_is_closed(model: Model):
    heard: list[Any] = []
    with CallbackList([Recorder("a", heard), Recorder("b", heard)], model=model, params={}) as callbacks:
        callbacks.call("on_epoch_end", 3, logs={"loss": 1.0})
    assert heard == [("a", 3, {"loss": 1.0}), ("b", 3, {"loss": 1.0}), ("a", "close"), ("b", "close")]


def test_a_missing_extra_is_not_called_a_fault_of_the_callback(model: Model):
    with pytest.raises(MissingExtraError, match=r"^run: pip install 'torch-lockstep\[plots\]'$"):
        CallbackList([Incomplete()], model=model, params={}).call("on_epoch_end", 0)


def test_the_model_and_the_parameters_are_handed_over(model: Model):
    callback = Callback()
    CallbackList([callback], model=model, params={"epochs": 3})
    assert callback.model is model
    assert callback.params == {"epochs": 3}


def test_logs_changed_by_one_callback_do_not_reach_the_next(model: Model):
    heard: list[Any] = []
    vandal = LambdaCallback(on_epoch_end=lambda epoch, logs: logs.clear())
    CallbackList([vandal, Recorder("a", heard)], model=model, params={}).call("on_epoch_end", 0, logs={"loss": 1.0})
    assert heard == [("a", 0, {"loss": 1.0})]


def test_an_exception_names_the_callback_and_its_hook(model: Model):
    callbacks = CallbackList([Broken()], model=model, params={})
    with pytest.raises(CallbackError, match=r"callback Broken\.on_epoch_end raised KeyError: 'val_loss'") as raised:
        callbacks.call("on_epoch_end", 0)
    assert isinstance(raised.value.__cause__, KeyError)


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_ctrl_c_passes_through(model: Model, interrupt: type[BaseException]):
    def stop(epoch: int, logs: Logs) -> None:
        raise interrupt

    with pytest.raises(interrupt):
        CallbackList([LambdaCallback(on_epoch_end=stop)], model=model, params={}).call("on_epoch_end", 0)


def test_all_are_closed_after_an_error_and_after_a_close_that_fails(model: Model):
    heard: list[Any] = []
    callbacks = [Recorder("a", heard), BrokenAtClose(), Recorder("b", heard)]

    with (
        pytest.raises(CallbackError, match=r"BrokenAtClose\.close raised OSError: disk full") as raised,
        CallbackList(callbacks, model=model, params={}),
    ):
        raise ValueError("the run failed")

    assert heard == [("a", "close"), ("b", "close")]
    assert isinstance(raised.value.__context__, OSError)


@pytest.mark.parametrize(("item", "found"), [(Recorder, "the class Recorder"), (print, "a builtin_function_or_method")])
def test_what_is_no_callback_is_named(model: Model, item: Any, found: str):
    with pytest.raises(ConfigError, match=f"callbacks holds {found}; give instances"):
        CallbackList([item], model=model, params={})


def test_only_who_listens_to_batches_wants_their_metrics(model: Model):
    def wants(callback: Callback) -> bool:
        return CallbackList([Callback(), callback], model=model, params={}).wants_batch_logs()

    class Old(Callback):
        def on_batch_end(self, batch: int, logs: Logs) -> None:
            pass

    assert not wants(Recorder("a", []))
    assert not wants(LambdaCallback(on_epoch_end=print))
    assert wants(LambdaCallback(on_train_batch_end=print))
    assert wants(Old())
