"""Custom training loops: Keras's variables, metrics and optimizers in a step that the user gives ``strategy.run``.

    a weight                a leaf of its own in each replica, so ``loss.backward()`` leaves ``weight.value.grad`` there
    optimizer.apply         waits for all replicas, sums their gradients and updates the weights once
    metric.update_state     counts in the replica; after the run the states of all replicas are added up
    other state of layers   averaged over the rows after the run, as by ``fit``

A model's own ``train_step`` is such a step too, in which gradients are those of the whole batch (``user_step``).

Inside a replica Keras reads and assigns variables in a ``StatelessScope``, which its thread alone sees.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import keras
import torch
from keras.src.backend.common import global_state
from keras.src.backend.common.stateless_scope import get_stateless_scope
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lockstep.collectives.communicator import refuse_to_train
from lockstep.collectives.per_replica import PerReplica
from lockstep.errors import ConfigError, UsageError
from lockstep.integrations.keras.step import Step
from lockstep.integrations.keras.user_step import UserStep
from lockstep.integrations.keras.variables import (
    DefaultGenerators,
    ModelVariables,
    ReplicaVariables,
    RunVariables,
    metrics_of,
    summed,
)
from lockstep.replicas.context import get_replica_context
from lockstep.replicas.owner import Owner
from lockstep.replicas.watcher import Run, Watcher
from lockstep.strategies.base import Strategy
from lockstep.train.batch import replica_of_step

_SCOPE = "stateless_scope"
"""Keras's name for the scope of a thread."""


class CustomSteps(Watcher):
    """Has steps that a strategy runs train its Keras models.

    Attributes:
        models: the models that the strategy has.
        default_generators: the random numbers of layers without a seed.
    """

    def __init__(self, strategy: Strategy) -> None:
        self.models: WeakSet[Any] = WeakSet()
        self.default_generators = DefaultGenerators(strategy)

    def looks_at(self, run: Run) -> Sequence[Watcher]:
        step = getattr(run.fn, "__self__", None)
        if isinstance(step, Step):  # of fit, which does all this by itself
            return ()
        user_step = step if isinstance(step, UserStep) else None
        variables = RunVariables(
            "custom" if user_step is None else "user",
            self.default_generators.generators(),
            lambda: map(ModelVariables, self.models),
            [variable for model in self.models for metric in metrics_of(model) for variable in metric.variables],
        )
        return (_CustomRun(variables, user_step),)


class _CustomRun(Watcher):
    """One run of a step: its replicas have values of their own, which are merged after it."""

    def __init__(self, variables: RunVariables, user_step: UserStep | None) -> None:
        self._variables, self._user_step = variables, user_step

    def run_begins(self, run: Run) -> None:
        # For the run only: with a hook of others in place, mirrored optimizers use no fused kernels.
        self._refusal = register_optimizer_step_pre_hook(_refuse_torch_step)

    @contextmanager
    def in_replica(self, replica: int) -> Iterator[None]:
        step = self._user_step
        with self._variables.in_replica(0.0 if step is None else step.share(replica)) as values:
            values.optimizer_gradients = [] if step is not None and step.is_compared else None
            yield

    def run_ended(self, run: Run, error: BaseException | None) -> None:
        self._refusal.remove()
        if error is not None:
            return
        if self._user_step is None:
            _share_by_rows(run.strategy, self._variables, run.rows)
        if self._user_step is None or not self._user_step.is_compared:
            self._variables.merge(run.strategy)


_custom_steps: WeakKeyDictionary[Strategy, CustomSteps] = WeakKeyDictionary()


def allow_custom_steps(model: Any, strategy: Strategy) -> DefaultGenerators:
    """Has the steps that a strategy runs train a model as ``fit`` would. Returns the strategy's random numbers."""
    if strategy not in _custom_steps:
        _custom_steps[strategy] = CustomSteps(strategy)
        strategy.watchers.append(_custom_steps[strategy])
    steps = _custom_steps[strategy]
    steps.models.add(model)
    steps.default_generators.begin_anew()
    return steps.default_generators


def prepare_in_step(model: Any, args: Any, kwargs: Any) -> None:
    """Before the first call of a model in a step: builds it, and compares its weights with those of other workers.

    Every replica calls it, with the arguments of its call. Warns if all train on one batch, which was not divided.
    """
    context, is_training = replica_of_step(), torch.is_grad_enabled()

    def prepare(calls: list[Any]) -> None:
        first, *other_tensors = [
            [leaf for leaf in keras.tree.flatten(arguments) if keras.ops.is_tensor(leaf)] for arguments in calls
        ]
        for leaf, *same in zip(first, *other_tensors, strict=False) if other_tensors and is_training else ():
            # The same object in all replicas: nobody has divided it.
            if leaf.dim() and len(leaf) > 1 and all(other is leaf for other in same):
                warnings.warn(
                    f"the step calls the model {model.name!r} on one batch of shape {tuple(leaf.shape)} in all "
                    f"{context.num_replicas_in_sync} replicas, and its gradients count once for each; divide it with "
                    "strategy.distribute_dataset(batches), and hand what that yields to strategy.run",
                    stacklevel=2,
                )
        with _without_scope(context.strategy.devices[0].torch_device):
            if not model.built:
                build(model, *calls[0])
            model._distribution.compare_weights(model)

    context.meet(f"the first call of {model.name}", (args, kwargs), prepare)


def build(model: Any, args: Any, kwargs: Any) -> None:
    """Makes the variables of a model for the arguments of its call, whose values it does not read."""
    args, kwargs = keras.tree.map_structure(_symbolic, (tuple(args), kwargs))
    model(*args, **kwargs)


def runs_user_step() -> bool:
    """Whether the replica runs a step of the user's, in which models may be called that the strategy has not seen."""
    scope = get_stateless_scope()
    return isinstance(scope, ReplicaVariables) and scope.kind != "keras"


def _share_by_rows(strategy: Owner, run: RunVariables, rows: Sequence[int | None]) -> None:
    """Weights the replicas of a custom step by the rows of their shards; equally where there are none."""
    if not any(values.assignments for values in run.replicas.values()):
        return
    counts = [1 if count is None else count for count in rows]
    total = int(strategy.reduce("sum", PerReplica(counts)))
    if not total:
        counts, total = [1] * len(counts), strategy.num_replicas_in_sync
    for replica, values in run.replicas.items():
        values.share = counts[replica] / total


def updating_once(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Optimizer.apply``, which in a replica is one update with the sums of all replicas' gradients."""

    @wraps(original)
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        context = get_replica_context()
        if context is None:
            return original(self, grads, trainable_variables)
        step = get_stateless_scope()
        if not isinstance(step, ReplicaVariables):
            raise UsageError(
                f"{self.name}.apply was called in a replica of a strategy that has no Keras model; call "
                "model = distribute(model) in the strategy's scope before strategy.run"
            )
        # A step that is only compared changes nothing, see check_user_step.
        if step.optimizer_gradients is not None:
            step.optimizer_gradients.append(
                [None if gradient is None else gradient.detach().clone() for gradient in grads]
            )
            return None
        refuse_to_train(context.strategy.workers, f"{self.name}.apply")
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        strategy, assigned = context.strategy, [variable for variable in variables if id(variable) in step.assignments]

        @torch.no_grad()
        def update(shares_of_replicas: list[tuple[list[Tensor | None], list[Tensor]]]) -> None:
            gradients = [gradients_of_replica for gradients_of_replica, _ in shares_of_replicas]
            with _without_scope(variables[0]._value.device):
                if assigned:
                    for variable, value in zip(
                        assigned, summed(strategy, [parts for _, parts in shares_of_replicas]), strict=True
                    ):
                        variable.assign(value)
                totals = gradients[0] if step.kind == "user" else _sums(strategy, gradients, variables)
                original(self, totals, variables)

        parts = [step.part(variable) for variable in assigned]
        context.meet(f"{self.name}.apply", (list(grads), parts), update)
        # What the step computes after the update has to see the new weights, and the replica's scope holds the old
        # ones.
        step.forget((*variables, *self.variables))
        return None

    return apply


def _sums(
    strategy: Owner, gradients_of_replicas: Sequence[Sequence[Tensor | None]], variables: Sequence[Any]
) -> list[Tensor | None]:
    """The sums of the replicas' gradients of each variable; None where no replica has one."""
    parts = [
        [
            *(
                torch.zeros_like(variable._value, device=device) if gradient is None else gradient.detach()
                for variable, gradient in zip(variables, gradients, strict=True)
            ),
            torch.tensor([float(gradient is not None) for gradient in gradients], device=device),
        ]
        for gradients, device in zip(
            gradients_of_replicas, (replica_device.torch_device for replica_device in strategy.devices), strict=True
        )
    ]
    *sums, use_counts = summed(strategy, parts)
    return [
        total.to(variable._value.device) if is_used else None
        for total, variable, is_used in zip(sums, variables, use_counts.tolist(), strict=True)
    ]


def refusing_means(original: Callable[..., Any]) -> Callable[..., Any]:
    """``reduce_weighted_values`` of Keras, without the means of a shard, which do not add up to that of the batch."""

    @wraps(original)
    def reduce(values: Any, *args: Any, **kwargs: Any) -> Any:
        reduction = kwargs.get("reduction", args[2] if len(args) > 2 else "sum_over_batch_size")
        scope = get_stateless_scope()
        is_custom = isinstance(scope, ReplicaVariables) and scope.kind == "custom"
        context = get_replica_context() if is_custom and reduction not in (None, "none", "sum") else None
        if context is not None and context.num_replicas_in_sync > 1 and keras.ops.ndim(values):
            raise ConfigError(
                f"a loss with reduction={reduction!r} in a step is the mean of one replica's shard, and the means of "
                "shards do not add up to that of the batch; make it with reduction=None, and give what it returns to "
                "ls.compute_average_loss(losses, global_batch_size=...)"
            )
        return original(values, *args, **kwargs)

    return reduce


def _refuse_torch_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Raises a UsageError if a step updates the weights of a Keras model by an optimizer of torch."""
    step = get_stateless_scope()
    if isinstance(step, ReplicaVariables) and step.holds(
        {id(p) for group in optimizer.param_groups for p in group["params"]}
    ):
        raise UsageError(
            f"torch's {type(optimizer).__name__}.step was called in a replica on the weights of a Keras model, which "
            "have no gradients there; use an optimizer of Keras: optimizer.apply(gradients, model.trainable_variables)"
        )


def of_replica(original: Callable[..., Iterator[tuple[str, Tensor]]]) -> Callable[..., Iterator[tuple[str, Tensor]]]:
    """``named_parameters`` of a layer, which in a replica are the values that its gradients are computed for."""

    @wraps(original)
    def named_parameters(self: Any, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        in_replica = get_replica_context() is not None
        values = {id(variable._value): variable.value for variable in self.variables} if in_replica else {}
        for name, parameter in original(self, *args, **kwargs):
            yield name, values.get(id(parameter), parameter)

    return named_parameters


def _symbolic(leaf: Any) -> Any:
    return (
        keras.KerasTensor(leaf.shape, keras.backend.standardize_dtype(leaf.dtype)) if isinstance(leaf, Tensor) else leaf
    )


@contextmanager
def _without_scope(device: torch.device) -> Iterator[None]:
    """A block in which a thread's variables have their own values, and new ones are made on ``device``."""
    scope = get_stateless_scope()
    global_state.set_global_attribute(_SCOPE, None)
    try:
        with keras.device(str(device)):
            yield
    finally:
        global_state.set_global_attribute(_SCOPE, scope)
