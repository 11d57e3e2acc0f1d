#!/usr/bin/env bash
# A layer of a Functional model that is called with training=True, such as dropout for Monte Carlo estimates, is
# silent in Keras 3.15.1 on torch: model(x, training=False) and predict win over the layer's own argument. So such a
# program estimates no uncertainty. Keras's repository has a test that expects the opposite; it fails on this release.
#
# Seen: keras 3.15.1, torch 2.13.0, Python 3.11. The script fails if another version behaves in another way.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.0 keras==3.15.1
cat > "$folder/program.py" <<'PY'
import keras
import numpy as np

inputs = keras.Input((20,))
outputs = keras.layers.Dense(1)(keras.layers.Dropout(0.5, seed=1)(inputs, training=True))
rows = np.asarray(keras.Model(inputs, outputs)(np.ones((2, 20), "float32"), training=False).detach()).ravel()
drops = bool(rows[0] != rows[1])
print(f"keras {keras.__version__}: dropout with training=True in model(x, training=False): {'drops' if drops else 'does nothing'}")
assert not drops, "Keras behaves in another way now"
PY
KERAS_BACKEND=torch "$folder/venv/bin/python" "$folder/program.py"
