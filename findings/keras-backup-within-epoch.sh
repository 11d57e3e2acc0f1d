#!/usr/bin/env bash
# keras.callbacks.BackupAndRestore(save_freq=2) saves in the middle of an epoch: weights, the epoch, and the batch. The
# resumed `fit` does not read the batch: it trains the interrupted epoch from its first row again, with the weights of the
# middle. Rows that were trained before the backup are trained twice, and the final weights are others.
#
# Seen: keras 3.15.1 (also on tensorflow 2.21.0), torch 2.13.0, Python 3.11: saved after batch 1 of epoch 1, resumed at
# batch 0 of epoch 1. The script fails if another version behaves in another way.
# In Lockstep: ls.BackupAndRestore, and lockstep.integrations.keras.BackupAndRestore for Keras models, continue at the
# batch, with the bits of a training that was not interrupted.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.0 keras==3.15.1
cat > "$folder/program.py" <<'PY'
import json
import sys

import keras
import numpy as np

X = np.arange(1.0, 9, dtype="float32").reshape(-1, 1)


class Interruption(Exception):
    pass


class Steps(keras.callbacks.Callback):
    def __init__(self, limit=None):
        super().__init__()
        self.epoch, self.steps, self.limit = 0, [], limit

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        self.steps.append((self.epoch, batch))
        if len(self.steps) == self.limit:
            raise Interruption


def weight(*callbacks):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(0.001), "mse")
    model.fit(X, 0 * X, batch_size=2, epochs=2, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model.get_weights()[0].item()


backup = lambda: keras.callbacks.BackupAndRestore(sys.argv[1], save_freq=2, delete_checkpoint=False)
whole = weight()
try:
    weight(backup(), Steps(limit=7))
except Interruption:
    saved = json.load(open(f"{sys.argv[1]}/training_metadata.json"))
steps = Steps()
resumed = weight(backup(), steps)
print(f"keras {keras.__version__}: saved {saved}; resumed at {steps.steps[0]}; weight {resumed:.6f}, uninterrupted {whole:.6f}")
assert saved == {"epoch": 1, "batch": 1} and steps.steps[0] == (1, 0), "Keras behaves in another way now"
assert abs(resumed - whole) > 1e-3, "Keras behaves in another way now"
PY
KERAS_BACKEND=torch "$folder/venv/bin/python" "$folder/program.py" "$folder/backup"
