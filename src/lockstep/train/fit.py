"""One fit: its epochs, each trained, validated, recorded and told of, up to the last one or an agreed end.

Model.fit -> run_fit -> TrainLoop.run_epoch, run_evaluation
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from lockstep.train.agreed_stop import AgreedStop
from lockstep.train.callbacks.callback_list import CallbackList
from lockstep.train.evaluation import run_evaluation
from lockstep.train.feed import Feed
from lockstep.train.fit_settings import Epochs
from lockstep.train.job import Job
from lockstep.train.loop import TrainLoop
from lockstep.train.mode import module_mode
from lockstep.train.timing import StepClock

if TYPE_CHECKING:
    from lockstep.train.model import Model


def run_fit(
    model: Model, job: Job, feed: Feed, *, validation: Feed | None, callbacks: CallbackList, epochs: Epochs
) -> None:
    """Trains, and keeps the model's history, clock and ``stop_training``. Every worker must call it.

    Args:
        model: whose fit it is.
        job: with an optimizer.
        feed: the training data; it is closed at the end.
        validation: evaluated at the end of epochs, if there is any.
        callbacks: hear of everything.
        epochs: which are trained, and which validated.
    """
    stop = AgreedStop(model.strategy.workers, model)
    loop = TrainLoop(model.strategy, job, callbacks=callbacks, stop=stop)
    state = model.training_state.of_fit(loop, feed, callbacks, epoch=epochs.initial_epoch)
    with module_mode(job.module, training=True), closing(feed), state:
        callbacks.call("on_train_begin")
        logs: dict[str, float] = {}
        # A callback may have restored a later epoch, or a training that was stopped.
        stopped = stop.agreed("beginning of the epochs")
        for epoch in range(loop.epoch, loop.epoch if stopped else epochs.epochs):
            callbacks.call("on_epoch_begin", epoch)
            model.clock = StepClock()
            logs = loop.run_epoch(feed, model.clock)
            if validation is not None and epochs.validates(epoch):
                validated = run_evaluation(model.strategy, job, validation, callbacks=callbacks, clock=StepClock())
                logs |= {f"val_{name}": value for name, value in validated.items()}
            model.history.timing.append(model.clock.summary(epoch))
            model.history.add(epoch, logs)
            callbacks.call("on_epoch_end", epoch, logs=logs)
            if stop.agreed("end of an epoch's callbacks"):
                break
        callbacks.call("on_train_end", logs=logs)
