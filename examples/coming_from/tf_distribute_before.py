"""Classes of generated rows with tf.distribute, on two logical devices of the CPU.

python examples/coming_from/tf_distribute_before.py
"""

import keras
import numpy as np
import tensorflow as tf

EPOCHS, BATCH_SIZE = 3, 64


def main() -> None:
    """Trains, and saves the weights."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    draw = np.random.default_rng(0)
    x = draw.normal(size=(1797, 64)).astype("float32")
    y = x[:, :10].argmax(axis=1)
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH_SIZE)

    with strategy.scope():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(10)])
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build(model.trainable_variables)  # else TensorFlow 2.21 fails in the first step on a CPU
    model.set_weights([0.1 * draw.normal(size=weight.shape).astype("float32") for weight in model.get_weights()])

    def step(rows, classes):
        with tf.GradientTape() as tape:
            logits = model(rows, training=True)
            per_example = tf.nn.sparse_softmax_cross_entropy_with_logits(classes, logits)
            loss = tf.nn.compute_average_loss(per_example, global_batch_size=BATCH_SIZE)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def train_step(rows, classes):
        losses = strategy.run(step, args=(rows, classes))
        return strategy.reduce("SUM", losses, axis=None)

    for epoch in range(EPOCHS):
        for rows, classes in strategy.experimental_distribute_dataset(batches):
            loss = train_step(rows, classes)
        print(f"epoch {epoch + 1}: loss {float(loss):.4f}")
    np.savez("weights.npz", *model.get_weights())


if __name__ == "__main__":
    main()
