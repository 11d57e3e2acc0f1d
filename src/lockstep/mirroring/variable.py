"""Variables with one value for each replica, with the aggregation and synchronization of ``tf.Variable``.

"on_write" variables are reduced when a replica writes, so that all values stay equal (unless aggregation is "none").
"on_read" variables, such as counters, are each replica's own and are reduced when they are read outside replicas. Both
are read with ``read_value``, ``float`` and the like, and by ``reduce`` and similar methods.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch

from lockstep.checks import check_choice
from lockstep.collectives.per_replica import PerReplica, VariableBase, read_tensors, select
from lockstep.collectives.reduce import ReduceOp, reduce_across
from lockstep.config import LogicalDevice
from lockstep.errors import ConfigError, UsageError
from lockstep.replicas.context import ReplicaContext, own_context
from lockstep.replicas.device.streams import allocating_on
from lockstep.replicas.owner import Owner

Aggregation = Literal["none", "sum", "mean", "only_first"]
Synchronization = Literal["on_write", "on_read"]


class MirroredVariable(VariableBase):
    """One tensor for each replica. Made by ``strategy.variable``.

    Args:
        owner: the strategy.
        value: the initial value: a tensor, a number, or a PerReplica of them; the chief's, for all workers.
        aggregation: how the replicas' values are reduced: "none", "sum", "mean" or "only_first".
        synchronization: when they are reduced: "on_write" or "on_read".

    Raises:
        ConfigError: unknown settings; different values for replicas that must have one; a value that requires
            gradients.
    """

    def __init__(
        self,
        owner: Owner,
        value: Any,
        *,
        aggregation: Aggregation,
        synchronization: Synchronization,
    ) -> None:
        devices, workers = owner.devices, owner.workers
        check_choice("aggregation", aggregation, get_args(Aggregation))
        check_choice("synchronization", synchronization, get_args(Synchronization))
        if isinstance(value, torch.Tensor) and value.requires_grad:
            raise ConfigError(
                f"variable got a tensor of shape {tuple(value.shape)} that requires gradients, and a variable is not "
                "trained; make it an nn.Parameter of a module for strategy.mirror, or give value.detach()"
            )
        self._owner = owner
        self._workers = workers
        self.aggregation = aggregation
        self.synchronization = synchronization
        initial = _one_each(read_tensors(value), len(devices))
        self._values = tuple(_copy_to(device, start) for start, device in zip(initial, devices, strict=True))
        if self.is_mirrored and not _equal(self._values):
            raise ConfigError(
                f'a variable with synchronization "on_write" and aggregation {aggregation!r} has one value on all '
                'replicas, and was given a PerReplica of different ones; give one value, or synchronization="on_read"'
            )
        if not workers.is_single and not isinstance(value, PerReplica):
            workers.broadcast("the chief's value of a variable", self._values[:1])
            for tensor in self._values[1:]:
                tensor.copy_(self._values[0])
        self._note_versions()

    @property
    def values(self) -> tuple[torch.Tensor, ...]:
        """One tensor for each local replica, in replica order."""
        return self._values

    @property
    def per_replica(self) -> PerReplica[torch.Tensor]:
        """Copies of the local replicas' values."""
        self._context()
        self.check_unchanged()
        return PerReplica([tensor.clone() for tensor in self._values])

    @property
    def is_mirrored(self) -> bool:
        """Whether all replicas have the same value."""
        return self.synchronization == "on_write" and self.aggregation != "none"

    def read_value(self) -> torch.Tensor:
        """A new tensor: in a replica its own value; outside the value of all, or for "on_read" the aggregate.

        Every worker must ask for an aggregate. Raises UsageError outside replicas for one without aggregation whose
        replicas have their own values.
        """
        context = self._context()
        if context is not None:
            return self._values[context.local_replica].clone()
        self.check_unchanged()
        on_write = self.synchronization == "on_write"
        if not on_write and self.aggregation in ("sum", "mean"):
            total: torch.Tensor = reduce_across(self._workers, ReduceOp.of(self.aggregation), self._values)
            return total
        if self.aggregation == "none" and not (_equal(self._values) if on_write else self._workers.num_replicas == 1):
            raise UsageError(
                f"a variable with aggregation 'none' and synchronization {self.synchronization!r} has no one value "
                "outside replicas; take all with strategy.local_results(variable), or make it with an aggregation"
            )
        first = self._values[0].clone()
        if not on_write:
            self._workers.broadcast("the first replica's value of a variable", [first])
        return first

    def check_unchanged(self) -> None:
        """Raises UsageError if all values must be the same, and were changed in place so that they differ."""
        # Versions first: comparing values would make the host wait for a GPU at every read.
        if not self.is_mirrored or self._versions == [tensor._version for tensor in self._values]:
            return
        if not _equal(self._values):
            raise UsageError(
                "the values of a variable that is the same on all replicas were changed in place, and now differ; "
                "write it with assign, assign_add or assign_sub"
            )
        self._note_versions()

    def assign(self, value: Any) -> None:
        """Sets the value: a tensor, a number or a variable. In replicas all must call it, if it aggregates on write.

        Outside, all replicas get ``value``, or of an "on_read" variable each its own of a PerReplica; an "on_read"
        "sum" variable gives each replica ``value`` / replicas. Raises ConfigError for a plain number that is summed
        over replicas, a mean of what is not floating, and outside for a PerReplica for an "on_write" variable.
        """
        context, value = self._context(), read_tensors(value)
        if context is not None:
            self._write(context, value, lambda current, new: new)
            return
        if self.synchronization == "on_read" and self.aggregation == "sum" and not isinstance(value, PerReplica):
            value = self._addends_of(_tensor_of(value))
        with torch.no_grad():
            for tensor, new in zip(self._values, self._outside(value), strict=True):
                tensor.copy_(_fitting(_tensor_of(new), tensor))
        self._note_versions()

    def assign_add(self, value: Any) -> None:
        """Adds ``value``, reduced as in ``assign``; not outside a replica for an "on_read" "sum" variable."""
        self._add(value, 1, "assign_add")

    def assign_sub(self, value: Any) -> None:
        """Subtracts ``value``; otherwise as ``assign_add``."""
        self._add(value, -1, "assign_sub")

    def _add(self, value: Any, sign: int, method: str) -> None:
        context, value = self._context(), read_tensors(value)
        if context is not None:
            self._write(context, value, lambda current, new: current + sign * new)
            return
        if self.synchronization == "on_read" and self.aggregation == "sum":
            raise ConfigError(
                f'{method} outside a replica has no meaning for an "on_read" variable that is summed; '
                "call it inside a replica, or assign the whole value"
            )
        with torch.no_grad():
            for tensor, new in zip(self._values, self._outside(value), strict=True):
                tensor.add_(_fitting(_tensor_of(new), tensor).to(tensor.device), alpha=sign)
        self._note_versions()

    def _write(
        self, context: ReplicaContext, value: Any, change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> None:
        local = self._values[context.local_replica]
        with torch.no_grad():
            new = self._aggregated(context, value) if self.is_mirrored else value
            local.copy_(change(local, torch.as_tensor(new).to(local.device)))
        self._versions[context.local_replica] = local._version

    def _aggregated(self, context: ReplicaContext, value: Any) -> Any:
        if self.aggregation == "only_first":
            return context.meet("variable write (only_first)", value, self._first)
        if self.aggregation == "sum" and not isinstance(value, torch.Tensor):
            raise ConfigError(
                f"the plain value {value!r} cannot be summed over replicas, since every replica has the same; "
                "give a tensor of this replica's own value"
            )
        if self.aggregation == "mean" and not self._values[0].is_floating_point():
            raise ConfigError(
                f"a variable of dtype {self._values[0].dtype} cannot take the mean over replicas; make it floating"
            )
        return context.all_reduce(self.aggregation, value)

    def _first(self, values: list[Any]) -> torch.Tensor:
        # A clone, since the first replica may go on and change its tensor while the others still read it
        # (test_the_value_of_the_first_is_taken_before_it_goes_on).
        first = torch.as_tensor(values[0]).clone()
        self._workers.broadcast("variable write (only_first)", [first])
        return first

    def _outside(self, value: Any) -> Sequence[Any]:
        if self.synchronization == "on_write" and isinstance(value, PerReplica):
            raise ConfigError(
                'an "on_write" variable was given a PerReplica outside replicas, and its copies would differ; give '
                'strategy.reduce(...) of it, write it inside strategy.run, or use synchronization="on_read"'
            )
        return _one_each(value, len(self._values))

    def _addends_of(self, total: torch.Tensor) -> Any:
        """One addend for each local replica; of an uneven sum of integers the first replicas get one more."""
        replicas, dtype = self._workers.num_replicas, self._values[0].dtype
        if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
            return total / replicas
        # Integers are not rounded: the parts of 7 on 2 replicas are 4 and 3, and add up to what was assigned.
        total = total.to(dtype)
        first, more = self._workers.first_replica, total.remainder(replicas)
        numbers = range(first, first + len(self._values))
        return PerReplica([total.div(replicas, rounding_mode="floor") + (more > number) for number in numbers])

    def _note_versions(self) -> None:
        self._versions = [tensor._version for tensor in self._values]

    def _context(self) -> ReplicaContext | None:
        return own_context(self._owner, "variable")

    def __repr__(self) -> str:
        how = f"aggregation={self.aggregation!r}, synchronization={self.synchronization!r}"
        return f"MirroredVariable({', '.join(str(value.tolist()) for value in self._values)}, {how})"


def _one_each(value: Any, num_replicas: int) -> list[Any]:
    return [select(value, replica, num_replicas) for replica in range(num_replicas)]


def _equal(values: Sequence[torch.Tensor]) -> bool:
    """Whether all have the same values; NaN equals NaN."""
    first, *rest = values
    for other in rest:
        if other.shape != first.shape:
            return False
        moved = other.to(first.device)
        # torch.equal alone says that NaN differs from NaN.
        if not (torch.equal(first, moved) or torch.isclose(first, moved, rtol=0, atol=0, equal_nan=True).all()):
            return False
    return True


def _fitting(new: torch.Tensor, current: torch.Tensor) -> torch.Tensor:
    """``new``, if it can be written over the variable ``mine``."""
    try:
        return new.expand(current.shape)
    except RuntimeError:
        raise ConfigError(
            f"a variable of shape {tuple(current.shape)} got a value of shape {tuple(new.shape)}; give one that fits"
        ) from None


def _tensor_of(value: Any) -> torch.Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"a variable got a {type(value).__name__}; give a tensor or a number ({error})") from error


def _copy_to(device: LogicalDevice, value: Any) -> torch.Tensor:
    with allocating_on(device), torch.inference_mode(False):  # inference tensors count no writes
        return _tensor_of(value).detach().to(device.torch_device, copy=True)
