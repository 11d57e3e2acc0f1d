"""Looks at every torch call of a step for what would affect other replicas.

    torch function called in a replica --> StepGuard --> called as it is
                                              |--> a weight is changed in place: called once, for all replicas
                                              `--> refused: a plain module, another optimizer's weights, ...

Replicas are threads that see the same Python objects; a step that uses others than its replica's copies could give
other numbers than one device. So each replica's function mode for random numbers asks its guard first (0.3 us a call).
"""

from __future__ import annotations

import builtins
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_pre_hook

from lockstep._torch_compat import (
    GET_GRAD,
    MAKE_DUAL,
    SET_DATA,
    SET_GRAD,
    SET_GRAD_MODE,
    DisableTorchFunction,
    tree_flatten,
)
from lockstep.collectives.communicator import Communicator, call_site
from lockstep.collectives.per_replica import read_tensors
from lockstep.errors import UsageError
from lockstep.mirroring.gradients.state import EngineHook
from lockstep.mirroring.metric import ONE_OBJECT, MirroredMetric, metric_being_updated
from lockstep.mirroring.module.buffers import tensor_digest
from lockstep.mirroring.module.module import MirroredModule
from lockstep.mirroring.registry import MirroredObjects, StepGradients
from lockstep.replicas.context import get_replica_context
from lockstep.replicas.rng.function_mode import Guarded, ReplicaRng, is_random
from lockstep.replicas.watcher import PROCEED, Run, Watcher

_METADATA = frozenset(
    [
        *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "data_ptr"),
        *("is_floating_point", "is_complex", "is_contiguous", "is_signed", "get_device", "type", "untyped_storage"),
        *("__len__", "__repr__", "__format__", "__hash__", "__eq__", "detach", "requires_grad_", "register_hook"),
        *("register_post_accumulate_grad_hook", "is_same_size", "is_shared", "is_pinned", "is_inference"),
        "retain_grad",
    ]
)
"""Methods that read no values, or from whose results no gradient flows back."""
_NO_WRITES = frozenset(["requires_grad_", "rename_", "share_memory_"])
_VIEWS = frozenset(getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag", "grad"))
"""Properties through which values, and gradients, flow."""
# Both are refused in a step: each replica's hook would see its own gradient, and never the sum.
_HOOKS = frozenset([torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook])
_PLAIN = (int, float, complex, str, tuple, type(None))
_PARAMETER = nn.Parameter  # a global is found faster


def refuse_forward_mode() -> Any:
    """Raises UsageError in one of several local replicas: they would close each other's level of forward-mode AD."""
    context = get_replica_context()
    if context is not None and len(context.strategy.devices) > 1:
        raise UsageError(
            f"the step uses forward-mode AD (dual_level, torch.func.jvp, jacfwd, hessian) at {call_site()}; "
            f"torch has one for all {len(context.strategy.devices)} replicas; use reverse mode (torch.func.vjp, "
            "jacrev), or call it outside strategy.run"
        )
    return PROCEED


def _writers() -> frozenset[Any]:
    """Functions and methods of torch that change their first argument in place."""
    names = [(home, name) for home in (torch.Tensor, torch, F, nn.init) for name in dir(home)]
    writes = [
        member for member in names if member[1].endswith("_") and member[1][-2:] != "__" and member[1] not in _NO_WRITES
    ]
    writes += [(torch.Tensor, name) for name in dir(torch.Tensor) if name == "__setitem__" or name[:3] == "__i"]
    functions = [getattr(home, name, None) for home, name in writes if name not in ("__index__", "__invert__")]
    return frozenset(function for function in functions if callable(function) and not isinstance(function, type))


_WRITERS = _writers()


@dataclass(frozen=True, slots=True)
class _CopyTensor:
    """A tensor of a mirrored module's copy."""

    tensor: ref[torch.Tensor]  # another tensor may have the id of one that no longer exists
    replica: int
    name: str
    module: str
    divided: bool  # other workers hold other parts of the module, or of this tensor

    def is_of(self, tensor: Any) -> bool:
        return self.tensor() is tensor


class Ownership:
    """Which replica each tensor of the mirrored modules belongs to. Made again when a module has changed."""

    def __init__(self, modules: Iterable[MirroredModule]) -> None:
        self.tensors: dict[int, _CopyTensor] = {}
        self.weights: dict[int, list[ref[nn.Parameter]]] = {}
        self.divided = False  # a divided module computes with other tensors than it is mirrored with
        for module in modules:
            name_of, divided = type(module.module).__name__, module.is_part or module.shards_weights
            self.divided |= divided
            for replica, copy in enumerate(module.copies):
                for name, tensor in (*copy.named_parameters(), *copy.named_buffers()):
                    self.tensors[id(tensor)] = _CopyTensor(ref(tensor), replica, name, name_of, divided)
                for parameter in copy.parameters():
                    self.weights.setdefault(_storage(parameter), []).append(ref(parameter))

    def is_weight(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a mirrored weight, or a view of one."""
        # By storage, since weight.data, weight[0] and weight.view(-1) are other tensors of the same memory. A weight
        # may have been given another storage since, so that its reference is compared once more.
        storage = _storage(tensor)
        weights = (reference() for reference in self.weights.get(storage, ()))
        return any(weight is not None and _storage(weight) == storage for weight in weights)


class _WrittenMemory:
    """What each replica has written of one storage, from its first byte to its last. The storage is held weakly."""

    # Spans, since replicas may write rows of their own in one tensor
    # (test_replicas_may_change_rows_of_their_own_in_one_tensor).

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._spans: dict[int, tuple[int, int]] = {}

    @property
    def is_gone(self) -> bool:
        return bool(self._storage.expired())  # type: ignore[no-untyped-call]

    def other(self, start: int, end: int, replica: int) -> int | None:
        """Notes a write between two addresses; returns another replica that wrote there, or None."""
        first, last = self._spans.get(replica, (start, end))
        self._spans[replica] = (min(first, start), max(last, end))
        for other, (first, last) in tuple(self._spans.items()):
            if other != replica and start < last and first < end:
                return other
        return None


class Claims:
    """Which replica was the first, in this run, to use a tensor that belongs to no replica.

    A worker's only replica shares no objects: there a tensor that is used in a second run is from outside the step.
    """

    def __init__(self) -> None:
        self._written: dict[int, _WrittenMemory] = {}
        self._first_users: dict[int, tuple[Any, int]] = {}
        self._watched: dict[tuple[int, int], Any] = {}
        self._used_before: dict[int, Any] = {}

    def clear(self, *, one_replica: bool) -> None:
        # With several workers of one replica each no second replica of this process uses the tensor; that it was there
        # before the step is what tells that it was not made in it.
        self._used_before = {}
        if one_replica:
            self._used_before = {
                number: reference for number, (reference, _) in self._first_users.items() if reference() is not None
            }
        self._first_users.clear()
        self._written.clear()
        while self._watched:
            self._watched.popitem()[1].remove()

    def refuse_gradient(self, tensor: torch.Tensor, replica: int, message: str) -> None:
        """Refuses, until the run ends, a gradient that the replica's backward pass brings to ``tensor``."""
        if (id(tensor), replica) not in self._watched:

            def refuse() -> None:
                context = get_replica_context()
                if context is not None and context.local_replica == replica:
                    raise UsageError(message)

            self._watched[id(tensor), replica] = tensor.register_hook(EngineHook(refuse))  # type: ignore[no-untyped-call]

    def other_writer(self, tensor: torch.Tensor, replica: int) -> int | None:
        """Notes a write; returns another replica that has written to the same memory in this run, or None."""
        try:
            storage, start = tensor.untyped_storage(), tensor.data_ptr()
        except (NotImplementedError, RuntimeError):  # a sparse tensor, or a wrapper of torch.func
            return self.other(tensor, replica)
        if not tensor.numel():
            return None
        items = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        memory = self._written.get(storage._cdata)
        if memory is None or memory.is_gone:
            self._written.pop(storage._cdata, None)
            memory = self._written.setdefault(storage._cdata, _WrittenMemory(storage))
        return memory.other(start, start + items * tensor.element_size(), replica)

    def used_before(self, thing: Any) -> bool:
        """Whether the only local replica has used an object in the run before this."""
        return id(thing) in self._used_before and self._used_before[id(thing)]() is thing

    def other(self, thing: Any, replica: int) -> int | None:
        """Notes a use; returns another replica that has used the same object in this run, or None."""
        claim = self._first_users.get(id(thing))
        if claim is None or claim[0]() is not thing:
            # setdefault is atomic: of two replicas that come at the same moment, both see what was set first.
            self._first_users.pop(id(thing), None)
            claim = self._first_users.setdefault(id(thing), (ref(thing), replica))
        return claim[1] if claim[0]() is thing and claim[1] != replica else None


class StepGuard:
    """One replica's guard. ``claims`` is what this run's replicas have used."""

    def __init__(self, replica: int, ownership: Ownership, claims: Claims, gradients: StepGradients) -> None:
        self._gradients = gradients
        self._replica = replica
        self._ownership = ownership
        self._tensors = ownership.tensors
        self._local_ids = {number for number, entry in ownership.tensors.items() if entry.replica == replica}
        self._foreign_ids = ownership.tensors.keys() - self._local_ids
        self.guarded = Guarded(frozenset(_CHECKS), self._local_ids, self._foreign_ids)
        self._claims = claims

    def __call__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Refuses a call of a torch function, makes it for all replicas and returns its result, or returns PROCEED."""
        # Written out, without any() or a helper, and before the look-up of the function: this runs at every call of a
        # torch function. The guard takes 0.3 us a call. Parameters are told by what is local, since all others need a
        # look; of other tensors only another replica's do.
        for arg in args:
            kind = type(arg)
            if kind is tuple or kind is list:
                self._look_at_all(func, arg)
            elif (id(arg) not in self._local_ids) if kind is _PARAMETER else (id(arg) in self._foreign_ids):
                self._look_at(func, arg)
        if kwargs:
            self._look_at_all(func, kwargs.values())
            if "generator" in kwargs:
                self._check_generator(kwargs["generator"])
            if "out" in kwargs:
                return self._write(func, (kwargs["out"], *args), kwargs, call=args)
        check = _CHECKS.get(func)
        return PROCEED if check is None else check(self, func, args, kwargs)

    def _look_at_all(self, func: Callable[..., Any], tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            if (id(tensor) not in self._local_ids) if type(tensor) is _PARAMETER else (id(tensor) in self._foreign_ids):
                self._look_at(func, tensor)

    def _check_parameter(self, func: Callable[..., Any], args: tuple[Any, ...], _: dict[str, Any]) -> Any:
        parameter, context = args[0], get_replica_context()
        entry = self._tensors.get(id(parameter))
        if context is None or entry is None or not entry.is_of(parameter):
            return PROCEED
        if func in _HOOKS:
            raise UsageError(
                f"the step registers a hook on {entry.name!r} at {call_site()}; it would see one "
                "replica's gradient; read or change .grad after backward(), where it is the sum over all replicas"
            )
        if entry.replica != self._replica or (func == SET_DATA and _is_same_memory(parameter, args[1])):
            # "weight.data *= mask" is a change in place, made once for all, and then assigns the same memory
            # (test_a_weight_s_data_multiplied_in_place_is_that_of_one_device).
            return PROCEED
        if func == SET_DATA:
            raise UsageError(
                f"the step assigns {entry.name}.data, which would part this replica's weights from the others'; change "
                "it in place (parameter.data.copy_(...)), or assign it outside strategy.run"
            )
        if func == GET_GRAD and entry.divided:
            raise UsageError(
                f"the step reads {entry.name}.grad at {call_site()}, and this worker holds a part of the model; step "
                "an optimizer that strategy.mirror(optimizer) returned; to clip, call its sum_gradients() there, and "
                "clip_sums(norm) and step() after strategy.run, on every worker"
            )
        if func == GET_GRAD:
            self._gradients.read(context, parameter)
        else:
            self._gradients.assigned(context, parameter, args[1])
        return PROCEED

    def _both(self, other: int) -> str:
        return "replicas {} and {}".format(*sorted((other, self._replica)))

    def _look_at(self, func: Callable[..., Any], tensor: Any) -> None:
        name = getattr(func, "__name__", "")
        if not isinstance(tensor, torch.Tensor) or name in _METADATA or (name == "__get__" and func not in _VIEWS):
            return
        # Asked late, since it costs a look-up of a context variable and few calls come this far. None is a merge_call:
        # it runs for all replicas, on the user's own objects.
        if get_replica_context() is None:
            return
        entry = self._tensors.get(id(tensor))
        if entry is not None and entry.is_of(tensor):
            self._check_foreign(func, tensor, entry)
        elif tensor.requires_grad and torch.is_grad_enabled() and not self._ownership.divided:
            self._check_unmirrored(tensor)

    def _check_foreign(self, func: Callable[..., Any], tensor: torch.Tensor, entry: _CopyTensor) -> None:
        message = (
            f"the step uses {entry.name!r} of the plain {entry.module}, which is replica {entry.replica}'s copy, in "
            f"replica {self._replica}, at {call_site()}; use what strategy.mirror(module) returned, in closures and "
            "penalties too"
        )
        if not isinstance(tensor, nn.Parameter) or func == GET_GRAD or func in _WRITERS:
            raise UsageError(message)
        # Reading another copy's weight is harmless, since its numbers are equal: a teacher need not be mirrored. Only a
        # gradient would be lost, so it is refused when the backward pass brings one.
        if tensor.requires_grad and torch.is_grad_enabled():
            self._claims.refuse_gradient(tensor, self._replica, message)

    def _check_unmirrored(self, tensor: torch.Tensor) -> None:
        other = self._claims.other(tensor, self._replica)
        if other is not None or self._claims.used_before(tensor):
            who = "each worker trains" if other is None else f"{self._both(other)} both train"
            self._claims.refuse_gradient(
                tensor,
                self._replica,
                f"{who} one parameter of shape {tuple(tensor.shape)} whose module is not mirrored, at {call_site()}; "
                "call module = strategy.mirror(module) and optimizer = strategy.mirror(optimizer) before strategy.run, "
                "and use what they return in the step",
            )

    def _check_generator(self, generator: Any) -> None:
        if isinstance(generator, torch.Generator) and get_replica_context() is not None:
            other = self._claims.other(generator, self._replica)
            if other is not None:
                raise UsageError(
                    f"{self._both(other)} draw from one torch.Generator ({call_site()}), whose order differs from "
                    "run to run; leave generator= out, or give each replica its own with ls.PerReplica"
                )

    def _check_metric(self, *_: Any) -> Any:
        # torchmetrics calls torch.set_grad_enabled first in each update, so no part of it needs a patch.
        metric = metric_being_updated() if "torchmetrics" in sys.modules else None
        other = None if metric is None or get_replica_context() is None else self._claims.other(metric, self._replica)
        if other is not None:
            name = type(metric).__name__
            raise UsageError(
                f"{self._both(other)} both update one {name}; call metric = strategy.mirror(metric) "
                "before strategy.run: each replica then updates its own, and compute() is of all rows"
            )
        return PROCEED

    def _check_embedding(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("scale_grad_by_freq", args[5] if len(args) > 5 else False) and get_replica_context() is not None:
            raise UsageError(
                "an embedding with scale_grad_by_freq=True divides gradients by how often an item is in the batch, "
                "each replica by its own rows; leave it out, or weight the rows' losses by counts that "
                'ls.get_replica_context().all_reduce("sum", counts) has summed'
            )
        max_norm = kwargs.get("max_norm", args[3] if len(args) > 3 and args[3] is not None else None)
        if isinstance(max_norm, (int, float)) and not isinstance(max_norm, bool) and get_replica_context() is not None:
            raise UsageError(
                f"an embedding with max_norm={max_norm} changes its weights in the forward pass, each replica by its "
                "own rows; leave max_norm out, and scale the weights after strategy.run, under torch.no_grad()"
            )
        return PROCEED

    def _write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Any = None) -> Any:
        target = args[0] if args else next(iter(kwargs.values()), None)
        targets = target if isinstance(target, (list, tuple)) else (target,)
        tensors = [leaf for leaf in targets if isinstance(leaf, torch.Tensor)]
        if not tensors or (context := get_replica_context()) is None:
            return PROCEED
        if any(self._ownership.is_weight(tensor) for tensor in tensors):
            if torch.is_grad_enabled() and any(tensor.requires_grad and tensor.is_leaf for tensor in tensors):
                return PROCEED  # which torch refuses
            read, named = read_tensors((args if call is None else call, kwargs))  # variables have other values there
            name = f"in-place change of a weight ({getattr(func, '__name__', func)})"
            make = partial(_write_once, context.workers, self._ownership)
            context.meet(name, _Write(func, read, named, tensors), make)
            return target
        for tensor in tensors:
            other = None if id(tensor) in self._local_ids else self._claims.other_writer(tensor, self._replica)
            if other is not None:
                raise UsageError(
                    f"{self._both(other)} both change one tensor of shape {tuple(tensor.shape)} in place "
                    f"({getattr(func, '__name__', func)} at {call_site()}); return each replica's value and use "
                    "strategy.reduce, keep it in strategy.variable(...), or mirror the module or metric that holds "
                    "it; copy a batch first (x = x.clone())"
                )
        return PROCEED


class StepGuards(Watcher):
    """The guards of a strategy's local replicas. They look at every run, and so stay in the replicas' function modes.

    One whole replica reads what one device would, so that nothing of it need be refused.

    Args:
        objects: what the strategy has mirrored.
        modes: the function mode of each local replica.
        replicas: those of all workers.
    """

    sees_every_step = False

    def __init__(self, objects: MirroredObjects, modes: Sequence[ReplicaRng], replicas: int) -> None:
        self._objects, self._modes, self._has_others = objects, modes, replicas > 1
        self._claims, self._revision = Claims(), (-1, -1)

    def looks_at(self, run: Run) -> Sequence[Watcher]:
        """Begins the claims of the run; makes the guards anew where a module, a weight or a sum has changed."""
        if self._has_others or self._objects.are_parts:
            self._claims.clear(one_replica=len(self._modes) == 1)
            if self._revision != self._objects.revision:
                self._revision = self._objects.revision
                ownership, gradients = Ownership(self._objects.modules), StepGradients(self._objects)
                for replica, mode in enumerate(self._modes):
                    guard = StepGuard(replica, ownership, self._claims, gradients)
                    mode.guarded_by(guard, guard.guarded)
        return ()


_CHECKS: dict[Any, Callable[[StepGuard, Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    **dict.fromkeys(_WRITERS, StepGuard._write),
    **dict.fromkeys((F.embedding, F.embedding_bag), StepGuard._check_embedding),
    **dict.fromkeys((*_HOOKS, SET_DATA, GET_GRAD, SET_GRAD), StepGuard._check_parameter),
    SET_GRAD_MODE: StepGuard._check_metric,  # which every update of a torchmetrics metric calls first
    MAKE_DUAL: lambda *_: refuse_forward_mode(),
}
"""What is done at a call of a function."""


@dataclass(frozen=True, slots=True)
class _Write:
    """One replica's call that changes weights in place."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: Sequence[torch.Tensor]


def _write_once(workers: Communicator, ownership: Ownership, writes: list[_Write]) -> None:
    """Changes a weight in place as one device does: the first replica makes the call, and all have the result."""
    first, *rest = writes
    name = getattr(first.func, "__name__", first.func)
    if is_random(first.func):
        raise UsageError(
            f"the step draws random numbers into a weight ({name}), and each replica draws its own; do it outside "
            "strategy.run, under torch.no_grad()"
        )
    for replica, other in enumerate(rest, start=1):
        operands, operands_of_other = _operands(first), _operands(other)
        if len(operands) != len(operands_of_other) or not all(map(_are_equal, operands, operands_of_other)):
            raise UsageError(
                f"the step changes a weight in place ({name}) by values that differ between replica 0 and replica "
                f'{replica}; reduce them first with ls.get_replica_context().all_reduce("sum", value)'
            )
    # Without the modes: the call was looked at when the replicas made it, and its numbers are no replica's own.
    with DisableTorchFunction():
        if not workers.is_single:
            workers.add_digest(_digest(first, ownership))
        first.func(*first.args, **first.kwargs)
        with torch.no_grad():
            # Replicas of one device alias the weights and have the result already; those with a memory limit do not.
            for other in rest:
                for target, source in zip(other.targets, first.targets, strict=True):
                    if target.data_ptr() != source.data_ptr():
                        target.copy_(source)


def _digest(write: _Write, ownership: Ownership) -> int:
    """Of what must be equal on all workers; weights are."""
    digest = zlib.crc32(getattr(write.func, "__name__", "").encode())
    for operand in _operands(write):
        if not isinstance(operand, torch.Tensor):
            digest = zlib.crc32(repr(operand).encode(), digest) if isinstance(operand, _PLAIN) else digest
        elif not ownership.is_weight(operand):
            digest = (digest * 31 + tensor_digest(operand)) % 2**64
    return digest


def _operands(write: _Write) -> list[Any]:
    targets = {id(target) for target in write.targets}
    leaves, _ = tree_flatten((write.args, write.kwargs))
    return [leaf for leaf in leaves if id(leaf) not in targets]


def _are_equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None and isinstance(one, numpy.ndarray) and isinstance(other, numpy.ndarray):
            return bool(numpy.array_equal(one, other))  # == is elementwise
        return builtins.type(one) is builtins.type(other) and bool(one == other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return one.data_ptr() == other.data_ptr() or torch.equal(one.detach(), other.detach().to(one.device))


def _is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
    return alike and one.data_ptr() == other.data_ptr()


def _storage(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # a sparse tensor has no storage of its own
        return -id(tensor)


@contextmanager
def refusing_plain_calls(mirrored: Iterable[MirroredModule]) -> Iterator[None]:
    """Inside the block a replica other than 0 that calls a user's module, or a part of it, gets a UsageError."""
    # In first runs alone: the check is a hook, which torch.compile would take for a part of the compiled module.
    plain = [module.module for module in mirrored]
    # A mirrored metric is one object in all copies.
    owners = {
        id(part): module
        for module in plain
        for part in module.modules()
        if not isinstance(part, MirroredMetric) and ONE_OBJECT not in vars(part)
    }

    def check(part: nn.Module, _: Any) -> None:
        context = get_replica_context()
        if context is not None and context.local_replica > 0 and id(part) in owners:
            raise UsageError(
                f"the step calls the plain {type(owners[id(part)]).__name__}, which is replica 0's copy, in "
                f"replica {context.replica_id_in_sync_group}; call what strategy.mirror(module) returned"
            )

    handle = register_module_forward_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()
