"""Training: Model with compile, fit, evaluate and predict.

    model -> fit (epochs) -> loop (batches) -> step (in each replica) -> loss, metrics
      |                        `- cuda_graphs: on a GPU, whole steps captured and replayed
      |-> inference (evaluate, predict)    |-> compile (optimizer, precision)
      `-> training_state (what a checkpoint resumes), checkpointing (weights)

``callbacks`` are called by the loops, ``epoch_iterator`` gives them batches, ``arrays`` makes batches of arrays, and
``logs`` holds the numbers they report, which ``curves`` draws. ``names`` has the strings of compile, ``classification``
its metrics accuracy and f1, ``user_step`` what a user's ``train_step`` and ``test_step`` work with, and ``summary`` the
table of layers. ``trained_model`` is the Model as callbacks, loops and checkpoints see it. Begin with ``model``, then
``fit`` and ``step``.
"""

from __future__ import annotations

from lockstep.train.logs import EpochTiming, History
from lockstep.train.model import Model

__all__ = ["EpochTiming", "History", "Model"]
