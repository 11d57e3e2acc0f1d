"""Classes of generated rows with tf.distribute, on two logical devices of the CPU.

python examples/coming_from/tf_distribute_before.py
"""

import keras
import numpy as np
import tensorflow as tf

cross_entropy = tf.nn.sparse_softmax_cross_entropy_with_logits

EPOCHS, BATCH_SIZE = 3, 64


def main() -> None:
    """Trains, and saves the weights."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    half = tf.config.LogicalDeviceConfiguration()
    tf.config.set_logical_device_configuration(cpu, [half, half])
    strategy = tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    draw = np.random.default_rng(0)
    x = draw.normal(size=(1797, 64)).astype("float32")
    y = x[:, :10].argmax(axis=1)
    data = tf.data.Dataset.from_tensor_slices((x, y))
    batches = data.batch(BATCH_SIZE)

    with strategy.scope():
        hidden, out = keras.layers.Dense(32, "relu"), keras.layers.Dense(10)
        model = keras.Sequential([keras.Input((64,)), hidden, out])
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build(model.trainable_variables)  # else TensorFlow 2.21 fails
    for weight in model.trainable_variables:
        start = 0.1 * draw.normal(size=weight.shape).astype("float32")
        weight.assign(start)

    def step(rows, classes):
        with tf.GradientTape() as tape:
            logits = model(rows, training=True)
            losses = cross_entropy(classes, logits)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=BATCH_SIZE)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
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
