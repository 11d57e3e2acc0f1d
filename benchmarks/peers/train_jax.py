"""Keras on JAX: DataParallel over forced host devices, and Keras's own step."""

from __future__ import annotations

import keras
from keras_models import make_work
from program import load_batches, start_timer, take_job


def main() -> None:
    """Trains as the job says."""
    job = take_job()
    keras.config.set_image_data_format("channels_last")
    keras.utils.set_random_seed(0)
    distribution = keras.distribution.DataParallel(devices=keras.distribution.list_devices("cpu"))
    keras.distribution.set_distribution(distribution)
    work = make_work(job.workload, load_batches(job))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    work.model.compile(optimizer=keras.optimizers.Adam(job.learning_rate), loss=loss)
    timer = start_timer(job, trained=work.trained)
    for index in range(timer.total):
        x, y = work.batches[index % len(work.batches)]
        timer.record_step(float(work.model.train_on_batch(x, y)))


if __name__ == "__main__":
    main()
