#!/usr/bin/env bash
# Tensor.numpy() changes the tensor: from then on torch cannot resize its storage, also when the array is gone. So a
# storage that is not resizable does not tell that NumPy has made it, and to read a model's buffers through NumPy, for a
# checksum, leaves a mark on each of them. A copy by torch, or a state_dict, leaves none.
#
# Seen: torch 2.13.0, numpy 2.4.0, Python 3.11. The script fails if another version behaves in another way.
# In Lockstep: the watch for numbers that a step reads from its rows knows the buffers of modules; it took them for
# numbers made by NumPy after a checkpoint had been saved, and warned.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.0
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import gc

import torch

norm = torch.nn.BatchNorm1d(4)
norm.state_dict()
norm.running_var.clone()
norm.running_mean.numpy().sum()
gc.collect()
seen = {name: buffer.untyped_storage().resizable() for name, buffer in norm.named_buffers()}
print(f"torch {torch.__version__}: resizable after running_mean.numpy() -> {seen}")
assert seen == {"running_mean": False, "running_var": True, "num_batches_tracked": True}, "torch behaves in another way"
PY
