"""Keras models on the replicas of a strategy: the same program and the same numbers, N devices.

    model          ``distribute``: begin here; the steps that Keras's loops call, outside the replicas
    backup         ``BackupAndRestore``, which continues an interrupted ``fit`` at the batch
    step           what runs in each replica
    compiled       ``jit_compile=True``: the model as compiled code
    seeded_draws   what layers with a seed draw in it
    fixed_draws    what is drawn where shards are compared with their batch
    user_step      a ``train_step`` of the model's class that computes the step by itself
    custom_loop    what Keras needs in the replicas of a step that the user gives ``strategy.run``
    variables      each replica's values of the model's variables, and what becomes of them after a step
    metrics        results of all replicas inside a step
    losses         losses that are divided by the numbers of the whole batch
    batchnorm      batch norms that take their statistics from the whole batch
    kernels        faster kernels for batch norms and images
    torch_modules  layers that wrap torch modules
    batch_check    compares some batches with Keras's own numbers
    keras_compat   the functions of Keras that are replaced, all of them, and whether this version of Keras has them

Importing it needs Keras on torch: ``pip install 'torch-lockstep[keras]'`` and the environment variable
``KERAS_BACKEND=torch``.
"""

from lockstep.errors import ConfigError
from lockstep.extras import require

_ADVICE = "set the environment variable KERAS_BACKEND=torch before the program imports keras"

try:
    import keras
except ModuleNotFoundError as error:
    if error.name == "keras":
        require("keras", "keras")
    raise ConfigError(f"Keras could not be imported, because its backend needs {error.name!r}; {_ADVICE}") from None
if keras.backend.backend() != "torch":
    raise ConfigError(f"Keras runs on the backend {keras.backend.backend()!r}, expected 'torch'; {_ADVICE}")

from lockstep.integrations.keras.backup import BackupAndRestore  # noqa: E402  after the checks above
from lockstep.integrations.keras.keras_compat import replace_functions  # noqa: E402
from lockstep.integrations.keras.model import distribute  # noqa: E402

replace_functions()

__all__ = ["BackupAndRestore", "distribute"]
