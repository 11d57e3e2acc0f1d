"""Training: Model with compile, fit, evaluate and predict.

    model -> fit (epochs) -> loop (batches) -> step (in each replica) -> loss, metrics
      |                        `- cuda_graphs: on a GPU, whole steps captured and replayed
      |-> inference (evaluate, predict)    |-> compile (optimizer, precision)    `-> checkpointing

``callbacks`` are called by the loops, ``epoch_iterator`` gives them batches, and ``logs`` holds the numbers they
report. Begin with ``model``, then ``loop`` and ``step``.
"""

from __future__ import annotations

from lockstep.train.logs import EpochTiming, History
from lockstep.train.model import Model

__all__ = ["EpochTiming", "History", "Model"]
