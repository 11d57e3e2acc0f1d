"""A Keras program, ``compile`` and ``fit``: alone, on replicas of ours, or on TensorFlow's MirroredStrategy.

``KERAS_BACKEND`` says which Keras it is, and ``REPLICAS`` on how many devices, cut from the CPU; 0 is Keras alone.
"""

from __future__ import annotations

import os
from typing import Any

import keras
import numpy as np
from keras_models import Work, make_work
from program import Job, load_batches, start_timer, take_job


def main() -> None:
    """Trains as the job says."""
    job, replicas = take_job(), int(os.environ["REPLICAS"])
    keras.utils.set_random_seed(0)
    batches = load_batches(job)
    if replicas and keras.backend.backend() == "tensorflow":
        with _tensorflow_strategy(replicas).scope():
            work = make_work(job.workload, batches)
            _compile(work.model, job)
    else:
        work = make_work(job.workload, batches)
        if replicas:
            _distribute(work.model, replicas)
        _compile(work.model, job)
    timer = start_timer(job, trained=work.trained)
    record = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: timer.record_step(float(logs["loss"])))
    x, y, rows = _whole(work, timer.total)
    work.model.fit(x, y, batch_size=rows, shuffle=False, verbose=0, callbacks=[record])


def _compile(model: keras.Model, job: Job) -> None:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(job.learning_rate), loss=loss)


def _tensorflow_strategy(replicas: int) -> Any:
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * replicas)
    return tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(replicas)])


def _distribute(model: keras.Model, replicas: int) -> None:
    import lockstep as ls
    from lockstep.integrations.keras import distribute

    (cpu,) = ls.config.list_physical_devices("CPU")
    ls.config.set_logical_device_configuration(cpu, [ls.config.LogicalDeviceConfiguration()] * replicas)
    distribute(model, ls.MirroredStrategy(seed=0))


def _whole(work: Work, steps: int) -> tuple[Any, np.ndarray, int]:
    """The batches of all steps as one ``x``, one ``y``, and the rows of a batch."""
    batches = [work.batches[index % len(work.batches)] for index in range(steps)]
    (first, labels), *_ = batches
    if isinstance(first, dict):
        x: Any = {name: np.concatenate([each[name] for each, _ in batches]) for name in first}
    else:
        x = np.concatenate([each for each, _ in batches])
    return x, np.concatenate([each for _, each in batches]), len(labels)


if __name__ == "__main__":
    main()
