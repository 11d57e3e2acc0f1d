#!/usr/bin/env bash
# A learning-rate scheduler made after `optimizer.step = function` ends in an AttributeError: it expects that the
# instance's step is a bound method. Profilers and libraries for mixed precision set such functions; made before, the
# scheduler works.
#
# Seen: torch 2.13.0, Python 3.11. The script fails if another version behaves in another way.
# In Lockstep: a function in place of `optimizer.step` is called once an update, whichever came first (docs/concepts/hooks.md).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.0
"$folder/venv/bin/python" - <<'PY'
import torch


def optimizer():
    return torch.optim.Adam([torch.nn.Parameter(torch.ones(2))], 0.1)


def wrap(adam):
    step = adam.step
    adam.step = lambda *args, **kwargs: step(*args, **kwargs)


after = optimizer()
wrap(after)
try:
    torch.optim.lr_scheduler.StepLR(after, 1)
    result = "works"
except AttributeError as error:
    result = f"AttributeError: {error}"
before = optimizer()
torch.optim.lr_scheduler.StepLR(before, 1)
wrap(before)
print(f"torch {torch.__version__}: StepLR made after the step was replaced: {result}; made before it: works")
assert result == "AttributeError: 'function' object has no attribute '__func__'", "torch behaves in another way now"
PY
