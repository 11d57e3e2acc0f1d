"""A model's own ``train_step``, ``test_step`` or ``predict_step``, which calls none of Keras's: run in each replica.

It is given the replica's shard, and its numbers are those of the whole batch:

    loss.backward()       leaves the gradients of the whole batch's loss in ``weight.value.grad``
    optimizer.apply       once, for all replicas
    metric.update_state   with the shard; ``metric.result()`` is that of all replicas
    other variables       that the step assigns: averaged over the rows, after it
    numbers it returns    averaged over the rows

``custom_loop`` keeps the variables of each replica.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import torch
from keras.src.backend.common.stateless_scope import get_stateless_scope
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lockstep._torch_compat import tree_flatten, tree_unflatten
from lockstep.errors import UsageError
from lockstep.integrations.keras.losses import Shard, current_shard, is_compared, losses_of_shard
from lockstep.integrations.keras.step import moved
from lockstep.integrations.keras.variables import flattened, parts_like, summed
from lockstep.replicas.context import ReplicaContext, get_replica_context
from lockstep.replicas.rng.mode import is_random
from lockstep.strategies.base import Strategy
from lockstep.train.batch import replica_of_step


def is_own_step(kind: Any, name: str) -> bool:
    """Whether a class's step computes its results without that of Keras, as its code never names it."""
    for each in kind.__mro__[: kind.__mro__.index(keras.Model)]:
        code = getattr(inspect.unwrap(vars(each)[name]), "__code__", None) if name in vars(each) else None
        if code is not None and name not in code.co_names:
            return True
    return False


def metrics_of(model: Any) -> list[Any]:
    """The metrics that a model lists or holds."""
    return [*{id(each): each for each in (*model.metrics, *model._metrics)}.values()]


@dataclass(frozen=True, kw_only=True)
class OwnStep:
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
        with _results_of_all(self.metrics):
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
                around.enter_context(_compared())
            around.enter_context(WholeGradients(context, share))
            results = self.step(moved(data, context))
        if self.is_compared:
            step: Any = get_stateless_scope()
            return step.compared
        leaves, structure = tree_flatten(results)
        return tree_unflatten(_averaged(context, share, leaves), structure)


@contextmanager
def _compared() -> Iterator[None]:
    """A block in which the results for a row do not depend on the rows beside it, nor on what is drawn."""
    token = is_compared.set(True)
    try:
        with _FixedDraws():
            yield
    finally:
        is_compared.reset(token)


class _FixedDraws(TorchFunctionMode):
    """Inside, random numbers are 0.5, or 0 for integers, dropout leaves all elements, and rows are not shuffled."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_random(func) and "dropout" in func.__name__ and args:
            return args[0]
        kwargs = kwargs or {}
        if func in (torch.argsort, Tensor.argsort):  # by which Keras shuffles
            return _in_order(*args, **kwargs)
        drawn = func(*args, **kwargs)
        if not is_random(func) or not isinstance(drawn, Tensor) or drawn.requires_grad:
            return drawn
        return torch.arange(drawn.numel(), device=drawn.device) if func is torch.randperm else drawn.fill_(0.5)


def _in_order(input: Tensor, dim: int = -1, descending: bool = False, stable: bool = True) -> Tensor:
    """``argsort``, which leaves equal numbers in their order."""
    return torch.sort(input, dim=dim, descending=descending, stable=True).indices


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
        before = [each.grad for each in weights]
        for each in weights:
            each.grad = None
        with self._variables.summing():
            self._weighted(loss).backward(*args, **kwargs)  # type: ignore[no-untyped-call]
        used = [each for each in weights if each.grad is not None]
        for each, gradient in zip(used, self._sums([each.grad for each in used]), strict=True):
            each.grad = gradient
        for each, earlier in zip(weights, before, strict=True):
            if earlier is not None:
                each.grad = earlier if each.grad is None else earlier + each.grad

    def _grad(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        given = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        weights = {id(each) for each in self._variables.weights()}
        of_weights = [at for at, each in enumerate(given) if id(each) in weights]
        if of_weights and kwargs.get("create_graph"):
            raise UsageError(
                "torch.autograd.grad got create_graph=True and weights of the model; replicas do not differentiate "
                "the sums of their gradients"
            )
        if not of_weights:
            return torch.autograd.grad(outputs, inputs, *args, **kwargs)
        outputs = [self._weighted(each) for each in ([outputs] if isinstance(outputs, Tensor) else outputs)]
        with self._variables.summing():
            gradients = list(torch.autograd.grad(outputs, inputs, *args, **kwargs))
        of_weights = [at for at in of_weights if gradients[at] is not None]
        for at, total in zip(of_weights, self._sums([gradients[at] for at in of_weights]), strict=True):
            gradients[at] = total
        return tuple(gradients)

    def _weighted(self, output: Tensor) -> Tensor:
        """What gradients are computed of: a loss, which is the mean of a shard, times its share; other outputs as is.

        Before the backward, in which synchronised batch norms exchange gradients.
        """
        return output * self._share if output.dim() == 0 else output

    @torch.no_grad()
    def _sums(self, gradients: Sequence[Any]) -> list[Tensor]:
        """Each replica's own sums of the gradients of all replicas."""
        own = [each.contiguous() if self._share else torch.zeros_like(each) for each in gradients]
        sums = {dtype: self._context.all_reduce("sum", each) for dtype, each in flattened(own).items()}
        return parts_like(sums, own)


def _averaged(context: ReplicaContext, share: float, leaves: Sequence[Any]) -> list[Any]:
    """Replaces the floating-point numbers among some values by their means over all replicas' rows."""
    numbers = {
        at: leaf
        for at, leaf in enumerate(leaves)
        if isinstance(leaf, float) or (isinstance(leaf, Tensor) and leaf.dim() == 0 and leaf.is_floating_point())
    }
    if not numbers:
        return list(leaves)
    values = torch.stack([torch.as_tensor(each).detach().cpu().double() for each in numbers.values()])
    means = context.all_reduce("sum", values * share if share else torch.zeros_like(values))
    found = {
        at: mean.to(leaf.device, leaf.dtype) if isinstance(leaf, Tensor) else float(mean)
        for (at, leaf), mean in zip(numbers.items(), means, strict=True)
    }
    return [found.get(at, leaf) for at, leaf in enumerate(leaves)]


@contextmanager
def _results_of_all(metrics: Sequence[Any]) -> Iterator[None]:
    """A block in which ``result`` of these metrics, called in a replica, is that of all replicas."""
    with ExitStack() as after:
        for each in metrics:
            object.__setattr__(each, "result", partial(_result_of_all, each, each.result))  # Keras tracks nothing here
            after.callback(object.__delattr__, each, "result")
        yield


def _result_of_all(metric: Any, own: Callable[[], Any]) -> Any:
    context, step = get_replica_context(), get_stateless_scope()
    if context is None:
        return own()

    def combine(given: list[list[Tensor]]) -> Any:
        totals = zip(metric.variables, summed(context.strategy, given), strict=True)
        return metric.stateless_result(
            [each.value + total if each.aggregation == "sum" else total for each, total in totals]
        )

    shard = current_shard.get()
    with torch.no_grad():
        parts = [step.part(each, shard.share) for each in metric.variables if shard is not None]
        return context.meet(f"{metric.name}.result", parts, combine)
