"""Variables with one value per replica, with the aggregation and synchronization of ``tf.Variable``.

"on_write" variables are reduced when a replica writes, so all values stay equal (unless aggregation is "none");
"on_read" ones are each replica's own, as counters are, and are reduced when they are read outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch

from lockstep.collectives.across import reduce_across
from lockstep.collectives.per_replica import PerReplica, select
from lockstep.collectives.reduction import ReduceOp
from lockstep.collectives.workers import Workers
from lockstep.config import LogicalDevice
from lockstep.errors import ConfigError, UsageError
from lockstep.replicas.context import ReplicaContext, get_replica_context
from lockstep.replicas.gpu import in_memory_of

Aggregation = Literal["none", "sum", "mean", "only_first"]
Synchronization = Literal["on_write", "on_read"]


class MirroredVariable:
    """One tensor per replica. Made by ``strategy.variable``.

    Args:
        owner: the strategy.
        value: the initial value: a tensor, a number, or a PerReplica of them.
        devices: one per local replica.
        workers: all workers, who begin with the chief's value.
        aggregation: what is made of the replicas' values: "none", "sum", "mean" or "only_first".
        synchronization: when: "on_write" or "on_read".

    Raises:
        ConfigError: unknown aggregation or synchronization.
    """

    def __init__(
        self,
        owner: object,
        value: Any,
        devices: Sequence[LogicalDevice],
        workers: Workers,
        *,
        aggregation: Aggregation,
        synchronization: Synchronization,
    ) -> None:
        _check_choice("aggregation", aggregation, get_args(Aggregation))
        _check_choice("synchronization", synchronization, get_args(Synchronization))
        self._owner = owner
        self._workers = workers
        self.aggregation = aggregation
        self.synchronization = synchronization
        self._values = tuple(
            _copy_to(device, each) for each, device in zip(_one_each(value, len(devices)), devices, strict=True)
        )
        if not workers.alone and not isinstance(value, PerReplica):
            workers.broadcast("the chief's value of a variable", self._values)

    @property
    def values(self) -> tuple[torch.Tensor, ...]:
        """One tensor per local replica, in replica order."""
        return self._values

    def read_value(self) -> torch.Tensor:
        """Inside a replica its own value; outside the first local replica's, or for "on_read" the aggregate.

        A new tensor. The aggregate is over the replicas of all workers, and every worker must ask for it.
        """
        context = self._context()
        if context is not None:
            return self._values[context.local_replica].clone()
        if self.synchronization == "on_read" and self.aggregation in ("sum", "mean"):
            total: torch.Tensor = reduce_across(self._workers, ReduceOp.of(self.aggregation), self._values)
            return total
        return self._values[0].clone()

    def assign(self, value: Any) -> None:
        """Sets the value. Inside a replica of an "on_write" variable that aggregates, every replica must call it.

        Outside, all replicas get ``value`` (each its own of a PerReplica); an "on_read" "sum" variable gives each
        replica ``value`` / replicas, so that reading it gives ``value`` back.

        Raises:
            ConfigError: a plain number to be summed over replicas, or a mean for a variable that is not floating.
        """
        context = self._context()
        if context is not None:
            self._write(context, value, lambda mine, new: new)
            return
        if self.synchronization == "on_read" and self.aggregation == "sum" and not isinstance(value, PerReplica):
            value = torch.as_tensor(value) / self._workers.num_replicas
        for mine, new in zip(self._values, self._outside(value), strict=True):
            mine.copy_(torch.as_tensor(new))

    def assign_add(self, value: Any) -> None:
        """Adds ``value``, which is reduced over the replicas first where ``assign`` would.

        Raises:
            ConfigError: as ``assign``; also outside a replica for an "on_read" "sum" variable.
        """
        self._add(value, 1, "assign_add")

    def assign_sub(self, value: Any) -> None:
        """Subtracts ``value``; otherwise as ``assign_add``."""
        self._add(value, -1, "assign_sub")

    def _add(self, value: Any, sign: int, method: str) -> None:
        context = self._context()
        if context is not None:
            self._write(context, value, lambda mine, new: mine + sign * new)
            return
        if self.synchronization == "on_read" and self.aggregation == "sum":
            raise ConfigError(
                f'{method} outside a replica has no meaning for an "on_read" variable that is summed; '
                "call it inside a replica, or assign the whole value"
            )
        for mine, new in zip(self._values, self._outside(value), strict=True):
            mine.add_(torch.as_tensor(new).to(mine.device), alpha=sign)

    def _write(self, context: ReplicaContext, value: Any, change: Any) -> None:
        mine = self._values[context.local_replica]
        if self.synchronization == "on_write" and self.aggregation != "none":
            value = self._aggregate(context, value)
        with torch.no_grad():
            mine.copy_(change(mine, torch.as_tensor(value).to(mine.device)))

    def _aggregate(self, context: ReplicaContext, value: Any) -> Any:
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
        with torch.no_grad():
            return context.all_reduce(self.aggregation, value)

    def _first(self, values: list[Any]) -> torch.Tensor:
        first = torch.as_tensor(values[0]).clone()
        self._workers.broadcast("variable write (only_first)", [first])
        return first

    def _outside(self, value: Any) -> Sequence[Any]:
        return _one_each(value, len(self._values))

    def _context(self) -> ReplicaContext | None:
        context = get_replica_context()
        if context is not None and context.strategy is not self._owner:
            raise UsageError("this variable belongs to another strategy than the one that runs this replica")
        return context

    def __float__(self) -> float:
        return float(self.read_value())

    def __int__(self) -> int:
        return int(self.read_value())

    def __repr__(self) -> str:
        how = f"aggregation={self.aggregation!r}, synchronization={self.synchronization!r}"
        return f"MirroredVariable({', '.join(str(value.tolist()) for value in self._values)}, {how})"


def _one_each(value: Any, num_replicas: int) -> list[Any]:
    return [select(value, replica, num_replicas) for replica in range(num_replicas)]


def _copy_to(device: LogicalDevice, value: Any) -> torch.Tensor:
    with in_memory_of(device):
        return torch.as_tensor(value).detach().to(device.torch_device, copy=True)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name}={value!r} is unknown; choose one of {', '.join(map(repr, choices))}")
