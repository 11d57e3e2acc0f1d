"""What a step function can ask and do inside a replica: its number, its device, and the collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

from lockstep._torch_compat import tree_map
from lockstep.checks import check_call
from lockstep.collectives.communicator import Communicator, call_site
from lockstep.collectives.per_replica import merge, select
from lockstep.collectives.reduce import ReduceOp, all_gather, all_reduce
from lockstep.config import LogicalDevice
from lockstep.errors import CollectiveError, UsageError
from lockstep.replicas.barrier import Call, IssueSlot, ReplicaBarrier
from lockstep.replicas.device.streams import GpuSlot
from lockstep.replicas.owner import Owner
from lockstep.replicas.watcher import Watcher

_current: ContextVar[ReplicaContext | None] = ContextVar("lockstep_replica", default=None)


def get_replica_context() -> ReplicaContext | None:
    """The context of the replica that runs the calling code; None outside a replica (in cross-replica context)."""
    return _current.get()


def own_context(owner: object, what: str) -> ReplicaContext | None:
    """The same for an object that ``owner`` has mirrored; raises UsageError in a replica of another strategy."""
    context = _current.get()
    if context is not None and context.strategy is not owner:
        raise UsageError(
            f"this {what} was mirrored by another strategy than the one that runs this replica; use it with the "
            "strategy that mirrored it"
        )
    return context


def refuse_in_replica(method: str) -> None:
    """Raises UsageError in a replica, for a method that affects all of them."""
    if _current.get() is not None:
        raise UsageError(f"{method} affects all replicas; call it outside strategy.run, in cross-replica context")


class ReplicaContext:
    """One replica's view of one ``strategy.run``.

    Every replica must call the same collectives in the same order; otherwise all of them get a ``CollectiveError``.

    Attributes:
        strategy: the strategy that runs this replica.
        workers: the communicator of the workers that run this step together.
        num_replicas_in_sync: how many replicas, of all workers, run this step together.
        replica_id_in_sync_group: this replica's number among those of all workers, from 0.
        device: this replica's logical device; ``device.torch_device`` is where its tensors belong.
        local_replica: this replica's number among those of its worker, from 0.
        watchers: those that look at this run; in most runs there are none.

    Example:
        >>> import torch, lockstep as ls
        >>> strategy = ls.MirroredStrategy()
        >>> def step():
        ...     context = ls.get_replica_context()
        ...     return context.all_reduce("sum", torch.ones(()))
        >>> int(strategy.reduce("mean", strategy.run(step))) == strategy.num_replicas_in_sync
        True
    """

    watchers: Sequence[Watcher] = ()

    def __init__(
        self, strategy: Owner, replica: int, device: LogicalDevice, barrier: ReplicaBarrier | None, slot: IssueSlot
    ) -> None:
        self.strategy = strategy
        self.workers: Communicator = strategy.workers
        self.num_replicas_in_sync: int = self.workers.num_replicas
        self.replica_id_in_sync_group: int = self.workers.first_replica + replica
        self.device = device
        self.local_replica = replica
        self._barrier = barrier
        self._slot = slot

    def all_reduce(self, op: ReduceOp | str, value: Any) -> Any:
        """Sums or averages ``value`` over all replicas. Every replica must call it. Differentiable.

        Args:
            op: "sum" or "mean".
            value: a tensor or number, or a tuple, list or dict of them; shapes are equal on all replicas.

        Returns:
            The same structure; each replica gets its own copy on its device.
        """
        for watcher in self.watchers:
            watcher.collective_called(self.local_replica, "all_reduce", value)
        op = ReduceOp.of(op)
        return tree_map(lambda leaf: all_reduce(self, op, leaf), value)

    def all_gather(self, value: Any, axis: int) -> Any:
        """Concatenates ``value`` of all replicas along ``axis``, in replica order. Every replica must call it.

        Differentiable. Shapes may differ in dimension ``axis`` only.
        """
        for watcher in self.watchers:
            watcher.collective_called(self.local_replica, "all_gather", value)
        return tree_map(lambda leaf: all_gather(self, leaf, axis), value)

    def merge_call(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs ``fn(strategy, *args, **kwargs)`` once for all local replicas, in cross-replica context.

        Every replica must call it, with its own arguments. ``fn`` gets those of all replicas: a PerReplica of them, or
        the bare argument where it is the same for all (see ``strategy.run``). Each replica gets the result, with its
        own value in place of each PerReplica.
        """
        check_call(fn, args, kwargs, "context.merge_call(fn, (x,))")
        call = (tuple(args), dict(kwargs or {}))
        result = self.meet("merge_call", call, lambda calls: _call_merged(fn, self.strategy, calls))
        return select(result, self.local_replica, len(self.strategy.devices))

    def meet(self, name: str, value: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """The primitive under all collectives: the last local replica to arrive runs ``combine`` on all values.

        Every replica must call it with the same ``name``, and gets the same result object. ``combine`` runs in
        cross-replica context, so that nothing in it depends on which replica was last.
        """

        def once(values: list[Any]) -> Any:
            # Without both, what combine draws would come from the generator of whichever replica was last
            # (test_in_a_merge_call_it_does_not_matter_who_came_last).
            token = _current.set(None)
            try:
                with self._slot.with_default_rng() if isinstance(self._slot, GpuSlot) else nullcontext():
                    return combine(values)
            finally:
                _current.reset(token)

        if self._barrier is None:
            raise CollectiveError(f"{name} was called where this replica is alone; call it in the step itself")
        return self._barrier.meet(self.local_replica, Call(name, call_site()), value, once, self._slot)

    def make_current(self) -> None:
        """Makes this the current context until the end of the ``contextvars`` context, which a run copies."""
        _current.set(self)

    def alone(self) -> ReplicaContext:
        """The same replica for code that the others do not run: its collectives raise a ``CollectiveError``."""
        return ReplicaContext(self.strategy, self.local_replica, self.device, None, self._slot)

    def __repr__(self) -> str:
        place = f"replica {self.replica_id_in_sync_group} of {self.num_replicas_in_sync}"
        return f"ReplicaContext({place} on {self.device.name})"


class SoleReplicaContext(ReplicaContext):
    """The context of a replica that no other runs beside, of this worker or others: nobody is waited for."""

    def __init__(self, strategy: Owner, device: LogicalDevice, slot: IssueSlot) -> None:
        super().__init__(strategy, 0, device, None, slot)

    def meet(self, name: str, value: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """Runs ``combine`` on the value, in cross-replica context."""
        token = _current.set(None)
        try:
            return combine([value])
        finally:
            _current.reset(token)


def _call_merged(
    fn: Callable[..., Any], strategy: Owner, calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]
) -> Any:
    shapes = {(len(args), frozenset(kwargs)) for args, kwargs in calls}
    if len(shapes) > 1:
        counts = ", ".join(f"{len(args)} args and kwargs {sorted(kwargs)}" for args, kwargs in calls)
        raise UsageError(f"merge_call got {counts} from the replicas; give it the same arguments in every replica")
    # Argument by argument: one whose structure differs between replicas becomes a PerReplica, and no other does.
    args = [merge(column) for column in zip(*(args for args, _ in calls), strict=True)]
    kwargs = {name: merge([keywords[name] for _, keywords in calls]) for name in calls[0][1]}
    try:
        with strategy.changes_spread():
            return fn(strategy, *args, **kwargs)
    except TypeError as error:
        error.add_note("merge_call calls fn(strategy, *args, **kwargs), as TensorFlow does")
        raise


@contextmanager
def in_context(context: ReplicaContext | None) -> Iterator[None]:
    """A block in which ``context`` is the current one of this thread; None is cross-replica context."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)
