"""Keras on torch: Keras's own step on the whole CPU, or the same on replicas of ours (``LOCKSTEP_REPLICAS``)."""

from __future__ import annotations

import os

import keras
from keras_models import make_work
from program import load_batches, start_timer, take_job


def main() -> None:
    """Trains as the job says."""
    job = take_job()
    keras.utils.set_random_seed(0)
    work = make_work(job.workload, load_batches(job))
    model = work.model
    if replicas := int(os.environ.get("LOCKSTEP_REPLICAS", "0")):
        import lockstep as ls
        from lockstep.integrations.keras import distribute

        (cpu,) = ls.config.list_physical_devices("CPU")
        ls.config.set_logical_device_configuration(cpu, [ls.config.LogicalDeviceConfiguration()] * replicas)
        model = distribute(model, ls.MirroredStrategy(seed=0))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(job.learning_rate), loss=loss)
    timer = start_timer(job, trained=work.trained)
    for index in range(timer.total):
        x, y = work.batches[index % len(work.batches)]
        timer.record_step(float(model.train_on_batch(x, y)))


if __name__ == "__main__":
    main()
