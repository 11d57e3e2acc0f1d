"""Mirrored torchmetrics metrics: each replica updates its own copy, and ``compute`` gives the value of all rows.

    replica 0   copy.update(shard 0) --.
    replica 1   copy.update(shard 1) ----> merge_states --> compute()
    replica 2   copy.update(shard 2) --'

The user's own metric object uses the same states, since a program may keep a reference to it.
"""

from __future__ import annotations

import copy
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lockstep._torch_compat import tree_leaves, tree_map
from lockstep.collectives.communicator import all_gather_object
from lockstep.errors import UsageError
from lockstep.introspection import is_kind
from lockstep.replicas.context import ReplicaContext, own_context, refuse_in_replica
from lockstep.replicas.owner import Owner

Reduction = Callable[[Any], Any]
_FORWARDED = ("update", "compute", "reset", "forward")
# How many frames of other packages stand between torch.set_grad_enabled and torchmetrics' update, at most; a look
# through the whole stack would be made at every such call of a step.
_FRAMES = 8
_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_ON_ALL = frozenset(["set_dtype", "persistent"])
ONE_OBJECT = "_lockstep_one_object"
"""An attribute of a metric that is one object in all copies of its module, and keeps the replicas apart by itself."""
_NOT_ON_COPIES = frozenset(["merge_state", "add_state", "add_metrics", "sync", "unsync", "sync_context"])


def is_metric(module: object) -> bool:
    """Whether it is a torchmetrics metric or several; nothing is, as long as nobody imported torchmetrics."""
    # Not imported here: torchmetrics is optional, and a metric exists only after the program has imported it.
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is None:
        return False
    kinds = (torchmetrics.Metric, torchmetrics.MetricCollection, torchmetrics.wrappers.MetricTracker)
    return isinstance(module, kinds)


def nested_metrics(metric: Any) -> list[Any]:
    """The metric and all metrics inside it, such as the two of a sum or the one of a wrapper."""
    return [module for module in metric.modules() if "_reductions" in vars(module)]


def states_of(metric: Any) -> list[dict[str, Any]]:
    """The states of a metric, and of all metrics inside it, with how often each was updated."""
    return [{"states": part.metric_state, "updates": part.update_count} for part in nested_metrics(metric)]


def merge_metrics(local: Sequence[Any], states: Sequence[list[dict[str, Any]]]) -> Any:
    """One new metric with the states of all replicas, given the local metrics and ``states_of`` it on all replicas."""
    base = next((metric for metric in local if any(part.update_count for part in nested_metrics(metric))), local[0])
    # States can be large, and are replaced, not written: the copy has the same tensors.
    tensors = [leaf for part in nested_metrics(base) for leaf in tree_leaves(part.metric_state)]
    merged = copy.deepcopy(base, {id(tensor): tensor for tensor in tensors})
    for part, sources in zip(nested_metrics(merged), zip(*states, strict=True), strict=True):
        merge_into(part, [source for source in sources if source["updates"]])
    leave_unsynced(merged)  # all workers' states are here
    return merged


def leave_unsynced(metric: Any) -> None:
    """Has the metric compute from its own states alone: torchmetrics would add those of other processes to them."""
    for part in nested_metrics(metric):
        part._to_sync = part.sync_on_compute = False


def merge_states(states: Sequence[Any], reduction: Reduction | None) -> Any:
    """A metric's reduction of one state's values on all replicas: lists joined in their order, or tensors stacked."""
    if isinstance(states[0], list):
        joined = [item for state in states for item in state]
        return reduction(joined) if joined and reduction is not None else joined
    stacked = torch.stack(list(states))
    return stacked if reduction is None else reduction(stacked)


def merge_into(part: Any, sources: Sequence[Any]) -> None:
    """Gives one metric the states of all replicas that have updated it."""
    updates = [source["updates"] for source in sources]
    by_update = all(
        len(source["states"][name]) % source["updates"] == 0
        for source in sources
        for name in part._reductions
        if isinstance(source["states"][name], list)
    )
    for name, reduction in part._reductions.items():
        states = [_on_device(source["states"][name], part.device) for source in sources]
        if by_update and len(states) > 1 and isinstance(states[0], list):
            states = [_in_order_of_updates(states, updates), []]
        if states:
            setattr(part, name, states[0] if len(states) == 1 else merge_states(states, reduction))
    part._update_count = sum(updates)
    part._computed = None  # torchmetrics would return the value that it cached for the former states


def _in_order_of_updates(lists: Sequence[list[Any]], updates: Sequence[int]) -> list[Any]:
    """What all replicas' first updates added, then their second, ...: the order in which one device has the rows."""
    sizes = [len(items) // count for items, count in zip(lists, updates, strict=True)]
    return [
        item
        for update in range(max(updates))
        for items, size in zip(lists, sizes, strict=True)
        for item in items[update * size : (update + 1) * size]
    ]


def _on_device(structure: Any, device: torch.device, *, copy: bool = False) -> Any:
    return tree_map(lambda leaf: leaf.to(device, copy=copy) if isinstance(leaf, Tensor) else leaf, structure)


class MirroredMetric(nn.Module):
    """One copy of a torchmetrics metric for each replica. Made by ``strategy.mirror(metric)``.

    In a replica ``update`` updates its own copy, and every replica must call ``compute``, which gives the value of all
    rows since the last reset. Outside, states and what depends on them are of all replicas, and ``reset`` resets all;
    with several workers every one must call what reads states.
    """

    def __init__(self, owner: Owner, copies: Sequence[Any]) -> None:
        super().__init__()
        self._owner = owner
        self._copies = tuple(copies)  # a tuple, so that nn.Module does not register them as children
        self._children: dict[str, MirroredMetric] = {}

    @property
    def copies(self) -> tuple[Any, ...]:
        """One copy for each local replica."""
        return self._copies

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Updates, and returns the value for these rows alone: in a replica for its shard, None for no rows."""
        return None if self._has_no_rows(args, kwargs) else self._local()(*args, **kwargs)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Updates the current replica's copy, if its shard has rows; outside replicas counts the rows once."""
        if not self._has_no_rows(args, kwargs):
            self._local().update(*args, **kwargs)

    def compute(self) -> Any:
        """The value over the rows of all replicas. In replicas all must call it; outside, every worker."""
        context = self._context()
        if context is None:
            with self._owner.computing_alike():
                return self._merged().compute()
        value = context.meet("compute of a metric", None, lambda _: self._merged().compute())
        return _on_device(value, context.device.torch_device, copy=True)

    def reset(self) -> None:
        """Forgets all updates: in a replica those of its own copy, outside those of all."""
        for metric in self._addressed():
            metric.reset()

    def clone(self, *args: Any, **kwargs: Any) -> Any:
        """A plain metric with the states of all replicas."""
        return self._merged().clone(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The persistent states of all replicas, merged; in a replica its own."""
        # Without persistent states nothing is saved, and no other worker need be asked for its states.
        persistent = any(any(part._persistent.values()) for part in nested_metrics(self._copies[0]))
        outside = self._context() is None
        return (self._merged() if outside and persistent else self._local()).state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Sets the persistent states, and forgets all others. Outside replicas only."""
        refuse_in_replica("load_state_dict")
        self.reset()
        return self._copies[0].load_state_dict(state_dict, strict, assign)

    def items(self, keep_base: bool = False, copy_state: bool = True) -> list[tuple[str, MirroredMetric]]:
        """The metrics of a MetricCollection by name."""
        names, keys = self._copies[0].keys(keep_base=keep_base), self._copies[0].keys(keep_base=True)
        return [(name, self._child(key)) for name, key in zip(names, keys, strict=True)]

    def values(self, copy_state: bool = True) -> list[MirroredMetric]:
        """The metrics of a MetricCollection."""
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
        value = getattr(self._local(), name)
        # A metric inside it, as in a wrapper or a sum, must be of all replicas too.
        if is_metric(value):
            return self._child(name)
        if self._context() is not None:
            return value
        if name in _NOT_ON_COPIES:
            raise UsageError(f"{name} would reach one replica's copy of the metric; call it before strategy.mirror")
        if name in _ON_ALL:
            return partial(self._on_all, name)
        if callable(value) or name in self._state_names:
            return getattr(self._merged(), name)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or name == "training" or "_copies" not in self.__dict__:
            super().__setattr__(name, value)
            return
        if name in self._state_names:
            raise UsageError(f"{name!r} is a state of the metric, which each replica has; call reset or update instead")
        for metric in self._addressed():
            setattr(metric, name, copy.deepcopy(value))

    def __deepcopy__(self, memo: dict[int, Any]) -> MirroredMetric:
        return self  # in every copy of a module that holds it

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError("a mirrored metric belongs to its strategy; save its state_dict() or clone() instead")

    def __repr__(self) -> str:
        return f"MirroredMetric({len(self._copies)} replicas of {self._copies[0]!r})"

    def _load_from_state_dict(self, *args: Any) -> None:
        self.reset()
        self._copies[0]._load_from_state_dict(*args)

    def _on_all(self, name: str, *args: Any, **kwargs: Any) -> None:
        for metric in self._copies:
            getattr(metric, name)(*args, **kwargs)

    @property
    def _state_names(self) -> set[str]:
        return {
            "metric_state",
            "update_count",
            "update_called",
            "_update_count",
            *getattr(self._copies[0], "_defaults", ()),
        }

    def _child(self, name: str) -> MirroredMetric:
        if name not in self._children:
            copies = [getattr(metric, name) for metric in self._copies]
            self._children[name] = MirroredMetric(self._owner, copies)
        return self._children[name]

    def _merged(self) -> Any:
        """A plain metric with the states of all replicas."""
        states = [states_of(metric) for metric in self._copies]
        gathered = all_gather_object(self._owner.workers, f"metric {type(self._copies[0]).__name__}", states)
        states_of_all = [states for worker in gathered for states in worker]
        _warn_of_averaged_states(self._copies[0], states_of_all)
        _check_attributes(self._copies)
        merged = merge_metrics(self._copies, states_of_all)
        _check_shapes(merged, self._copies)
        return merged

    def _has_no_rows(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this is a replica's empty shard, which one device does not have and few metrics accept."""
        if self._context() is None:
            return False
        rows = {count for count in map(_rows, (*args, *kwargs.values())) if count is not None}
        return rows == {0}

    def _local(self) -> Any:
        context = self._context()
        return self._copies[0 if context is None else context.local_replica]

    def _addressed(self) -> Sequence[Any]:
        return self._copies if self._context() is None else [self._local()]

    def _context(self) -> ReplicaContext | None:
        return own_context(self._owner, "metric")


class _Forwarded:
    """A method of the user's own metric that calls the mirrored one's."""

    def __init__(self, metric: MirroredMetric, name: str) -> None:
        self._metric, self._name = metric, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._metric, self._name)(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise UsageError("this metric has been mirrored; copy what strategy.mirror(metric) returned, with clone()")


def metric_being_updated() -> Any:
    """The metric whose update calls the current torch function, if one of the next frames is torchmetrics'."""
    frame, passed = sys._getframe(1), 0
    while frame.f_back is not None and passed < _FRAMES:
        frame = frame.f_back
        passed += not frame.f_code.co_filename.startswith(_PACKAGE)  # what watches the step adds frames of its own
        if frame.f_code.co_name == "wrapped_func" and frame.f_globals.get("__name__") == "torchmetrics.metric":
            return frame.f_locals.get("self")
    return None


def mirror_metric(owner: Owner, metric: Any) -> MirroredMetric:
    """Makes one copy of ``metric`` for each device; from now on its own methods are those of the mirrored one."""
    if isinstance(vars(metric).get("update"), _Forwarded):
        raise UsageError("this metric is mirrored by another strategy; mirror a metric of its own with this one")
    check_kind(metric)
    copies = [copy.deepcopy(metric).to(device.torch_device) for device in owner.devices]
    for number, duplicate in enumerate(copies):
        ungroup(duplicate)
        # What the metric has counted before is kept in one copy of the whole job
        # (test_what_was_counted_before_is_counted_once).
        if number or not owner.workers.leads:
            duplicate.reset()
    mirrored = MirroredMetric(owner, copies)
    mirrored.__dict__["_plain"] = metric  # the strategy finds the mirrored one by its id, which must stay its own
    _forward(metric, mirrored)
    return mirrored


def check_kind(metric: Any) -> None:
    """Raises UsageError for a metric that looks at values over time, which merged states cannot give."""
    if not is_metric(metric):
        return
    wrappers = sys.modules["torchmetrics"].wrappers
    kinds = (wrappers.MinMaxMetric, wrappers.Running, wrappers.MetricTracker)
    for part in metric.modules():
        if isinstance(part, kinds):
            raise UsageError(
                f"{type(part).__name__} looks at the values of a metric one after another, and each replica has rows "
                "of its own; mirror the metric inside it, and keep what you need of its compute() outside strategy.run"
            )


def ungroup(metric: Any) -> None:
    """Has each metric of a collection update itself: torchmetrics shares states that are equal, maybe by chance."""
    if not hasattr(metric, "_enable_compute_groups") or isinstance(metric._enable_compute_groups, list):
        return
    for part in nested_metrics(metric):
        for name, state in part.metric_state.items():
            setattr(part, name, copy.deepcopy(state))
    metric._enable_compute_groups = False
    metric._groups_checked = False
    metric._groups = {number: [name] for number, name in enumerate(metric.keys(keep_base=True))}


def _forward(metric: Any, mirrored: MirroredMetric) -> None:
    for name in _FORWARDED:
        metric.__dict__[name] = _Forwarded(mirrored, name)
    if isinstance(metric, nn.ModuleDict):
        for name, part in metric._modules.items():
            _forward(part, mirrored._child(name))


def _warn_of_averaged_states(metric: Any, states_of_all: Sequence[list[dict[str, Any]]]) -> None:
    """Warns if replicas have different values of a state that the metric averages: only equal shards make it exact."""
    mean = sys.modules["torchmetrics"].utilities.data.dim_zero_mean
    for part, sources in zip(nested_metrics(metric), zip(*states_of_all, strict=True), strict=True):
        for name in (name for name, reduction in part._reductions.items() if reduction is mean):
            values = [source["states"][name].cpu() for source in sources if source["updates"]]
            if any(not torch.equal(values[0], value) for value in values[1:]):
                warnings.warn(
                    f'{type(part).__name__} has dist_reduce_fx="mean" for its state {name!r}, the mean over replicas '
                    'whatever their rows; keep a sum and a count instead, with dist_reduce_fx="sum"',
                    stacklevel=5,
                )


def _check_attributes(copies: Sequence[Any]) -> None:
    """Refuses a metric that counts in attributes which are not states: they would be one replica's."""
    for parts in zip(*map(nested_metrics, copies), strict=True):
        first, *rest = [part for part in parts if part.update_count] or parts[:1]
        for name, value in vars(first).items():
            counts = is_kind(value, (int, float, Tensor)) and name not in (*first._defaults,) and name[0] != "_"
            if counts and any(not _is_equal(value, vars(other).get(name)) for other in rest):
                raise UsageError(
                    f"{type(first).__name__} changes its attribute {name!r} in update, and each replica has another "
                    f'value of it; make it a state, self.add_state("{name}", ..., dist_reduce_fx="sum")'
                )


def _is_equal(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) or isinstance(other, Tensor):
        return torch.equal(torch.as_tensor(value).cpu(), torch.as_tensor(other).cpu())
    return bool(value == other or (value != value and other != other))


def _check_shapes(merged: Any, copies: Sequence[Any]) -> None:
    """Refuses a metric with states that nothing reduces, whose value has another shape for several replicas."""
    for part, *parts in zip(nested_metrics(merged), *map(nested_metrics, copies), strict=True):
        reductions = part._reductions.items()
        bare = [name for name, fn in reductions if fn is None and isinstance(getattr(part, name), Tensor)]
        updated = [part_of_copy for part_of_copy in parts if part_of_copy.update_count]
        if not bare or len(updated) < 2:
            continue
        # Compared with one replica's value: torchmetrics stacks such states, and compute() may take that for a state of
        # more values.
        alone = copy.deepcopy(updated[0])
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
    return [leaf.shape if isinstance(leaf, Tensor) else type(leaf) for leaf in tree_leaves(value)]
