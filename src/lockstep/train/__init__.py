"""Training: Model with compile, fit, evaluate and predict.

    model -> fit (epochs and batches) -> step (in each replica) -> loss_totals, metrics
      |        `- cuda_graphs: on a GPU, whole steps captured and replayed
      |-> inference (evaluate, predict)    |-> compile (optimizer, precision; string_identifiers: "adam", "accuracy")
      `-> training_state (what a checkpoint resumes), model_weights (save_weights and its like; torch_weights)

``trained_model`` is the Model as callbacks, loops and checkpoints see it. Begin with ``model``, then ``fit`` and
``step``. The others, by topic:

- data: ``arrays`` makes batches of arrays, ``batch`` unpacks (x, y), ``epoch_iterator`` gives the loops their batches.
- losses: ``loss_reduction`` finds the total and the count of a scalar loss, ``module_loss`` and ``label_shift`` are
  about losses that a module computes itself, ``keras_losses`` about those with Keras's names.
- metrics: ``summed_metric`` is the base of accuracy and f1, which ``classification`` has.
- reports: ``logs`` holds the numbers of a fit, ``curves`` draws them, ``summary`` is the table of layers,
  ``fingerprint`` compares trainings.
- ``callbacks`` are called by the loops; ``weight_averages`` are those of EMA and SWA. ``learning_rate_finder`` is
  ``ls.find_learning_rate``. ``user_step`` is what a user's ``train_step`` and ``test_step`` work with.
"""

from __future__ import annotations

from lockstep.train.logs import EpochTiming, History
from lockstep.train.model import Model

__all__ = ["EpochTiming", "History", "Model"]
