"""What Keras and Lightning call in a model's subclass, and ``Model`` does not: steps that are written by oneself.

Ignored they would train another loss than the one that was written, so they are refused where they are defined.
"""

from __future__ import annotations

from collections.abc import Iterable

from lockstep.errors import UsageError

_STEPS = frozenset(
    {
        *("train_step", "test_step", "predict_step", "compute_loss", "compute_metrics"),
        *("make_train_function", "make_test_function", "make_predict_function"),
        *("training_step", "validation_step", "configure_optimizers", "optimizer_step"),
    }
)
_OF_THE_MODULE = frozenset({"forward", "call"})


def refuse_own_steps(names: Iterable[str], where: str) -> None:
    """Refuses the names of steps among ``names``.

    Args:
        names: what is defined.
        where: such as "class Distiller".

    Raises:
        UsageError: there are some.
    """
    given = set(names)
    steps, calls = sorted(given & _STEPS), sorted(given & _OF_THE_MODULE)
    if steps:
        raise UsageError(
            f"{where} defines {', '.join(steps)}, which fit, evaluate and predict do not call; write the step as a "
            "function, and a loop that runs it on every replica with strategy.run(step, (batch,)), or hand what "
            "differs to compile as loss and metrics"
        )
    if calls:
        raise UsageError(
            f"{where} defines {', '.join(calls)}, which fit, evaluate and predict do not call; define it in the "
            "torch.nn.Module that is given to Model"
        )
