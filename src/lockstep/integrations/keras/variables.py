"""Each replica's values of a model's variables, and what becomes of them after a step.

    trainable           the same values in every replica; the optimizer updates them once, outside the replicas
    metrics             start at 0 in every replica; what they come to is added
    seed generators     replica 0 has the seeds that Keras alone would have, and every other one seeds of its own
    others that change  averaged over the rows, as the statistics of batch norms; integers are replica 0's. A variable
                        with an ``aggregation`` of "sum" or "only_first_replica" goes by that
    trainable, assigned in the forward pass: the same, before the optimizer updates them

Inside a replica Keras reads and assigns variables in a ``StatelessScope``, which its thread alone sees.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import torch
from keras.src.backend.common import global_state
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR
from torch import Tensor

from lockstep._torch_compat import DisableTorchFunction
from lockstep.collectives.per_replica import PerReplica
from lockstep.errors import UsageError
from lockstep.integrations.keras.torch_modules import buffer_variables
from lockstep.strategies.base import Strategy

_SEED_STRIDE = 0x9E3779B1  # 2**32 over the golden ratio: the seeds of different replicas lie far from each other


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What one replica's step makes of the variables.

    Args:
        used: whether each trainable variable has a gradient; empty for a step without gradients.
        added: the variables that have been assigned, other than metrics, and of which the changes are added.
        sums: gradients, metrics and the changes of ``added``, each times its weight, flat, by dtype.
        drawn: how far each seed generator has advanced.
        counted: the other integer variables that have changed, with their new values.
        results: what the model's own ``compute_metrics`` returns, of all replicas; None where Keras's does.
    """

    used: list[bool]
    added: list[Any]
    sums: dict[torch.dtype, Tensor]
    drawn: list[Tensor]
    counted: list[tuple[Any, Tensor]]
    results: Any = None


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

    def generators(self) -> Sequence[Any]:
        """The generators; new ones after ``keras.utils.set_random_seed``, which sets torch's seed too."""
        if torch.initial_seed() != self._seed:
            self._seed = torch.initial_seed()
            self._begin(self._seed)
        return self._generators

    def _begin(self, seed: int) -> None:
        self._torch.begin(seed, self._first)
        seeds = ((seed + seed_offset(each)) % 2**31 for each in range(self._first, self._first + self._number))
        self._generators = [keras.random.SeedGenerator(each) for each in seeds]


class ModelVariables:
    """The variables of a model, laid out for one step on the replicas of a strategy.

    Args:
        model: the model.
        strategy: the strategy.
        default_generators: a seed generator for each local replica.
    """

    def __init__(self, model: Any, strategy: Strategy, default_generators: Sequence[Any]) -> None:
        self._strategy, self._default_generators = strategy, default_generators
        self.trainable = list(model.trainable_variables)
        metrics = {id(each): each for each in model.metrics_variables}
        # A model with a property ``metrics`` of its own may leave it out, and it is updated all the same.
        metrics |= {id(each): each for each in getattr(model._loss_tracker, "variables", ())}
        self.metrics = list(metrics.values())
        self.seeds = [each.state for layer in model._flatten_layers() for each in layer._seed_generators]
        first = {id(each) for each in (*self.trainable, *self.metrics, *self.seeds)}
        owned_by_layers = (*model.non_trainable_variables, *buffer_variables(model))
        self.others = [each for each in owned_by_layers if id(each) not in first]
        owned = {each.value.device for each in (*self.trainable, *self.others)}
        self._copies = {
            device: {id(each): each.value.detach().to(device) for each in (*self.trainable, *self.others)}
            for device in {each.torch_device for each in strategy.devices}
            if owned - {device}
        }

    @contextmanager
    def in_replica(self, replica: int, number: int) -> Iterator[ReplicaVariables]:
        """The variables inside a local replica; ``number`` is its number among those of all workers."""
        device, generator = self._strategy.devices[replica].torch_device, self._default_generators[replica]
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, generator)  # of this thread
        with keras.device(str(device)), _ReplicaScope(self, generator) as scope:
            yield ReplicaVariables(self, scope, device, self._copies.get(device, {}), number)
        drawn = scope.get_current_value(generator.state)
        if drawn is not None:
            generator.state.assign(drawn)

    @property
    def of_layers(self) -> list[Any]:
        """All variables that layers may read or assign, but for the default seed generators."""
        return [*self.trainable, *self.others, *self.metrics, *self.seeds]

    def default_seed(self, replica: int) -> Any:
        """The variable of a local replica's own default seed generator."""
        return self._default_generators[replica].state

    def apply(self, changes: Sequence[Changes]) -> list[Tensor | None]:
        """Adds up what the steps of all replicas have changed, and assigns it to all variables but the trainable ones.

        Returns the sums of the gradients, None where no replica has one; an empty list for a step without gradients.
        """
        first, number = changes[0], len(changes[0].used)
        added = [each.value for each in (*self.metrics, *first.added)]
        sums = self._sums(changes, [*(each.value for each in self.trainable[:number]), *added])
        gradients = sums[:number]
        with torch.no_grad():
            for value, by in zip(added, sums[number:], strict=True):
                value.add_(by)
            for each, by in zip(self.seeds, first.drawn, strict=True):
                each.value.add_(by.to(each.value.device))
            for each, value in first.counted:
                each.value.copy_(value)
        used = [any(each) for each in zip(*(each.used for each in changes), strict=True)]
        return [gradient if is_used else None for gradient, is_used in zip(gradients, used, strict=True)]

    def sum_changes(self, changes: Sequence[Changes]) -> Iterator[tuple[Any, Tensor]]:
        """The metrics and other variables that a step without gradients has changed, by how much. Changes nothing."""
        changed = (*self.metrics, *changes[0].added)
        return zip(changed, self._sums(changes, [each.value for each in changed]), strict=True)

    def _sums(self, changes: Sequence[Changes], like: Sequence[Tensor]) -> list[Tensor]:
        totals = {
            dtype: self._strategy.reduce("sum", PerReplica([each.sums[dtype] for each in changes]))
            for dtype in changes[0].sums
        }
        return parts_like(totals, like)


class ReplicaVariables:
    """The variables inside one replica, for the length of one step."""

    def __init__(self, model: ModelVariables, scope: Any, device: torch.device, copies: dict[int, Tensor], number: int):
        self._model, self._scope, self._number = model, scope, number
        with DisableTorchFunction():  # the replica's function modes would only pass on some thousand calls
            self._enter(device, copies)

    def _enter(self, device: torch.device, copies: dict[int, Tensor]) -> None:
        model, values, number = self._model, self._scope.state_mapping, self._number
        values.update((id(each), copies.get(id(each), each.value)) for each in model.others)
        for each in model.trainable:
            values[id(each)] = copies.get(id(each), each.value.detach()).detach().requires_grad_()
        values.update((id(each), torch.zeros_like(each.value, device=device)) for each in model.metrics)
        values.update((id(each), seed_of_replica(each.value.to(device), number)) for each in model.seeds)
        self._before = dict(values)

    @property
    def trainable(self) -> list[Tensor]:
        """The values that gradients are computed for."""
        return [self._scope.state_mapping[id(each)] for each in self._model.trainable]

    def changes(self, gradients: Sequence[Tensor | None], share: float, results: Any = None) -> Changes:
        """What the step has made of them. ``share`` is that of this replica's rows in the batch; 0 counts nothing."""
        with DisableTorchFunction(), torch.no_grad():
            return self._changes(gradients, share, results)

    def _changes(self, gradients: Sequence[Tensor | None], share: float, results: Any) -> Changes:
        model, values = self._model, self._scope.state_mapping
        owned = (*model.others, *model.trainable)
        changed = [each for each in owned if values[id(each)] is not self._before[id(each)]]
        added = [each for each in changed if each.value.is_floating_point() or each.aggregation == "sum"]
        weights = {"sum": 1, "only_first_replica": int(self._number == 0)}
        parts: list[tuple[Any, Tensor]] = [
            (each, torch.zeros_like(each) if gradient is None else gradient)
            for each, gradient in zip(self.trainable[: len(gradients)], gradients, strict=True)
        ]
        parts += [(each.value, values[id(each)]) for each in model.metrics]
        parts += [
            (each.value, (values[id(each)] - self._before[id(each)]) * weights.get(each.aggregation, share))
            for each in added
        ]
        shares = [(part if share else torch.zeros_like(part)).to(like.dtype) for like, part in parts]
        return Changes(
            used=[gradient is not None for gradient in gradients],
            added=added,
            sums=flattened(shares),
            drawn=[values[id(each)] - self._before[id(each)] for each in model.seeds],
            counted=[(each, values[id(each)]) for each in changed if not any(each is one for one in added)],
            results=results,
        )


class _ReplicaScope(keras.StatelessScope):  # type: ignore[misc]  # Keras has no types
    """The scope of one replica, in which only variables of the model change."""

    def __init__(self, model: ModelVariables, generator: Any) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        self._trainable = {id(each) for each in model.trainable}
        others = (*model.trainable, *model.others, *model.metrics, *model.seeds, generator.state)
        self._known = {id(each) for each in others}

    def add_update(self, update: tuple[Any, Tensor]) -> None:
        """Keras's own, where a trainable variable gets a value that gradients are computed for."""
        variable, value = update
        if id(variable) not in self._known:
            raise UsageError(
                f"a replica has assigned the variable {variable.path!r}, which the model does not know; make it, or "
                "the metric or seed generator that it belongs to, in the __init__ of a layer or of the model"
            )
        is_trainable = id(variable) in self._trainable
        super().add_update((variable, value.detach().requires_grad_() if is_trainable else value))

    def part(self, variable: Any, share: float) -> Tensor:
        """What is added up over the replicas for a variable of a metric."""
        value = self.state_mapping[id(variable)].detach()
        return value if share else torch.zeros_like(value)


def stateless_scope() -> Any:
    """A block in which Keras's variables have the values that its ``state_mapping`` gives them by id."""
    return keras.StatelessScope(collect_losses=True, initialize_variables=False)


def summed(strategy: Strategy, parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The sums over the replicas, each of which has as many tensors of the same shapes. One exchange for each dtype."""
    flat = [flattened(own) for own in parts]
    totals = strategy.reduce("sum", [PerReplica([own[dtype] for own in flat]) for dtype in flat[0]])
    return parts_like(dict(zip(flat[0], totals, strict=True)), parts[0])


def flattened(tensors: Sequence[Tensor]) -> dict[torch.dtype, Tensor]:
    """All elements of some tensors, in order, as a tensor [elements] for each dtype."""
    of_dtype: dict[torch.dtype, list[Tensor]] = {}
    for each in tensors:
        of_dtype.setdefault(each.dtype, []).append(each.reshape(-1))
    return {dtype: torch.cat(each) for dtype, each in of_dtype.items()}


def parts_like(flat: Mapping[torch.dtype, Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """The inverse of ``flattened``: tensors with the dtypes and shapes, and on the devices, of ``like``."""
    parts = {
        dtype: iter(elements.split([each.numel() for each in like if each.dtype == dtype]))  # type: ignore[no-untyped-call]
        for dtype, elements in flat.items()
    }
    return [next(parts[each.dtype]).view(each.shape).to(each.device) for each in like]
