"""Keras on JAX: DataParallel over forced host devices, a jitted step over Keras's stateless calls, as in its guide."""

from __future__ import annotations

import jax
import keras
from keras_models import Work, make_work
from program import Job, load_batches, start_timer, take_job


def main() -> None:
    """Trains as the job says."""
    job = take_job()
    keras.config.set_image_data_format(job.options["data_format"])
    keras.utils.set_random_seed(0)
    distribution = keras.distribution.DataParallel(devices=keras.distribution.list_devices("cpu"))
    keras.distribution.set_distribution(distribution)
    work = make_work(job.workload, load_batches(job))
    {"stateless": _train_stateless, "train_on_batch": _train_on_batch}[job.options["loop"]](job, work, distribution)


def _train_on_batch(job: Job, work: Work, distribution: keras.distribution.DataParallel) -> None:
    """Keras's own step."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    work.model.compile(optimizer=keras.optimizers.Adam(job.learning_rate), loss=loss)
    timer = start_timer(job, trained=work.trained)
    for index in range(timer.total):
        x, y = work.batches[index % len(work.batches)]
        timer.record_step(float(work.model.train_on_batch(x, y)))


def _train_stateless(job: Job, work: Work, distribution: keras.distribution.DataParallel) -> None:
    """The guide's loop: the state goes in and comes out, and JAX may reuse its memory."""
    model, optimizer = work.model, keras.optimizers.Adam(job.learning_rate)
    optimizer.build(model.trainable_variables)
    per_example = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def loss_of(trained, rest, x, y):
        logits, rest = model.stateless_call(trained, rest, x, training=True)
        return per_example(y, logits), rest

    def step(trained, rest, slots, x, y):
        (loss, rest), gradients = jax.value_and_grad(loss_of, has_aux=True)(trained, rest, x, y)
        trained, slots = optimizer.stateless_apply(slots, gradients, trained)
        return loss, trained, rest, slots

    jitted = jax.jit(step, donate_argnums=(0, 1, 2))
    states = [
        [jax.device_put(v.value, v.value.sharding) for v in variables]
        for variables in (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
    ]
    batches = [jax.tree.map(lambda array: _sharded(array, distribution), batch) for batch in work.batches]
    timer = start_timer(job, trained=work.trained)
    for index in range(timer.total):
        loss, *states = jitted(*states, *batches[index % len(batches)])
        timer.record_step(float(loss))


def _sharded(array, distribution):
    """The array on the devices, a part on each."""
    layout = distribution.get_data_layout(array.shape)
    return jax.device_put(array, layout.backend_layout)


if __name__ == "__main__":
    main()
