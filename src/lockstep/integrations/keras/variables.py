"""Each replica's values of the variables of models, and what becomes of them after a step.

    trainable           a leaf of its own in each replica; the optimizer updates the variable once, outside the replicas
    metrics             start at 0 in every replica; what they come to is added
    seed generators     replica 0 has the seeds that Keras alone would have, and every other one seeds of its own
    others that change  averaged over the rows, as the statistics of batch norms; integers are replica 0's. A variable
                        with an ``aggregation`` of "sum" or "only_first_replica" goes by that
    trainable, assigned in the forward pass: the same, before the optimizer updates them

Inside a replica Keras reads and assigns variables in a ``StatelessScope``, which its thread alone sees.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import keras
import torch
from keras.src.backend.common import global_state
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR
from torch import Tensor

from lockstep._torch_compat import DisableTorchFunction
from lockstep.collectives.per_replica import PerReplica
from lockstep.errors import UsageError
from lockstep.integrations.keras.torch_modules import buffer_variables
from lockstep.replicas.context import ReplicaContext, get_replica_context
from lockstep.replicas.owner import Owner
from lockstep.strategies.base import Strategy
from lockstep.train.batch import replica_of_step

StepKind = Literal["keras", "user", "custom"]
"""A step that Keras computes, one that the model's class computes by itself, or a function given ``strategy.run``."""
_SEED_STRIDE = 0x9E3779B1  # 2**32 over the golden ratio: the seeds of different replicas lie far from each other
_SEED_NAME = "seed_generator_state"
"""Keras's name for the variable of every seed generator."""


def seed_offset(number: int) -> int:
    """What is added to the seeds of replica 0 for those of another one."""
    return number * _SEED_STRIDE % 2**32


def seed_of_replica(state: Tensor, number: int) -> Tensor:
    """The state [2] of a seed generator in a replica, from that of the whole program."""
    offset = torch.tensor([seed_offset(number), 0]).to(torch.int32)  # as Keras's seeds, modulo 2**32
    return state + offset.to(state.device, state.dtype)


class DefaultGenerators:
    """The random numbers of layers that give no seed: torch's in the replicas, and Keras's global seed generators.

    There is one of each for each local replica. Keras makes a seed generator in each thread, with a seed from Python's
    generator. Inside a ``StatelessScope`` its state would not be kept, so that it gave the same numbers at every step.
    """

    def __init__(self, strategy: Strategy) -> None:
        # And not the strategy, which ends with the last program that holds it.
        self._torch, self._number = strategy.generators, len(strategy.devices)
        self._first = strategy.workers.first_replica
        self.begin_anew()

    def begin_anew(self) -> None:
        """Begins with numbers that follow from the present state of torch's generator, as does torch's own.

        So a program that calls ``keras.utils.set_random_seed`` has the same numbers again in one process.
        """
        self._seed = torch.initial_seed()
        self._begin(zlib.crc32(torch.get_rng_state().numpy().tobytes()))

    def continue_as_restored(self) -> None:
        """Keeps the present numbers although a checkpoint has set torch's generator, and with it torch's seed."""
        self._seed = torch.initial_seed()

    def generators(self) -> Sequence[Any]:
        """The generators; new ones after ``keras.utils.set_random_seed``, which sets torch's seed too."""
        if torch.initial_seed() != self._seed:
            self._seed = torch.initial_seed()
            self._begin(self._seed)
        return self._generators

    def _begin(self, seed: int) -> None:
        self._torch.begin(seed, self._first)
        seeds = ((seed + seed_offset(replica)) % 2**31 for replica in range(self._first, self._first + self._number))
        self._generators = [keras.random.SeedGenerator(replica_seed) for replica_seed in seeds]


def metrics_of(model: Any) -> list[Any]:
    """The metrics that a model lists or holds."""
    # A model with a property ``metrics`` of its own may leave its loss tracker out, and it is updated all the same.
    metrics = (*model.metrics, *model._metrics, model._loss_tracker)
    return [*{id(metric): metric for metric in metrics if metric is not None}.values()]


class ModelVariables:
    """The variables of a model, by what becomes of them in a step.

    Attributes:
        trainable: those that the optimizer updates.
        metrics: the states of metrics.
        seeds: the states of seed generators.
        statistics: what else layers may read or assign.
    """

    def __init__(self, model: Any) -> None:
        self.trainable = list(model.trainable_variables)
        self.metrics = [*{id(state): state for metric in metrics_of(model) for state in metric.variables}.values()]
        self.seeds = [generator.state for layer in model._flatten_layers() for generator in layer._seed_generators]
        first = {id(variable) for variable in (*self.trainable, *self.metrics, *self.seeds)}
        owned_by_layers = (*model.non_trainable_variables, *buffer_variables(model))
        self.statistics = [variable for variable in owned_by_layers if id(variable) not in first]

    @property
    def of_layers(self) -> list[Any]:
        """All variables that layers may read or assign, but for the default seed generators."""
        return [*self.trainable, *self.statistics, *self.metrics, *self.seeds]


class RunVariables:
    """The values that variables have in each local replica during one run.

    Args:
        kind: what the replicas run.
        generators: the default seed generator of each local replica.
        models: makes a list of the variables of the models that the run may assign.
        metrics: the variables that are states of metrics.

    Attributes:
        kind: as given.
        replicas: the values in each replica, by its local number.
    """

    def __init__(
        self,
        kind: StepKind,
        generators: Sequence[Any],
        models: Callable[[], Iterable[ModelVariables]],
        metrics: Iterable[Any],
    ) -> None:
        self.kind: StepKind = kind
        self.replicas: dict[int, ReplicaVariables] = {}
        self.metrics = {id(variable): variable for variable in metrics}
        self._generators, self._models = generators, models
        self._state_ids: set[int] = set()

    @contextmanager
    def in_replica(self, share: float = 0.0) -> Iterator[ReplicaVariables]:
        """A block in the step of a replica in which variables have its values; ``share`` is that of its rows."""
        context = replica_of_step()
        generator = self._generators[context.local_replica]
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, generator)  # of this thread
        values = self.replicas[context.local_replica] = ReplicaVariables(self, context, generator.state, share)
        with keras.device(str(context.device.torch_device)), values:
            yield values

    def keeps(self, variable: Any) -> bool:
        """Whether one of the models keeps a variable that is not trained, such as statistics."""
        if id(variable) not in self._state_ids:  # at first none is, and a model may be built in the step
            for model in self._models():
                self._state_ids.update(id(state) for state in (*model.metrics, *model.seeds, *model.statistics))
        return id(variable) in self._state_ids

    @torch.no_grad()
    def sums(self, strategy: Owner, weights: Sequence[Any] = ()) -> tuple[list[Tensor], list[tuple[Any, Tensor]]]:
        """Adds up the gradients of all replicas for ``weights``, and the parts of the variables that they assigned."""
        values = [self.replicas[replica] for replica in sorted(self.replicas)]
        assignments = [*{key: variable for scope in values for key, variable in scope.assignments.items()}.values()]
        parts = [[*scope.weighted_gradients(weights), *map(scope.part, assignments)] for scope in values]
        variables = [*weights, *assignments]
        totals = summed(strategy, parts) if variables else []
        totals = [total.to(variable.value.device) for variable, total in zip(variables, totals, strict=True)]
        return totals[: len(weights)], list(zip(assignments, totals[len(weights) :], strict=True))

    @torch.no_grad()
    def merge(self, strategy: Owner, weights: Sequence[Any] = ()) -> list[Tensor | None]:
        """Assigns to the variables themselves what the steps of all replicas have assigned. Outside replicas.

        Returns the sums of the gradients for ``weights``; None where no local replica has one.
        """
        gradients, sums = self.sums(strategy, weights)
        for variable, total in sums:
            variable.assign(variable.value + total if self.adds_up(variable) or is_seed(variable) else total)
        uses = (
            any(scope.gradients[index] is not None for scope in self.replicas.values()) for index in range(len(weights))
        )
        return [gradient if is_used else None for gradient, is_used in zip(gradients, uses, strict=True)]

    def adds_up(self, variable: Any) -> bool:
        """Whether the changes of a variable in the replicas are added, not averaged."""
        return variable.aggregation == "sum" or id(variable) in self.metrics


class ReplicaVariables(keras.StatelessScope):  # type: ignore[misc]  # Keras has no types
    """The values that variables have in one replica during one step. A value is made when it is first asked for.

    In a ``merge_call``, which runs once for all replicas, variables have their own values.

    Args:
        run: the run of all replicas.
        context: of the replica.
        default_seed: the variable of the replica's own default seed generator.
        share: of this replica's rows in the batch.

    Attributes:
        kind: what the replica runs.
        share: as given; the run of a custom step sets it afterwards.
        default_seed: as given.
        assignments: the variables that the step has assigned, by id.
        gradients: those of the step, where Keras computes it; for the optimizer's variables, in order.
        results: what the model's own ``compute_metrics`` returns, of all replicas; None where Keras's does.
        optimizer_gradients: those that optimizers were given; None where they are not compared.
    """

    def __init__(self, run: RunVariables, context: ReplicaContext, default_seed: Any, share: float) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        self.kind, self.share, self.default_seed = run.kind, share, default_seed
        self.assignments: dict[int, Any] = dict(run.metrics) if run.kind == "keras" else {}
        self.gradients: Sequence[Tensor | None] = ()
        self.results: Any = None
        self.optimizer_gradients: list[list[Tensor | None]] | None = None
        self._run, self._context = run, context
        self._is_summing = False
        self._variables_by_id: dict[int, Any] = {}  # a variable that is gone would leave its id to another one

    def get_current_value(self, variable: Any) -> Tensor | None:
        """Called by Keras for a variable's value; None is for the variable's own."""
        return None if self._is_direct(variable) or variable._value is None else self.value(variable)

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Called by Keras when a variable is assigned. Raises a UsageError if the replicas' values cannot be merged."""
        variable, value = update[0], update[1].detach()
        if self._is_direct(variable):
            variable._direct_assign(value)
            return
        is_merged = (
            self._run.keeps(variable)
            or (is_seed(variable) and self.kind != "keras")
            or (variable.aggregation != "none" and self.kind == "custom")
        )
        if variable.trainable and self.kind != "custom":
            value = self._with_gradient(value)
        elif not is_merged and self.kind != "custom":
            raise UsageError(
                f"a replica has assigned the variable {variable.path!r}, which the model does not know; make it, or "
                "the metric or seed generator that it belongs to, in the __init__ of a layer or of the model"
            )
        elif variable.trainable or not is_merged:
            reason = "is trained" if variable.trainable else "has aggregation='none' and is in no distributed model"
            raise UsageError(
                f"the step assigns the variable {variable.path!r} in each replica, and it {reason}; assign it outside "
                "strategy.run, or give a variable that is not trained aggregation='sum', 'mean' or 'only_first_replica'"
            )
        self._variables_by_id[id(variable)] = self.assignments[id(variable)] = variable
        self.state_mapping[id(variable)] = value

    def holds(self, tensors: set[int]) -> bool:
        """Whether the step has used a variable whose value or own value is one of these tensors, given by their ids."""
        values = (*self.state_mapping.values(), *(variable._value for variable in self._variables_by_id.values()))
        return any(id(value) in tensors for value in values)

    def forget(self, variables: Sequence[Any]) -> None:
        """Drops the replica's values of some variables: the next one is the variable's own, without a gradient."""
        for variable in variables:
            self.state_mapping.pop(id(variable), None)
            self.assignments.pop(id(variable), None)

    def weights(self) -> list[Tensor]:
        """The values that gradients are computed for, of the trainable variables that the step has used."""
        keys = (id(variable) for variable in self._variables_by_id.values() if variable.trainable)
        return [self.state_mapping[key] for key in keys if key in self.state_mapping]

    @contextmanager
    def summing(self) -> Iterator[None]:
        """A block that computes gradients and sums those of all replicas."""
        self._is_summing = True
        try:
            yield
        finally:
            self._is_summing = False

    def part(self, variable: Any) -> Tensor:
        """What is added up over the replicas for a variable."""
        value, is_first = self.value(variable).detach(), self._context.replica_id_in_sync_group == 0
        if self._run.adds_up(variable):  # a step of a model is called with a row that does not count
            counts = self.share or self.kind == "custom"
            return value - self._first_value(variable).detach() if counts else torch.zeros_like(value)
        if is_seed(variable):
            return value - self._first_value(variable) if is_first else torch.zeros_like(value)
        if value.is_floating_point() and variable.aggregation != "only_first_replica":
            # Each replica's part of the mean over all rows.
            return value * self.share if self.share else torch.zeros_like(value)  # the mean of no rows is NaN
        return value if is_first else torch.zeros_like(value)

    def weighted_gradients(self, weights: Sequence[Any]) -> list[Tensor]:
        """The gradients of the step for some variables, of a loss that is weighted by the share of the rows."""
        return [
            gradient if gradient is not None and self.share else torch.zeros_like(self.value(variable))
            for variable, gradient in zip(weights, self.gradients, strict=True)
        ]

    def value(self, variable: Any) -> Tensor:
        """The value of a variable, which gradients are computed for if it is trainable."""
        if id(variable) not in self.state_mapping:
            self._variables_by_id[id(variable)] = variable
            with DisableTorchFunction():  # the replica's function modes would only pass on some thousand calls
                self.state_mapping[id(variable)] = self._first_value(variable)
        value: Tensor = self.state_mapping[id(variable)]
        return value

    def _first_value(self, variable: Any) -> Tensor:
        value: Tensor = variable._value.detach().to(self._context.device.torch_device)
        if variable.synchronization == "on_read" or id(variable) in self._run.metrics:
            return torch.zeros_like(value)
        if is_seed(variable):
            return seed_of_replica(value, self._context.replica_id_in_sync_group)
        return self._with_gradient(value) if variable.trainable and value.is_floating_point() else value

    def _with_gradient(self, value: Tensor) -> Tensor:
        value.requires_grad_()
        if self.kind == "user":
            # torch.autograd.backward passes WholeGradients by, and would leave the gradients of one shard without a
            # word.
            value.register_hook(self._refuse_shard)  # type: ignore[no-untyped-call]
        return value

    def _refuse_shard(self, _: Tensor) -> None:
        if not self._is_summing:
            raise UsageError(
                "torch.autograd.backward was called in a model's own step, where the gradients of the replicas are "
                "not summed; call loss.backward() or torch.autograd.grad"
            )

    def _is_direct(self, variable: Any) -> bool:
        return variable is self.default_seed or get_replica_context() is None


def is_seed(variable: Any) -> bool:
    """Whether a variable is the state of a seed generator."""
    return variable.name == _SEED_NAME  # type: ignore[no-any-return]


def stateless_scope() -> Any:
    """A block in which Keras's variables have the values that its ``state_mapping`` gives them by id."""
    return keras.StatelessScope(collect_losses=True, initialize_variables=False)


def summed(strategy: Owner, parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The sums over the replicas, each of which has as many tensors of the same shapes. One exchange for each dtype."""
    flat = [flattened(tensors) for tensors in parts]
    totals = strategy.reduce("sum", [PerReplica([elements[dtype] for elements in flat]) for dtype in flat[0]])
    return parts_like(dict(zip(flat[0], totals, strict=True)), parts[0])


def flattened(tensors: Sequence[Tensor]) -> dict[torch.dtype, Tensor]:
    """All elements of some tensors, in order, as a tensor [elements] for each dtype."""
    of_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        of_dtype.setdefault(tensor.dtype, []).append(tensor.reshape(-1))
    return {dtype: torch.cat(parts) for dtype, parts in of_dtype.items()}


def parts_like(flat: Mapping[torch.dtype, Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """The inverse of ``flattened``: tensors with the dtypes and shapes, and on the devices, of ``like``."""
    parts = {
        dtype: iter(elements.split([tensor.numel() for tensor in like if tensor.dtype == dtype]))  # type: ignore[no-untyped-call]
        for dtype, elements in flat.items()
    }
    return [next(parts[tensor.dtype]).view(tensor.shape).to(tensor.device) for tensor in like]
