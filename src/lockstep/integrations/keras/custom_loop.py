"""Custom training loops: Keras's variables, metrics and optimizers in a step that the user gives ``strategy.run``.

    a weight                a leaf of its own in each replica, so ``loss.backward()`` leaves ``weight.value.grad`` there
    optimizer.apply         waits for all replicas, sums their gradients and updates the weights once
    metric.update_state     counts in the replica; after the run the states of all replicas are added up
    other state of layers   averaged over the rows after the run, as by ``fit``

A model's own ``train_step`` is such a step too, in which gradients are those of the whole batch (``own_step``).

Inside a replica Keras reads and assigns variables in a ``StatelessScope``, which its thread alone sees.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import keras
import torch
from keras.src.backend.common import global_state
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.backend.torch.layer import TorchLayer
from keras.src.losses import loss as keras_losses
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lockstep.collectives.per_replica import PerReplica
from lockstep.errors import ConfigError, UsageError
from lockstep.integrations.keras.losses import current_shard
from lockstep.integrations.keras.metrics import metrics_of
from lockstep.integrations.keras.own_step import OwnStep
from lockstep.integrations.keras.step import Step
from lockstep.integrations.keras.torch_modules import buffer_variables
from lockstep.integrations.keras.variables import DefaultGenerators, seed_of_replica, summed
from lockstep.replicas.context import ReplicaContext, get_replica_context
from lockstep.strategies.base import Strategy
from lockstep.train.batch import replica_of_step

_SCOPE = "stateless_scope"
"""Keras's name for the scope of a thread."""
_SEED_NAME = "seed_generator_state"
"""Keras's name for the variable of every seed generator."""


class StepVariables(keras.StatelessScope):  # type: ignore[misc]  # Keras has no types
    """The values that variables have in one replica during one step. A value is made when it is first asked for.

    In a ``merge_call``, which runs once for all replicas, variables have their own values.

    Args:
        context: of the replica.
        keeps: whether a distributed model keeps a variable, such as statistics.
        default_seed: the variable of the replica's own default seed generator.
        sums_gradients: whether gradients are those of all replicas already in the step, as in a model's own.
        is_compared: whether nothing is to be updated with the gradients, which are compared only.

    Attributes:
        assigned: the variables that the step has assigned, by id.
        compared: the gradients that optimizers were given; None where they are not compared.
        sums_gradients: as given.
    """

    def __init__(
        self,
        context: ReplicaContext,
        keeps: Callable[[Any], bool],
        default_seed: Any,
        *,
        sums_gradients: bool,
        is_compared: bool,
    ) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        self.assigned: dict[int, Any] = {}
        self.compared: list[list[Tensor | None]] | None = [] if is_compared else None
        self.sums_gradients = sums_gradients
        self._context, self._keeps, self._default_seed = context, keeps, default_seed
        self._is_summing = False
        self._known: dict[int, Any] = {}  # a variable that is gone would leave its id to another one

    def get_current_value(self, variable: Any) -> Tensor | None:
        """Called by Keras for a variable's value; None is for the variable's own."""
        return None if self._is_direct(variable) or variable._value is None else self._value(variable)

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Called by Keras when a variable is assigned. Raises a UsageError if the replicas' values cannot be merged."""
        variable, value = update[0], update[1].detach()
        if self._is_direct(variable):
            variable._direct_assign(value)
            return
        is_merged = variable.aggregation != "none" or _is_seed(variable) or self._keeps(variable)
        if variable.trainable and self.sums_gradients:
            value = self._with_gradient(value)
        elif self.sums_gradients and not (_is_seed(variable) or self._keeps(variable)):
            raise UsageError(
                f"the model's own step assigns the variable {variable.path!r}, which the model does not know; make it, "
                "or the metric that it belongs to, in the __init__ of the model"
            )
        elif variable.trainable or not is_merged:
            what = "is trained" if variable.trainable else "has aggregation='none' and is in no distributed model"
            raise UsageError(
                f"the step assigns the variable {variable.path!r} in each replica, and it {what}; assign it outside "
                "strategy.run, or give a variable that is not trained aggregation='sum', 'mean' or 'only_first_replica'"
            )
        self._known[id(variable)] = self.assigned[id(variable)] = variable
        self.state_mapping[id(variable)] = value

    def holds(self, tensors: set[int]) -> bool:
        """Whether the step has used a variable whose value or own value is one of these tensors, given by their ids."""
        values = (*self.state_mapping.values(), *(each._value for each in self._known.values()))
        return any(id(each) in tensors for each in values)

    def forget(self, variables: Sequence[Any]) -> None:
        """Has the next value of each variable be its own at that time, without a gradient."""
        for each in variables:
            self.state_mapping.pop(id(each), None)
            self.assigned.pop(id(each), None)

    def weights(self) -> list[Tensor]:
        """The values that gradients are computed for, of the trainable variables that the step has used."""
        used = (id(each) for each in self._known.values() if each.trainable)
        return [self.state_mapping[each] for each in used if each in self.state_mapping]

    @contextmanager
    def summing(self) -> Iterator[None]:
        """A block that computes gradients and sums those of all replicas."""
        self._is_summing = True
        try:
            yield
        finally:
            self._is_summing = False

    def part(self, variable: Any, share: float) -> Tensor:
        """What is added up over the replicas for a variable. ``share`` is that of this replica's rows in the batch."""
        value = self._value(variable).detach()
        if variable.aggregation == "sum":  # a model's own step is called with a row that does not count
            return value if share or not self.sums_gradients else torch.zeros_like(value)
        if _is_seed(variable):
            value = value - self._first_value(variable)
        elif value.is_floating_point() and variable.aggregation != "only_first_replica":
            return value * share if share else torch.zeros_like(value)  # the mean of no rows is NaN
        return value if self._context.replica_id_in_sync_group == 0 else torch.zeros_like(value)

    def _value(self, variable: Any) -> Tensor:
        if id(variable) not in self.state_mapping:
            self._known[id(variable)] = variable
            self.state_mapping[id(variable)] = self._first_value(variable)
        value: Tensor = self.state_mapping[id(variable)]
        return value

    def _first_value(self, variable: Any) -> Tensor:
        value: Tensor = variable._value.detach().to(self._context.device.torch_device)
        if variable.aggregation == "sum":
            return torch.zeros_like(value)
        if _is_seed(variable):
            return seed_of_replica(value, self._context.replica_id_in_sync_group)
        return self._with_gradient(value) if variable.trainable and value.is_floating_point() else value

    def _with_gradient(self, value: Tensor) -> Tensor:
        value.requires_grad_()
        if self.sums_gradients:
            value.register_hook(self._refuse_shard)  # type: ignore[no-untyped-call]
        return value

    def _refuse_shard(self, _: Tensor) -> None:
        if not self._is_summing:
            raise UsageError(
                "torch.autograd.backward was called in a model's own step, where the gradients of the replicas are "
                "not summed; call loss.backward() or torch.autograd.grad"
            )

    def _is_direct(self, variable: Any) -> bool:
        return variable is self._default_seed or get_replica_context() is None


class CustomSteps:
    """Surrounds the steps that a strategy runs, once it has a Keras model.

    Attributes:
        models: the models that the strategy has.
        default_generators: the random numbers of layers without a seed.
    """

    def __init__(self, strategy: Strategy) -> None:
        self.models: WeakSet[Any] = WeakSet()
        self.default_generators = DefaultGenerators(strategy)
        strategy.surround_steps(self._surround)

    @contextmanager
    def _surround(
        self, strategy: Strategy, fn: Callable[..., Any], rows: Sequence[int | None]
    ) -> Iterator[Callable[[], AbstractContextManager[None]]]:
        """Around a run of ``fn``. Yields the block around it in each replica; afterwards merges what they assigned."""
        step = getattr(fn, "__self__", None)
        if isinstance(step, Step):  # of fit, which does all this by itself
            yield nullcontext
            return
        own_step = step if isinstance(step, OwnStep) else None
        generators = self.default_generators.generators()
        steps: dict[int, StepVariables] = {}
        kept: set[int] = set()

        def keeps(variable: Any) -> bool:
            if id(variable) not in kept:  # at first none is, and a model may be built in the step
                for model in self.models:
                    of_metrics = (each for metric in metrics_of(model) for each in metric.variables)
                    owned = (*model.non_trainable_variables, *of_metrics, *buffer_variables(model))
                    kept.update(id(each) for each in owned)
            return id(variable) in kept

        @contextmanager
        def in_replica() -> Iterator[None]:
            context = replica_of_step()
            generator = generators[context.local_replica]
            global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, generator)  # of this thread
            steps[context.local_replica] = StepVariables(
                context,
                keeps,
                generator.state,
                sums_gradients=own_step is not None,
                is_compared=own_step is not None and own_step.is_compared,
            )
            with keras.device(str(context.device.torch_device)), steps[context.local_replica]:
                yield

        # For the run only: with a hook of others in place, mirrored optimizers use no fused kernels.
        watched = register_optimizer_step_pre_hook(_refuse_torch_step)
        try:
            yield in_replica
        finally:
            watched.remove()
        if own_step is None or not own_step.is_compared:
            sizes = rows if own_step is None else own_step.sizes
            _merge(strategy, [steps[replica] for replica in sorted(steps)], sizes)


_custom_steps: WeakKeyDictionary[Strategy, CustomSteps] = WeakKeyDictionary()


def allow_custom_steps(model: Any, strategy: Strategy) -> DefaultGenerators:
    """Has the steps that a strategy runs train a model as ``fit`` would. Returns the strategy's random numbers."""
    if strategy not in _custom_steps:
        _custom_steps[strategy] = CustomSteps(strategy)
    steps = _custom_steps[strategy]
    steps.models.add(model)
    steps.default_generators.begin_anew()
    return steps.default_generators


def prepare_in_step(model: Any, args: Any, kwargs: Any) -> None:
    """Before the first call of a model in a step: builds it, and compares its weights with those of other workers.

    Every replica calls it, with the arguments of its call. Warns if all train on one batch, which was not divided.
    """
    context, is_training = replica_of_step(), torch.is_grad_enabled()

    def prepare(given: list[Any]) -> None:
        first, *others = [[leaf for leaf in keras.tree.flatten(each) if keras.ops.is_tensor(leaf)] for each in given]
        for leaf, *same in zip(first, *others, strict=False) if others and is_training else ():
            if leaf.dim() and len(leaf) > 1 and all(other is leaf for other in same):
                warnings.warn(
                    f"the step calls the model {model.name!r} on one batch of shape {tuple(leaf.shape)} in all "
                    f"{context.num_replicas_in_sync} replicas, and its gradients count once for each; divide it with "
                    "strategy.distribute_dataset(batches), and hand what that yields to strategy.run",
                    stacklevel=2,
                )
        args, kwargs = keras.tree.map_structure(_symbolic, given[0])
        with _without_scope(context.strategy.devices[0].torch_device):
            if not model.built:
                model(*args, **kwargs)
            model._distribution.compare_weights(model)

    context.meet(f"the first call of {model.name}", (args, kwargs), prepare)


@torch.no_grad()
def _merge(strategy: Strategy, steps: Sequence[StepVariables], rows: Sequence[int | None]) -> None:
    """Brings what the steps of all replicas have assigned to the variables themselves."""
    assigned = {key: each for step in steps for key, each in step.assigned.items()}
    if not assigned:
        return
    counts = [1 if each is None else each for each in rows]
    total = int(strategy.reduce("sum", PerReplica(counts)))
    if not total:
        counts, total = [1] * len(counts), strategy.num_replicas_in_sync
    parts = [
        [step.part(each, count / total) for each in assigned.values()]
        for step, count in zip(steps, counts, strict=True)
    ]
    for each, value in zip(assigned.values(), summed(strategy, parts), strict=True):
        if each.aggregation == "sum" or _is_seed(each):
            each.assign_add(value)
        else:
            each.assign(value)


def _updating_once(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Optimizer.apply``, which in a replica is one update with the sums of all replicas' gradients."""

    @wraps(original)
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        context = get_replica_context()
        if context is None:
            return original(self, grads, trainable_variables)
        step = get_stateless_scope()
        if not isinstance(step, StepVariables):
            raise UsageError(
                f"{self.name}.apply was called in a replica of a strategy that has no Keras model; call "
                "model = distribute(model) in the strategy's scope before strategy.run"
            )
        if step.compared is not None:
            step.compared.append([None if each is None else each.detach().clone() for each in grads])
            return None
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        strategy, shard = context.strategy, current_shard.get()
        assigned = [each for each in variables if id(each) in step.assigned]

        @torch.no_grad()
        def update(given: list[tuple[list[Tensor | None], list[Tensor]]]) -> None:
            gradients = [each for each, _ in given]
            with _without_scope(variables[0]._value.device):
                if assigned:
                    for each, value in zip(assigned, summed(strategy, [parts for _, parts in given]), strict=True):
                        each.assign(value)
                own = gradients[0] if step.sums_gradients else _sums(strategy, gradients, variables)
                original(self, own, variables)

        parts = [step.part(each, shard.share) for each in assigned if shard is not None]
        context.meet(f"{self.name}.apply", (list(grads), parts), update)
        step.forget((*variables, *self.variables))
        return None

    return apply


def _sums(
    strategy: Strategy, given: Sequence[Sequence[Tensor | None]], variables: Sequence[Any]
) -> list[Tensor | None]:
    """The sums of the replicas' gradients of each variable; None where no replica has one."""
    parts = [
        [
            *(
                torch.zeros_like(each._value) if gradient is None else gradient.detach()
                for each, gradient in zip(variables, own, strict=True)
            ),
            torch.tensor([float(gradient is not None) for gradient in own]),
        ]
        for own in given
    ]
    *sums, used = summed(strategy, parts)
    return [
        each.to(variable._value.device) if is_used else None
        for each, variable, is_used in zip(sums, variables, used.tolist(), strict=True)
    ]


def _refusing_means(original: Callable[..., Any]) -> Callable[..., Any]:
    """``reduce_weighted_values`` of Keras, without the means of a shard, which do not add up to that of the batch."""

    @wraps(original)
    def reduce(values: Any, *args: Any, **kwargs: Any) -> Any:
        reduction = kwargs.get("reduction", args[2] if len(args) > 2 else "sum_over_batch_size")
        own = isinstance(get_stateless_scope(), StepVariables) and current_shard.get() is None
        context = get_replica_context() if own and reduction not in (None, "none", "sum") else None
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
    if isinstance(step, StepVariables) and step.holds(
        {id(p) for each in optimizer.param_groups for p in each["params"]}
    ):
        raise UsageError(
            f"torch's {type(optimizer).__name__}.step was called in a replica on the weights of a Keras model, which "
            "have no gradients there; use an optimizer of Keras: optimizer.apply(gradients, model.trainable_variables)"
        )


def _of_replica(original: Callable[..., Iterator[tuple[str, Tensor]]]) -> Callable[..., Iterator[tuple[str, Tensor]]]:
    """``named_parameters`` of a layer, which in a replica are the values that its gradients are computed for."""

    @wraps(original)
    def named_parameters(self: Any, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        in_replica = get_replica_context() is not None
        values = {id(each._value): each.value for each in self.variables} if in_replica else {}
        for name, parameter in original(self, *args, **kwargs):
            yield name, values.get(id(parameter), parameter)

    return named_parameters


def _is_seed(variable: Any) -> bool:
    return variable.name == _SEED_NAME  # type: ignore[no-any-return]


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


# Keras has no other place between a gradient and its use, nor between the values of a loss and their mean. Outside
# replicas nothing changes.
for _optimizer in (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer):
    _optimizer.apply = _updating_once(_optimizer.apply)
keras_losses.reduce_weighted_values = _refusing_means(keras_losses.reduce_weighted_values)
TorchLayer.named_parameters = _of_replica(TorchLayer.named_parameters)  # which zero_grad and clip_grad_norm_ go by
