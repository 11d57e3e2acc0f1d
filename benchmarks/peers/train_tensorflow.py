"""TensorFlow's MirroredStrategy on logical CPU devices, as in its tutorial of custom training loops."""

from __future__ import annotations

import keras
import tensorflow as tf
from keras_models import Work, make_work
from program import Job, load_batches, start_timer, take_job


def main() -> None:
    """Trains as the job says."""
    job = take_job()
    strategy = _split_cpu(job.replicas)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        work = make_work(job.workload, load_batches(job))
        optimizer = keras.optimizers.Adam(job.learning_rate)
        optimizer.build(work.model.trainable_variables)
    timer = start_timer(job, trained=work.trained)
    step = _make_step(job, strategy, work.model, optimizer)
    batches = _distributed(strategy, work, job.replicas)
    for index in range(timer.total):
        timer.record_step(float(step(*batches[index % len(batches)])))


def _split_cpu(replicas: int) -> tf.distribute.Strategy:
    (cpu,) = tf.config.list_physical_devices("CPU")
    if replicas == 1:
        return tf.distribute.get_strategy()
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * replicas)
    return tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(replicas)])


def _distributed(strategy: tf.distribute.Strategy, work: Work, replicas: int) -> list:
    """Each batch's shards on their devices beforehand, so that no step waits for its input."""
    if replicas == 1:
        return [tf.nest.map_structure(tf.constant, batch) for batch in work.batches]

    def shard(batch, context):
        rows = len(batch[1]) // replicas
        own = slice(context.replica_id_in_sync_group * rows, (context.replica_id_in_sync_group + 1) * rows)
        return tf.nest.map_structure(lambda array: tf.constant(array[own]), batch)

    return [
        strategy.experimental_distribute_values_from_function(lambda context, batch=batch: shard(batch, context))
        for batch in work.batches
    ]


def _make_step(job: Job, strategy: tf.distribute.Strategy, model: keras.Model, optimizer: keras.Optimizer):
    """One training step of all replicas, as a graph; the loss of the global batch."""
    per_example = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def replica_step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(per_example(y, model(x, training=True))) / job.count
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def step(x, y):
        return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(replica_step, args=(x, y)), axis=None)

    return step


if __name__ == "__main__":
    main()
