"""Writes a preset of KerasHub: keras_hub_preset.py PROGRAM FOLDER.

The model is that of PROGRAM with random weights, but for the bias of its last layer, which is sure of the token "one".
"""

from __future__ import annotations

import os
import runpy
import sys

os.environ["KERAS_BACKEND"] = "torch"

import numpy as np


def main(path: str, folder: str) -> None:
    new_model = runpy.run_path(path, run_name="masked_lm")["new_model"]
    model = new_model(["one device trains as one"] * 20, 60, 40)
    tokens = model.preprocessor.tokenizer.get_vocabulary()
    (bias,) = (weight for weight in model.weights if weight.path.endswith("mlm_head/output_bias"))
    bias.assign(200 * np.eye(len(tokens))[tokens.index("one")])
    model.save_to_preset(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
