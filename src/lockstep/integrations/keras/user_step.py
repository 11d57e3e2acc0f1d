"""A model's own ``train_step``, ``test_step`` or ``predict_step``, which calls none of Keras's: run in each replica.

It is given the replica's shard, and its numbers are those of the whole batch:

    loss.backward()       leaves the gradients of the whole batch's loss in ``weight.value.grad``
    optimizer.apply       once, for all replicas
    metric.update_state   with the shard; ``metric.result()`` is that of all replicas
    other variables       that the step assigns: averaged over the rows, after it
    numbers it returns    averaged over the rows

``variables`` keeps the values of each replica, and ``custom_loop`` the optimizers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import torch
from keras.src.backend.common.stateless_scope import get_stateless_scope
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lockstep.errors import UsageError
from lockstep.integrations.keras.fixed_draws import compared
from lockstep.integrations.keras.losses import Shard, losses_of_shard
from lockstep.integrations.keras.metrics import averaged, results_of_all
from lockstep.integrations.keras.step import moved
from lockstep.integrations.keras.variables import flattened, parts_like
from lockstep.replicas.context import ReplicaContext
from lockstep.strategies.base import Strategy
from lockstep.train.batch import replica_of_step


def is_user_step(kind: Any, name: str) -> bool:
    """Whether a class's step computes its results without that of Keras, as its code never names it."""
    for base in kind.__mro__[: kind.__mro__.index(keras.Model)]:
        # A step that calls super().train_step has this name among those that its code uses.
        code = getattr(inspect.unwrap(vars(base)[name]), "__code__", None) if name in vars(base) else None
        if code is not None and name not in code.co_names:
            return True
    return False


@dataclass(frozen=True, kw_only=True)
class UserStep:
    """A step that a model's class defines.

    Args:
        step: the method.
        name: of the method, with its class.
        metrics: of the model.
        rows: of the whole batch.
        sizes: the rows that count of each local replica's shard.
        is_compared: whether it changes nothing, and returns the gradients that it gives to optimizers.
    """

    step: Callable[[Any], Any]
    name: str
    metrics: Sequence[Any]
    rows: int
    sizes: Sequence[int]
    is_compared: bool = False

    def run(self, strategy: Strategy, shards: Any) -> tuple[Any, ...]:
        """What the step returns in each local replica. Outside replicas."""
        with results_of_all(self.metrics):
            return tuple(strategy.local_results(strategy.run(self.compute, (shards,))))

    def share(self, replica: int) -> float:
        """The weight of a local replica's means in those of the batch."""
        return self.sizes[replica] / self.rows

    def compute(self, data: Any) -> Any:
        """What the step returns in this replica; numbers are those of the whole batch."""
        context = replica_of_step()
        rows, share = self.sizes[context.local_replica], self.share(context.local_replica)
        shard = Shard(rows=rows, all_rows=self.rows, add=partial(context.all_reduce, "sum"))
        with losses_of_shard(shard), ExitStack() as around:
            if self.is_compared:
                around.enter_context(compared())
            around.enter_context(WholeGradients(context, share))
            results = self.step(moved(data, context))
        if self.is_compared:
            step: Any = get_stateless_scope()
            return step.optimizer_gradients
        return averaged(context, share, results)


class WholeGradients(TorchFunctionMode):
    """Inside, gradients of a Keras model's weights are those of the whole batch: the sum of those of the shards.

    Args:
        context: of the replica.
        share: of this replica's rows in the batch, which its loss is weighted by.
    """

    def __init__(self, context: ReplicaContext, share: float) -> None:
        super().__init__()
        self._context, self._share = context, share
        self._variables: Any = get_stateless_scope()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.backward:
            return self._backward(*args, **(kwargs or {}))
        if func is torch.autograd.grad:
            return self._grad(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        weights = self._variables.weights()
        before = [weight.grad for weight in weights]
        # backward adds to .grad. What is there already is a sum over the replicas, which must not be summed once more.
        for weight in weights:
            weight.grad = None
        with self._variables.summing():
            self._weighted(loss).backward(*args, **kwargs)  # type: ignore[no-untyped-call]
        weights_with_gradient = [weight for weight in weights if weight.grad is not None]
        for weight, gradient in zip(
            weights_with_gradient, self._sums([weight.grad for weight in weights_with_gradient]), strict=True
        ):
            weight.grad = gradient
        for weight, earlier in zip(weights, before, strict=True):
            if earlier is not None:
                weight.grad = earlier if weight.grad is None else earlier + weight.grad

    def _grad(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        weights = {id(weight) for weight in self._variables.weights()}
        of_weights = [at for at, tensor in enumerate(tensors) if id(tensor) in weights]
        if of_weights and kwargs.get("create_graph"):
            raise UsageError(
                "torch.autograd.grad got create_graph=True and weights of the model; replicas do not differentiate "
                "the sums of their gradients"
            )
        if not of_weights:
            return torch.autograd.grad(outputs, inputs, *args, **kwargs)
        outputs = [self._weighted(output) for output in ([outputs] if isinstance(outputs, Tensor) else outputs)]
        with self._variables.summing():
            gradients = list(torch.autograd.grad(outputs, inputs, *args, **kwargs))
        of_weights = [at for at in of_weights if gradients[at] is not None]
        for at, total in zip(of_weights, self._sums([gradients[at] for at in of_weights]), strict=True):
            gradients[at] = total
        return tuple(gradients)

    def _weighted(self, output: Tensor) -> Tensor:
        """Returns what gradients are computed of: a loss, the mean of a shard, times the share; other outputs as is.

        It is weighted before the backward pass, in which synchronised batch norms exchange gradients.
        """
        return output * self._share if output.dim() == 0 else output

    @torch.no_grad()
    def _sums(self, gradients: Sequence[Any]) -> list[Tensor]:
        """Each replica's own sums of the gradients of all replicas."""
        # Zeros and not a product with 0: the mean of no rows is NaN, and so are its gradients.
        contiguous = [gradient.contiguous() if self._share else torch.zeros_like(gradient) for gradient in gradients]
        sums = {dtype: self._context.all_reduce("sum", flat) for dtype, flat in flattened(contiguous).items()}
        return parts_like(sums, contiguous)
