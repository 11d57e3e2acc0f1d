#!/usr/bin/env bash
# What tf.distribute and Keras do with a batch that its replicas cannot share evenly, and with several workers:
#
# 1. A batch of 9 rows on 4 replicas is divided into 3, 3, 3 and 0 rows. tf.reduce_mean of no rows is NaN.
# 2. Keras's `fit` averages the replicas' gradients, whatever rows they have, and a replica without rows counts as 0.
#    The last step of an epoch with 1 row left is a quarter of one device's, with 2 rows a half, with 3 rows three
#    quarters. The loss of the epoch in the history is exactly one device's, so nothing shows it.
# 3. With BatchNormalization the step of an empty replica makes its weights NaN, while the loss in the history is finite.
# 4. `fit` and `evaluate` raise InvalidArgumentError where the first batch is uneven, and train where a later one is.
# 5. `fit` under a MultiWorkerMirroredStrategy of two workers raises ValueError on both.
#
# Seen: tensorflow-cpu 2.21.0, keras 3.15.1, numpy 2.4.6, Python 3.11, on a CPU of 4 logical devices. The script fails
# if another version behaves in another way.
# In Lockstep: 3, 2, 2, 2 rows, and one device's step in each case (tests/docs/test_measured_there_and_here.py).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check tensorflow-cpu==2.21.0 keras==3.15.1 numpy==2.4.6
export KERAS_BACKEND=tensorflow TF_CPP_MIN_LOG_LEVEL=3 CUDA_VISIBLE_DEVICES=
cat > "$folder/replicas.py" <<'PY'
from contextlib import nullcontext

import keras
import numpy as np
import tensorflow as tf

CHANGED = "tf.distribute behaves in another way now"
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 4)
strategy = tf.distribute.MirroredStrategy([f"cpu:{number}" for number in range(4)])
print(f"tensorflow {tf.__version__}, keras {keras.__version__}")

(shards,) = strategy.experimental_distribute_dataset(tf.data.Dataset.range(9).batch(9))
rows = [len(shard) for shard in strategy.experimental_local_results(shards)]
means = strategy.run(lambda shard: tf.reduce_mean(tf.cast(shard, "float32")), (shards,))
last = float(strategy.experimental_local_results(means)[-1])
print(f"9 rows on 4 replicas: {rows}; tf.reduce_mean of the last shard: {last}")
assert rows == [3, 3, 3, 0] and np.isnan(last), CHANGED


def compiled(scope, *layers):
    with scope:
        model = keras.Sequential([keras.Input((1,)), *layers, keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(0.001), "mse")
    return model


def last_step(rows, scope):
    """How far the last of two steps moves the weight, with a first batch of 8 rows; the loss of the epoch."""
    model, weights = compiled(scope), []
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: weights.append(model.get_weights()[0].item()))
    x = np.arange(1.0, rows + 1, dtype="float32").reshape(-1, 1)
    history = model.fit(x, 0 * x, batch_size=8, shuffle=False, verbose=0, callbacks=[note])
    return weights[1] - weights[0], history.history["loss"][0]


for rows in (9, 10, 11):
    one, one_loss = last_step(rows, nullcontext())
    four, four_loss = last_step(rows, strategy.scope())
    print(f"fit, {rows - 8} row(s) in the last batch: {four / one:.3f} of one device's step, loss {four_loss:.4f} and {one_loss:.4f}")
    assert abs(four / one - (rows - 8) / 4) < 1e-3 and abs(four_loss / one_loss - 1) < 1e-6, CHANGED

with strategy.scope():
    norm = keras.layers.BatchNormalization()
model = compiled(strategy.scope(), norm)
x = np.arange(1.0, 10, dtype="float32").reshape(-1, 1)
loss = model.fit(x, 0 * x, batch_size=8, shuffle=False, verbose=0).history["loss"][0]
print(f"with BatchNormalization, 1 row in the last batch: loss {loss:.4f}, gamma {norm.gamma.numpy()}")
assert np.isfinite(loss) and np.isnan(norm.gamma.numpy()).all(), CHANGED

for call in ("fit", "evaluate"):
    try:
        getattr(compiled(strategy.scope()), call)(x, 0 * x, batch_size=9, verbose=0)
        result = "works"
    except tf.errors.InvalidArgumentError as error:
        result = f"InvalidArgumentError: {error.message[-90:]}"
    print(f"{call} with a first batch of 9 rows: {result}")
    assert "same size and shape" in result, CHANGED
PY
cat > "$folder/worker.py" <<'PY'
import os

import keras
import numpy as np
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.ones((16, 1), "float32")
try:
    model.fit(tf.data.Dataset.from_tensor_slices((x, x)).batch(8), verbose=0)
    print("fit works", flush=True)
except ValueError as error:
    print(f"ValueError: {str(error).splitlines()[0]} ... {str(error).splitlines()[-1]}", flush=True)
os._exit(0)  # the other worker may have ended
PY
"$folder/venv/bin/python" "$folder/replicas.py"
ports=$(python3 -c "
import socket
sockets = [socket.create_server(('localhost', 0)) for _ in range(2)]
print(*(f'\"localhost:{listener.getsockname()[1]}\"' for listener in sockets), sep=', ')")
for index in 0 1; do
  TF_CONFIG="{\"cluster\": {\"worker\": [$ports]}, \"task\": {\"type\": \"worker\", \"index\": $index}}" \
    timeout 120 "$folder/venv/bin/python" "$folder/worker.py" > "$folder/$index.txt" 2> "$folder/$index.log" &
done
wait
for index in 0 1; do
  echo "worker $index of 2: $(cat "$folder/$index.txt")"
  grep -q "^ValueError: Attempt to convert a value (PerReplica" "$folder/$index.txt"
done
