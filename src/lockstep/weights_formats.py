"""The format of a weights file, by the suffix of its name.

model.safetensors, or a name without the suffix of a format     safetensors
model.pt, model.pth, model.bin                                  torch.save of the state_dict
model.h5, model.keras, model.ckpt, ...                          refused: formats of other libraries
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from lockstep.errors import ConfigError

_TORCH = (".pt", ".pth", ".bin")
_OTHERS = {
    **dict.fromkeys((".h5", ".hdf5", ".keras"), "Keras"),
    **dict.fromkeys((".pb", ".index", ".tflite"), "TensorFlow"),
    **dict.fromkeys((".npz", ".npy"), "NumPy"),
    **dict.fromkeys((".pkl", ".pickle", ".joblib"), "pickle"),
    **dict.fromkeys((".pt2", ".pte", ".ptl"), "torch.export"),
    **dict.fromkeys((".msgpack", ".orbax"), "Flax"),
    ".ckpt": "Lightning and TensorFlow",
    ".onnx": "ONNX",
    ".gguf": "llama.cpp",
    ".mar": "TorchServe",
}


def weights_format(path: str | os.PathLike[str], owner: str) -> Literal["safetensors", "torch"]:
    """Returns the format that the suffix of a weights file names: safetensors, unless it is one of torch's.

    Raises a ConfigError for a format that is not written; ``owner`` is the argument that the path was given to.
    """
    target = Path(path)
    suffix = target.suffix.lower()
    if (library := _OTHERS.get(suffix)) is not None:
        # Keras calls its files model.weights.h5.
        stem = target.stem.removesuffix(".weights") or target.stem
        raise ConfigError(
            f"{owner} is {os.fspath(path)!r}, and weights are not written in the format of {library}; call the file"
            f" {stem}.safetensors, or {stem}.pt for a state_dict that torch.load reads"
        )
    return "torch" if suffix in _TORCH else "safetensors"
