#!/usr/bin/env bash
# torch.load chooses the format by the file's name. A file that torch.save has written under a name that ends in
# ".safetensors" is not read back by name, only as an open file; under any other name it is.
#
# Seen: torch 2.13.0, safetensors 0.8.0, Python 3.11. The script fails if another version behaves in another way.
# In Lockstep: weights files are read by their content, and save_weights writes the format that the suffix names.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 safetensors==0.8.0 numpy==2.4.0
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import torch

state = {"weight": torch.ones(2)}
for name in ("a.bin", "a.safetensors"):
    torch.save(state, name)
    try:
        result = "read" if torch.equal(torch.load(name, weights_only=True)["weight"], state["weight"]) else "differs"
    except Exception as error:
        result = f"{type(error).__name__}: {error}"
    with open(name, "rb") as file:
        opened = torch.equal(torch.load(file, weights_only=True)["weight"], state["weight"])
    print(f"torch {torch.__version__}: torch.load({name!r}) -> {result}; of the open file -> {opened}")
    expected = result == "read" if name == "a.bin" else result.startswith("SafetensorError")
    assert expected and opened, "torch behaves in another way now"
PY
