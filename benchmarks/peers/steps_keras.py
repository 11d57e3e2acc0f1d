"""Keras's ``fit`` on torch in one process, for the suite ``steps``: all steps are in one call."""

from __future__ import annotations

import keras
import torch
from program import start_timer, take_job
from steps_work import make_work, trained_by

from benchmarks.small_steps import RATE


def main() -> None:
    """Trains the same layers, made by Keras."""
    job = take_job()
    module, batches = make_work(job)
    layers = [each for each in module if isinstance(each, torch.nn.Linear)]
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Dense(each.out_features, activation="relu") for each in layers])
    model.compile(optimizer=keras.optimizers.Adam(RATE), loss="mse")
    timer = start_timer(job, trained=trained_by(module))
    record = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda _, logs: timer.record_step(lambda: float(logs["loss"]))
    )
    x, y = (torch.cat(parts).numpy() for parts in zip(*batches, strict=True))
    model.fit(x, y, batch_size=len(batches[0][0]), shuffle=False, verbose=0, callbacks=[record])


if __name__ == "__main__":
    main()
