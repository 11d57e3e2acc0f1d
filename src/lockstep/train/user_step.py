"""TrainStep: what a ``train_step`` or ``test_step`` that a subclass of Model overrides works with.

    the shard of a replica -> train_step(step): step.forward, step.loss -> ShardLoss -> backward and update, by Lockstep
                              test_step(step): the same             -> ShardLoss

``step.loss`` adds up the losses of all shards and divides once, as fit does. What else the method might return has no
count that it could be divided by, so it is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, cast
from weakref import WeakMethod

from torch import Tensor

from lockstep._torch_compat import DisableTorchFunction
from lockstep.data.structure import named_leaves, rows_of
from lockstep.errors import UsageError
from lockstep.mirroring.module.module import MirroredModule
from lockstep.train.batch import LabelledBatch, Sums, module_arguments

UserStep = WeakMethod[Callable[["TrainStep"], Any]]
"""The ``train_step`` or ``test_step`` of a Model, which owns what holds this."""
Measure = Callable[[Any, LabelledBatch, int], Sums]
"""Computes the total and the count of the compiled loss, of outputs and targets of a number of rows."""


class ShardLoss:
    """The loss of one replica's shard, which ``train_step`` or ``test_step`` returns, and computes nothing with."""

    def __init__(self, outputs: Any, batch: LabelledBatch, rows: int, sums: Sums) -> None:
        self.outputs, self.batch, self.rows, self.sums = outputs, batch, rows, sums

    def backward(self) -> NoReturn:
        """Raises a UsageError: Lockstep runs backward, when ``train_step`` has returned."""
        raise UsageError("return what step.loss gave; backward and the update come after train_step")


class TrainStep:
    """One replica's shard of a global batch, and what can be done with it in ``train_step`` and ``test_step``.

    Attributes:
        x, y, sample_weight: the shard's inputs, targets and weights, on the replica's device; the weights may be None.

    Example:
        >>> import lockstep as ls
        >>> class Noisy(ls.Model):
        ...     def train_step(self, step):
        ...         return step.loss(step.forward(step.x + 0.1), step.y)
    """

    def __init__(self, batch: LabelledBatch, rows: int, module: MirroredModule, measure: Measure) -> None:
        self.x, self.y, self.sample_weight = batch
        self._rows, self._module, self._measure = rows, module, measure
        self._loss: ShardLoss | None = None

    def forward(self, x: Any) -> Any:
        """The outputs of this replica's copy of the module: a dict gives keyword arguments, a tuple positional ones."""
        args, kwargs = module_arguments(x)
        return self._module(*args, **kwargs)

    def loss(self, outputs: Any, y: Any, sample_weight: Tensor | None = None) -> ShardLoss:
        """The loss given to ``compile``, and the metrics, of outputs and targets. Call it once, and return its result.

        Args:
            outputs: what the loss and the metrics take as outputs, such as those of several passes in a tuple.
            y: targets of as many rows as ``outputs``.
            sample_weight: one weight per row; None for the shard's own.
        """
        if self._loss is not None:
            raise UsageError("step.loss was called twice in one step; give it the outputs of all passes at once")
        batch = LabelledBatch(self.x, y, self.sample_weight if sample_weight is None else sample_weight)
        lengths = (rows_of(leaf) for _, leaf in named_leaves(y, name="y"))
        rows = next((rows for rows in lengths if rows is not None), self._rows)
        self._loss = ShardLoss(outputs, batch, rows, self._measure(outputs, batch, rows))
        return self._loss

    def __iter__(self) -> NoReturn:
        raise UsageError("the step got a TrainStep instead of a batch; read step.x, step.y and step.sample_weight")


def run_user_step(user_step: UserStep, step: TrainStep) -> ShardLoss:
    """Calls the user's method in a replica, and refuses what would train with other numbers than the loss says."""
    before = _gradients(step._module)
    method = cast("Callable[[TrainStep], Any]", user_step())
    returned, name = method(step), method.__name__
    if not isinstance(returned, ShardLoss) or returned is not step._loss:
        raise UsageError(
            f"{name} returned a {type(returned).__name__}; return what step.loss(outputs, y) gave: its total is "
            "divided by what all replicas count, and then backward and the update run"
        )
    if _gradients(step._module) != before:
        raise UsageError(
            f"{name} changed the gradients of the module; leave backward and the update to Lockstep, which adds up "
            "all replicas' sums first, or write the loop yourself with strategy.run(step, (batch,))"
        )
    return returned


def _gradients(module: MirroredModule) -> list[tuple[int, int] | None]:
    with DisableTorchFunction():  # otherwise the step guard takes this for an access by the step
        gradients = [parameter.grad for parameter in module.parameters()]
    # The version of a tensor rises with each change in place, so nothing is copied to find one.
    return [None if gradient is None else (id(gradient), gradient._version) for gradient in gradients]
