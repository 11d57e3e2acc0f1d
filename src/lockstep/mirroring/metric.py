"""Mirrored torchmetrics metrics: each replica updates its own copy, and ``compute`` gives the value of all rows.

    replica 0   copy.update(shard 0) --.
    replica 1   copy.update(shard 1) ----> merge_states --> compute()
    replica 2   copy.update(shard 2) --'

The user's own metric object uses the same states, since a program may hold on to it.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lockstep._torch_compat import tree_leaves, tree_map
from lockstep.collectives.communicator import Communicator, all_gather_object
from lockstep.config import LogicalDevice
from lockstep.errors import UsageError
from lockstep.extras import require
from lockstep.replicas.context import ReplicaContext, get_replica_context

Reduction = Callable[[Any], Any]


def states_of(metric: Any) -> list[dict[str, Any]]:
    """The states of a metric, and of all metrics inside it, with how often each was updated."""
    return [{"states": part.metric_state, "updates": part.update_count} for part in nested_metrics(metric)]


def merge_metrics(local: Sequence[Any], states: Sequence[list[dict[str, Any]]]) -> Any:
    """One metric with the states of all replicas; the replicas' own metrics stay as they are.

    Args:
        local: the same metric on each local replica, in replica order.
        states: ``states_of`` it on each replica of all workers, in replica order.
    """
    base = next((metric for metric in local if any(part["updates"] for part in states_of(metric))), local[0])
    merged = _copy_sharing_states(base)
    for part, sources in zip(nested_metrics(merged), zip(*states, strict=True), strict=True):
        _merge_into(part, [source for source in sources if source["updates"]])
    return merged


def merge_states(states: Sequence[Any], reduction: Reduction | None) -> Any:
    """One state of a metric, given its value on every replica and the metric's own reduction.

    Lists are joined in replica order and tensors stacked along a new first dimension; then the reduction is applied.
    """
    if isinstance(states[0], list):
        joined = [item for state in states for item in state]
        return reduction(joined) if joined and reduction is not None else joined
    stacked = torch.stack(list(states))
    return stacked if reduction is None else reduction(stacked)


def nested_metrics(metric: Any) -> list[Any]:
    """The metric and all metrics inside it, such as the two of a sum or the one of a wrapper."""
    metric_class = require("torchmetrics", "train").Metric
    return [module for module in metric.modules() if isinstance(module, metric_class)]


def _merge_into(part: Any, sources: Sequence[Any]) -> None:
    updates = [source["updates"] for source in sources]
    in_turn = all(
        len(source["states"][name]) % source["updates"] == 0
        for source in sources
        for name in part._reductions
        if isinstance(source["states"][name], list)
    )
    for name, reduction in part._reductions.items():
        states = [_to_device(source["states"][name], part.device) for source in sources]
        if in_turn and len(states) > 1 and isinstance(states[0], list):
            states = [_by_update(states, updates), []]
        if states:
            setattr(part, name, states[0] if len(states) == 1 else merge_states(states, reduction))
    part._update_count = sum(updates)
    part._computed = None


def _by_update(lists: Sequence[list[Any]], updates: Sequence[int]) -> list[Any]:
    """What all replicas' first updates added, then their second, ...: in the order in which one device has the rows.

    Every update of a replica has added as many items, so all states of a metric are put into the same order.
    """
    each = [len(items) // count for items, count in zip(lists, updates, strict=True)]
    return [
        item
        for update in range(max(updates))
        for items, size in zip(lists, each, strict=True)
        for item in items[update * size : (update + 1) * size]
    ]


def _copy_sharing_states(metric: Any) -> Any:
    """A deep copy whose state tensors are the original's: states can be large, and they are replaced, not written."""
    states = (state for part in nested_metrics(metric) for state in part.metric_state.values())
    tensors = [tensor for state in states for tensor in (state if isinstance(state, list) else [state])]
    return copy.deepcopy(metric, {id(tensor): tensor for tensor in tensors})


def _to_device(state: Any, device: torch.device) -> Any:
    if isinstance(state, list):
        return [_to_device(item, device) for item in state]
    return state.to(device) if isinstance(state, Tensor) else state


_LED_HERE = ("update", "compute", "reset", "forward")
_FRAMES = 8
_ON_ALL = frozenset(["set_dtype", "persistent"])
_NOT_ON_COPIES = frozenset(["merge_state", "add_state", "add_metrics", "sync", "unsync", "sync_context"])


def is_metric(module: object) -> bool:
    """Whether it is a torchmetrics metric or several; nothing is, as long as nobody imported torchmetrics."""
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is None:
        return False
    kinds = (torchmetrics.Metric, torchmetrics.MetricCollection, torchmetrics.wrappers.MetricTracker)
    return isinstance(module, kinds)


class MirroredMetric(nn.Module):
    """One copy of a torchmetrics metric per replica. Made by ``strategy.mirror(metric)``.

    Inside a replica ``update`` is of its own copy, and ``compute`` a collective: every replica must call it, and all
    get the number of all rows since the last reset. Outside, ``compute``, states and what is made of them are of all
    replicas, and ``reset`` resets all. With several workers every one must call what reads states.

    Args:
        owner: the strategy.
        copies: the metric's, one per local replica.
        workers: over whose replicas the numbers are.
    """

    def __init__(self, owner: object, copies: Sequence[Any], workers: Communicator) -> None:
        super().__init__()
        self._owner = owner
        self._copies = tuple(copies)  # a tuple, so that nn.Module does not register them as children
        self._workers = workers
        self._children: dict[str, MirroredMetric] = {}

    @property
    def copies(self) -> tuple[Any, ...]:
        """One copy per local replica."""
        return self._copies

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Updates, and gives the metric's value for these rows alone: in a replica for its shard, None for no rows."""
        return None if self._has_no_rows(args, kwargs) else self._here()(*args, **kwargs)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Updates the current replica's copy, where its shard has rows; outside replicas counts the rows once."""
        if not self._has_no_rows(args, kwargs):
            self._here().update(*args, **kwargs)

    def compute(self) -> Any:
        """The value over the rows of all replicas. Inside, every replica must call it; outside, every worker."""
        context = self._context()
        if context is None:
            return self._merged().compute()
        value = context.meet("compute of a metric", None, lambda _: self._merged().compute())
        return tree_map(partial(_own_copy, context.device.torch_device), value)

    def reset(self) -> None:
        """Forgets all updates, inside a replica those of its own copy, outside those of all."""
        for each in self._copies if self._context() is None else [self._here()]:
            each.reset()

    def clone(self, *args: Any, **kwargs: Any) -> Any:
        """A plain metric with the states of all replicas."""
        return self._merged().clone(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The persistent states of all replicas, merged; inside a replica its own."""
        persistent = any(any(part._persistent.values()) for part in nested_metrics(self._copies[0]))
        outside = self._context() is None
        return (self._merged() if outside and persistent else self._here()).state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Sets the persistent states, and forgets all others.

        Raises:
            UsageError: called inside a replica.
        """
        self._outside("load_state_dict")
        self.reset()
        return self._copies[0].load_state_dict(state_dict, strict, assign)

    def items(self, keep_base: bool = False, copy_state: bool = True) -> list[tuple[str, MirroredMetric]]:
        """Of a MetricCollection: the metrics by name."""
        names = self._copies[0].keys(keep_base=True)
        shown = self._copies[0].keys(keep_base=keep_base)
        return [(name, self._child(key)) for name, key in zip(shown, names, strict=True)]

    def values(self, copy_state: bool = True) -> list[MirroredMetric]:
        """Of a MetricCollection: the metrics."""
        return [metric for _, metric in self.items()]

    def __getitem__(self, key: str) -> MirroredMetric:
        return dict([*self.items(keep_base=True), *self.items()])[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._copies[0])

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        return len(self._copies[0])

    def __contains__(self, key: object) -> bool:
        return key in self._copies[0]

    def __getattr__(self, name: str) -> Any:
        copies = self.__dict__.get("_copies")
        if copies is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        here = getattr(self._here(), name)
        if is_metric(here):
            return self._child(name)
        if self._context() is not None:
            return here
        if name in _NOT_ON_COPIES:
            raise UsageError(f"{name} would reach one replica's copy of the metric; call it before strategy.mirror")
        if name in _ON_ALL:
            return partial(self._on_all, name)
        if callable(here) or name in self._counted:
            return getattr(self._merged(), name)
        return here

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or name == "training" or "_copies" not in self.__dict__:
            super().__setattr__(name, value)
            return
        if name in self._counted:
            raise UsageError(f"{name!r} is a state of the metric, which each replica has; call reset or update instead")
        for each in self._copies if self._context() is None else [self._here()]:
            setattr(each, name, copy.deepcopy(value))

    def __deepcopy__(self, memo: dict[int, Any]) -> MirroredMetric:
        return self  # in every copy of a module that holds it

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError(
            "a mirrored metric belongs to its strategy's threads; save its state_dict() or clone() instead"
        )

    def __repr__(self) -> str:
        return f"MirroredMetric({len(self._copies)} replicas of {self._copies[0]!r})"

    def _load_from_state_dict(self, *args: Any) -> None:
        self.reset()
        self._copies[0]._load_from_state_dict(*args)

    def _on_all(self, name: str, *args: Any, **kwargs: Any) -> None:
        for each in self._copies:
            getattr(each, name)(*args, **kwargs)

    @property
    def _counted(self) -> set[str]:
        names = {"metric_state", "update_count", "update_called", "_update_count"}
        return names | set(getattr(self._copies[0], "_defaults", ()))

    def _child(self, name: str) -> MirroredMetric:
        if name not in self._children:
            self._children[name] = MirroredMetric(
                self._owner, [getattr(each, name) for each in self._copies], self._workers
            )
        return self._children[name]

    def _merged(self) -> Any:
        """A plain metric with the states of all replicas."""
        states = [states_of(each) for each in self._copies]
        everyones = all_gather_object(self._workers, f"metric {type(self._copies[0]).__name__}", states)
        every = [each for worker in everyones for each in worker]
        _check_states(self._copies[0], every)
        _check_attributes(self._copies)
        merged = merge_metrics(self._copies, every)
        for part in nested_metrics(merged):
            part._to_sync = part.sync_on_compute = False  # all workers' states are here
        _check_shapes(merged, self._copies)
        return merged

    def _has_no_rows(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this is a replica's empty shard, which one device does not have and few metrics bear."""
        if self._context() is None:
            return False
        values = [value for value in (*args, *kwargs.values()) if _rows(value) is not None]
        return bool(values) and not any(map(_rows, values))

    def _here(self) -> Any:
        context = self._context()
        return self._copies[0 if context is None else context.local_replica]

    def _context(self) -> ReplicaContext | None:
        context = get_replica_context()
        if context is not None and context.strategy is not self._owner:
            raise UsageError("this metric was mirrored by another strategy than the one that runs this replica")
        return context

    def _outside(self, method: str) -> None:
        if get_replica_context() is not None:
            raise UsageError(f"{method} reaches all replicas; call it outside strategy.run, in cross-replica context")


class _LedHere:
    """A method of the user's own metric, which is now the mirrored one's. It is not copied."""

    def __init__(self, metric: MirroredMetric, name: str) -> None:
        self._metric, self._name = metric, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._metric, self._name)(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise UsageError("this metric has been mirrored; copy what strategy.mirror(metric) returned, with clone()")


def metric_being_updated() -> Any:
    """The metric whose update calls the torch function that is under way, if torchmetrics' own frame is near."""
    frame = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame.f_back is None:
            return None
        frame = frame.f_back
        if frame.f_code.co_name == "wrapped_func" and frame.f_globals.get("__name__") == "torchmetrics.metric":
            return frame.f_locals.get("self")
    return None


def mirror_metric(
    owner: object, metric: Any, devices: Sequence[LogicalDevice], workers: Communicator
) -> MirroredMetric:
    """One copy of ``metric`` per device. What it has counted so far is counted once.

    Args:
        owner: the strategy.
        metric: the user's; from now on its methods are those of the mirrored one.
        devices: one per local replica.
        workers: over whose replicas the numbers are.

    Raises:
        UsageError: a metric whose value no merging of states gives.
    """
    if isinstance(vars(metric).get("update"), _LedHere):
        raise UsageError("this metric is mirrored by another strategy; mirror a metric of its own with this one")
    check_kind(metric)
    copies = [copy.deepcopy(metric).to(device.torch_device) for device in devices]
    for number, each in enumerate(copies):
        _count_alone(each)
        if number or not workers.is_chief:
            each.reset()
    mirrored = MirroredMetric(owner, copies, workers)
    mirrored.__dict__["_plain"] = metric  # by whose number the strategy finds it
    _lead_here(metric, mirrored)
    return mirrored


def check_kind(metric: Any) -> None:
    """Refuses a metric that looks at values over time, which no merging of states gives.

    Raises:
        UsageError: it has such a wrapper.
    """
    wrappers = sys.modules["torchmetrics"].wrappers
    kinds = (wrappers.MinMaxMetric, wrappers.Running, wrappers.MetricTracker)
    for part in metric.modules():
        if isinstance(part, kinds):
            raise UsageError(
                f"{type(part).__name__} looks at the values of a metric one after another, and each replica has rows "
                "of its own; mirror the metric inside it, and keep what you need of its compute() outside strategy.run"
            )


def _count_alone(metric: Any) -> None:
    """Has each metric of a collection update itself.

    torchmetrics lets those of one collection share their states that have equal ones after the first update. Those of a
    small shard may be equal by chance.
    """
    if not hasattr(metric, "_enable_compute_groups") or isinstance(metric._enable_compute_groups, list):
        return
    for part in nested_metrics(metric):
        for name, state in part.metric_state.items():
            setattr(part, name, copy.deepcopy(state))
    metric._enable_compute_groups = False
    metric._groups_checked = False
    metric._groups = {number: [name] for number, name in enumerate(metric.keys(keep_base=True))}


def _lead_here(metric: Any, mirrored: MirroredMetric) -> None:
    for name in _LED_HERE:
        metric.__dict__[name] = _LedHere(mirrored, name)
    if isinstance(metric, nn.ModuleDict):
        for name, part in metric._modules.items():
            _lead_here(part, mirrored._child(name))


def _check_states(metric: Any, every: Sequence[list[dict[str, Any]]]) -> None:
    """Says so where replicas have different values that the metric averages: only equal shards make that exact."""
    mean = sys.modules["torchmetrics"].utilities.data.dim_zero_mean
    for part, sources in zip(nested_metrics(metric), zip(*every, strict=True), strict=True):
        for name in (name for name, reduction in part._reductions.items() if reduction is mean):
            values = [source["states"][name] for source in sources if source["updates"]]
            if any(not torch.equal(values[0].cpu(), value.cpu()) for value in values[1:]):
                warnings.warn(
                    f'{type(part).__name__} has dist_reduce_fx="mean" for its state {name!r}: it is the mean over the '
                    "replicas, whatever the sizes of their shards; keep a sum and a count instead, with "
                    'dist_reduce_fx="sum"',
                    stacklevel=5,
                )


def _check_attributes(copies: Sequence[Any]) -> None:
    """Refuses a metric that counts in attributes which are no states: they would be one replica's."""
    for parts in zip(*map(nested_metrics, copies), strict=True):
        first, *others = [part for part in parts if part.update_count] or parts[:1]
        for name, value in vars(first).items():
            if name.startswith("_") or name in first._defaults or not isinstance(value, (int, float, Tensor)):
                continue
            if any(not _is_equal(value, vars(other).get(name)) for other in others):
                raise UsageError(
                    f"{type(first).__name__} changes its attribute {name!r} in update, and each replica has another "
                    f'value of it; make it a state, self.add_state("{name}", ..., dist_reduce_fx="sum")'
                )


def _is_equal(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor):
        return isinstance(other, Tensor) and torch.equal(value.cpu(), other.cpu())
    return bool(value == other or (value != value and other != other))


def _check_shapes(merged: Any, copies: Sequence[Any]) -> None:
    """Refuses a metric with states that nothing reduces, whose value has another shape for several replicas."""
    for index, part in enumerate(nested_metrics(merged)):
        bare = [
            n for n, reduction in part._reductions.items() if reduction is None and isinstance(getattr(part, n), Tensor)
        ]
        used = [own for own in (nested_metrics(each)[index] for each in copies) if own.update_count]
        if not bare or len(used) < 2:
            continue
        alone = copy.deepcopy(used[0])
        alone._to_sync, alone._computed = False, None
        if _shapes(part.compute()) != _shapes(alone.compute()):
            raise UsageError(
                f"{type(part).__name__} has a state without dist_reduce_fx ({', '.join(bare)}), which is stacked over "
                'the replicas, and its compute() expects one; give it dist_reduce_fx="sum", or what fits, in add_state'
            )
        part._computed = None


def _rows(value: Any) -> int | None:
    if isinstance(value, Tensor):
        return len(value) if value.ndim else None
    if isinstance(value, Mapping):
        return next((rows for rows in map(_rows, value.values()) if rows is not None), None)
    return len(value) if isinstance(value, (list, tuple)) else None


def _shapes(value: Any) -> list[Any]:
    leaves = tree_leaves(value)
    return [leaf.shape if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves]


def _own_copy(device: torch.device, value: Any) -> Any:
    return value.to(device, copy=True) if isinstance(value, Tensor) else value
