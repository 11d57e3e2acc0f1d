"""KerasHub's masked words with one device and with four, from the same weights and the same masks.

keras_hub_masks.py PROGRAM: prints, as JSON, the largest differences of the histories and of the weights, how far the
weights of one device have moved, and the numbers of rows with which the model of four devices was called. The model is
that of PROGRAM, without dropout; the masks are drawn once.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np

import lockstep as ls
from lockstep.integrations.keras import distribute

LINES = [f"device {number} trains the model as one, and replica {number % 7} draws the masks" for number in range(40)]


def largest_difference(some: Any, others: Any) -> float:
    return max(float(np.abs(np.subtract(one, other)).max()) for one, other in zip(some, others, strict=True))


def record_rows(backbone: Any) -> set[int]:
    """Has a backbone add the rows of each call to the set that is returned."""
    rows: set[int] = set()
    call = backbone.call

    def recorded(inputs: Any, *args: Any, **kwargs: Any) -> Any:
        rows.add(len(inputs["token_ids"]))
        return call(inputs, *args, **kwargs)

    backbone.call = recorded
    return rows


def main(path: str) -> None:
    new_model = runpy.run_path(path, run_name="masked_lm")["new_model"]
    cpu = ls.config.list_physical_devices("CPU")[0]
    ls.config.set_logical_device_configuration(cpu, [ls.config.LogicalDeviceConfiguration()] * 4)
    models = [new_model(LINES, 200, 32, dropout=0.0) for _ in range(2)]
    x, y, weights = models[0].preprocessor(LINES)
    initial = models[0].get_weights()
    models[1].set_weights(initial)
    with ls.MirroredStrategy().scope():
        distribute(models[1])
    rows = record_rows(models[1].backbone)
    histories = []
    for model in models:
        model.preprocessor = None
        model.compile(
            keras.optimizers.SGD(0.5),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            weighted_metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
            jit_compile=False,
        )
        history = model.fit(x, y, sample_weight=weights, batch_size=18, epochs=2, shuffle=False, verbose=0).history
        histories.append([history[name] for name in ("loss", "accuracy")])
    one, four = (model.get_weights() for model in models)
    found = {
        "history": largest_difference(*histories),
        "weights": largest_difference(one, four),
        "moved": largest_difference(one, initial),
        "rows": sorted(rows),
    }
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
