#!/usr/bin/env bash
# A Keras model of float64 (set_floatx("float64")) has variables and outputs of float64, but keras.ops.matmul computes
# in float32 on torch: Keras's table of result types knows no float64 there. So Dense layers and their gradients are
# exact to 1e-7 only, and the outputs, which are float64 again after the bias, do not show it. Additions are exact.
#
# Seen: keras 3.15.1, torch 2.13.0, Python 3.11: a Dense layer is off by 5e-07. The script fails if another
# version behaves in another way.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.0 keras==3.15.1
cat > "$folder/program.py" <<'PY'
import keras
import torch

keras.backend.set_floatx("float64")
keras.utils.set_random_seed(1)
x = torch.randn(16, 8, dtype=torch.float64)
layer = keras.layers.Dense(3)
outputs = layer(x)
kernel = layer.kernel.value.detach()
off = float((outputs.detach() - x @ kernel).abs().max())
product = keras.ops.matmul(x, kernel)
print(f"keras {keras.__version__}: kernel {kernel.dtype}, outputs {outputs.dtype}, keras.ops.matmul {product.dtype}")
print(f"a Dense layer is off by {off:.0e}")
assert kernel.dtype == outputs.dtype == torch.float64, "Keras behaves in another way now"
assert product.dtype == torch.float32, "Keras behaves in another way now"
assert 1e-9 < off < 1e-5, "Keras behaves in another way now"
PY
KERAS_BACKEND=torch "$folder/venv/bin/python" "$folder/program.py"
