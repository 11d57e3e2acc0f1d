"""What the first run of a step function is looked at for: things that all replicas have in common.

    before     what the function and the module's hooks have captured; buffers; Python's and NumPy's random numbers
    meanwhile  which functions run; which tensors the mirrored modules are called with; whether a loss is a shard's mean
    after      what has changed of it, once for each function, as a warning

Programs do each of these on purpose too, so none is an error, but forward-mode AD, which replicas cannot
have at the same time. Later runs cost nothing.
"""

from __future__ import annotations

import dis
import functools
import pickle
import random
import sys
import sysconfig
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from lockstep.errors import LockstepError, UsageError
from lockstep.mirroring.module.module import MirroredModule
from lockstep.mirroring.step_guard import refuse_forward_mode, refusing_plain_calls
from lockstep.replicas.context import ReplicaContext, get_replica_context
from lockstep.replicas.rng.mode import ReplicaRng
from lockstep.strategies.backward_check import Passes, counted_by_each, means_over_shards, over_rows

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_CONTAINERS = (list, dict, set, deque)


class HookStores:
    """The containers and objects outside of modules that their hooks reach, and the tensors in them when a run begins.

    Args:
        modules: the mirrored modules.
        captured_by: gives names and values of what a function has captured.
    """

    def __init__(
        self, modules: Sequence[MirroredModule], captured_by: Callable[[Any], Iterator[tuple[str, Any]]]
    ) -> None:
        self._modules = modules
        self._captured_by = captured_by
        self._before = {id(store): _tensors(store) for _, _, store in self._stores()}

    def check(self, replicas: int) -> None:
        """After the run, or where it has failed.

        Raises:
            UsageError: a hook has kept a tensor there.
        """
        for hook, name, store in self._stores():
            seen = {id(each) for each in self._before.get(id(store), ())}
            fresh = [each for each in _tensors(store) if id(each) not in seen]
            if fresh and not _by_replica(store, replicas):
                raise UsageError(
                    f"the hook {hook} keeps tensors of the step in {name}, outside of the module, where the replicas "
                    "overwrite each other's; keep them on the part that the hook is called with (part.kept = output), "
                    "and read them in the step from the mirrored module (mirrored.get_submodule(name).kept)"
                )

    def _stores(self) -> Iterator[tuple[str, str, Any]]:
        for module in self._modules:
            for copy in module.copies:
                parts = list(copy.modules())
                hooks = [hook for part in parts for kind in _HOOKS for hook in vars(part).get(kind, {}).values()]
                own = {id(value) for part in parts for value in vars(part).values()} if hooks else set()
                for hook in hooks:
                    for name, store in self._reached(hook):
                        if id(store) not in own:
                            yield getattr(hook, "__qualname__", type(hook).__name__), name, store

    def _reached(self, hook: Any) -> Iterator[tuple[str, Any]]:
        while isinstance(hook, partial):
            for value in hook.args:
                if isinstance(value, _CONTAINERS):
                    yield "an argument of a partial", value
            hook = hook.func
        if isinstance(hook, FunctionType):
            for name, value in self._captured_by(hook):
                if isinstance(value, _CONTAINERS) or _is_object(value):
                    yield repr(name), value
        holder = hook.__self__ if isinstance(hook, MethodType) else hook
        if _is_object(holder):
            yield f"a {type(holder).__name__}", holder


def _is_object(value: Any) -> bool:
    others = (nn.Module, torch.Tensor, FunctionType, type)
    return hasattr(value, "__dict__") and not isinstance(value, others) and type(value).__module__ != "builtins"


def _tensors(store: Any) -> list[torch.Tensor]:
    content = store if isinstance(store, _CONTAINERS) else dict(vars(store))
    content = list(content) if isinstance(content, (set, deque)) else content
    return [leaf for leaf in tree_leaves(content) if isinstance(leaf, torch.Tensor)]


def _by_replica(store: Any, replicas: int) -> bool:
    """Whether the program keeps one for each replica, by its number."""
    return isinstance(store, dict) and set(range(replicas)) <= {key for key in store if type(key) is int}


_FORWARD_MODE = torch.autograd.forward_ad.enter_dual_level.__code__
_BACKWARD = torch.autograd.backward.__code__
_GRADIENTS = torch.autograd.grad.__code__
_TORCH = ReplicaRng.__torch_function__.__code__
_SUMMING = ReplicaContext.all_reduce.__code__
_SAVING_HOOKS = torch.autograd.graph.saved_tensors_hooks.__init__.__code__
_NUMBERS = (int, float)
_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
_ARRAY_BYTES = 2**20
"""Larger arrays of NumPy are not looked into, whether they have been changed."""
_LIBRARIES = tuple(str(Path(each.__file__ or "").parent) for each in (torch, sys.modules["lockstep"]))


class FirstRun:
    """The first run of one step function.

    Args:
        fn: the step function.
        modules: the strategy's mirrored modules.
        replicas: how many replicas there are, of all workers.
        rows: of each local replica's batch; None where it has none.
        distributed: whether any argument has a value for each replica.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        modules: Sequence[MirroredModule],
        replicas: int,
        rows: Sequence[int | None],
        *,
        distributed: bool,
    ) -> None:
        self._fn = fn
        self._modules = modules
        self._replicas = replicas
        self._rows = rows
        self._distributed = distributed
        self._fed: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in rows]
        self._ran: dict[CodeType, dict[str, Any]] = {}
        self._passes = [Passes() for _ in rows]
        self._weights = {id(each) for module in modules for copy in module.copies for each in copy.parameters()}

    @contextmanager
    def looked_at(self) -> Iterator[None]:
        """Around the run."""
        captured = {name: (value, state_of(value)) for name, value in self._captured()}
        before = [[_values(_counting_buffers(copy)) for copy in module.copies] for module in self._modules]
        drawn, stores = _stream_states(), HookStores(self._modules, captured_by)
        for module in self._modules:
            module.on_call = self._called
        try:
            with refusing_plain_calls(self._modules):
                yield
        except (RuntimeError, LookupError, AttributeError) as error:
            if len(self._rows) > 1 and not isinstance(error, LockstepError):
                _explain(stores, error, len(self._rows))
            raise
        finally:
            for module in self._modules:
                module.on_call = None
        if len(self._rows) > 1:
            stores.check(len(self._rows))
            self._tell_of_draws(drawn)
            self._tell_of_captured(captured)
        self._tell_of_buffers(before)
        self._tell_of_inputs()
        if self._distributed and not _is_of_libraries(self._fn):
            self._tell_of_losses()

    def body(self, body: Callable[[], Any]) -> Callable[[], Any]:
        """One replica's part of the run, with a note of each function that it runs through."""
        return partial(self._run, body)

    def _run(self, body: Callable[[], Any]) -> Any:
        if len(self._rows) == 1 or sys.getprofile() is not None:
            return body()
        sys.setprofile(self._entered)
        try:
            return body()
        finally:
            sys.setprofile(None)

    def _entered(self, frame: FrameType, event: str, given: Any) -> None:
        code = frame.f_code
        if event == "call" and code not in self._ran:
            if code is _FORWARD_MODE and len(self._rows) > 1:
                refuse_forward_mode()
            self._ran[code] = frame.f_globals
        if event == "call" and code is _TORCH:
            context = get_replica_context()
            if context is not None:
                local = frame.f_locals
                self._passes[context.local_replica].called(local["func"], local["args"], local["kwargs"] or {})
        elif code is _BACKWARD or code is _GRADIENTS or code is _SUMMING:
            with _unseen():
                self._differentiates(frame, event, given)

    def _differentiates(self, frame: FrameType, event: str, given: Any) -> None:
        context, local = get_replica_context(), frame.f_locals
        if context is None:
            return
        passes = self._passes[context.local_replica]
        if event == "call" and frame.f_code is _BACKWARD and local.get("inputs") is None:
            passes.begins_at(local["tensors"], saved=_SAVING_HOOKS not in self._ran)
        elif event == "call" and frame.f_code is _SUMMING:
            for leaf in tree_leaves(local["value"]):
                if isinstance(leaf, torch.Tensor):
                    passes.summed(leaf)
        elif event == "call" and frame.f_code is _GRADIENTS:
            passes.twice = True
        elif event == "return" and frame.f_code is _GRADIENTS and isinstance(given, tuple):
            asked = {id(each) for each in tree_leaves(local["inputs"])}
            passes.differentiated(local["outputs"], given if asked & self._weights else (), _line_of(frame))

    def _called(self, module: MirroredModule, args: Any, kwargs: Any) -> None:
        """A mirrored module is called in a replica."""
        context = get_replica_context()
        if context is not None and module.training and torch.is_grad_enabled():
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.ndim]
            self._fed[context.local_replica].append(tuple(tensors))

    def _captured(self) -> Iterator[tuple[str, Any]]:
        for fn in (self._fn, *self._hooks()):
            yield from captured_by(fn)
        owner = getattr(self._fn, "__self__", None)
        parts = {id(part) for module in self._modules for part in (module, *module.module.modules())}
        if isinstance(owner, nn.Module) and _is_of_the_user(owner) and id(owner) not in parts:
            yield from _watched(f"{type(owner).__name__}.", vars(owner).items())

    def _hooks(self) -> Iterator[Callable[..., Any]]:
        parts = [part for module in self._modules for part in module.module.modules()]
        for part in parts:
            for kind in _HOOKS:
                yield from vars(part).get(kind, {}).values()

    def _tell_of_draws(self, before: dict[str, Any]) -> None:
        now = _stream_states()
        for name in before:
            lines = _draws(self._ran, name) if before[name] != now[name] else []
            if lines:
                self._tell(
                    f"draws from {name}'s random numbers at {', '.join(lines)}, of which all replicas have one stream, "
                    "so numbers differ from run to run; draw with torch, where each replica has its own, or give each "
                    "replica a generator of its own with ls.PerReplica"
                )

    def _tell_of_captured(self, before: dict[str, tuple[Any, Any]]) -> None:
        now = [
            (name, value) for name, value in self._captured() if name in before and before[name][1] != state_of(value)
        ]
        generators = [name for name, value in now if _is_generator(value)]
        changed = [name for name, value in now if not _is_generator(value)]
        if generators:
            self._tell(
                f"draws from {', '.join(map(repr, dict.fromkeys(generators)))}, a random generator that all replicas "
                "have in common, so numbers differ from run to run; draw with torch, where each replica has its own, "
                "or give each replica a generator of its own with ls.PerReplica"
            )
        if changed:
            self._tell(
                f"changes {', '.join(map(repr, dict.fromkeys(changed)))} from outside it, which every one of "
                f"{len(self._rows)} replicas does; return the value from the step, and change it after strategy.run"
            )

    def _tell_of_buffers(self, before: Sequence[Sequence[dict[str, torch.Tensor]]]) -> None:
        for module, olds in zip(self._modules, before, strict=True):
            copies = [_counting_buffers(copy) for copy in module.copies]
            for name in [name for name in copies[0] if all(name in each for each in (*copies, *olds))]:
                now, old = [each[name] for each in copies], [each[name] for each in olds]
                if not self._alike(now, old):
                    how = "averaged" if now[0].is_floating_point() else "replica 0's"
                    self._tell(
                        f"changes the buffer {name!r} of {type(module.module).__name__}, in each replica by its own "
                        f"shard, and read outside it is {how}; where it counts rows or adds up values, sum those with "
                        'ls.get_replica_context().all_reduce("sum", value) before they are added'
                    )

    def _alike(self, now: Sequence[torch.Tensor], old: Sequence[torch.Tensor]) -> bool:
        """Whether a buffer is what one device would have."""
        if all(torch.equal(each, before) for each, before in zip(now, old, strict=True)):
            return True
        if any(not torch.equal(now[0].cpu(), other.cpu()) for other in now[1:]):
            return False
        if now[0].shape != old[0].shape:
            return True
        added = (now[0] - old[0]) if now[0].dtype is not torch.bool else now[0].int() - old[0].int()
        rows = self._rows[0] or 0
        counts_rows = rows > 1 and bool((added == rows).any())
        return not counts_rows and (now[0].is_floating_point() or bool(((added == 0) | (added == 1)).all()))

    def _tell_of_inputs(self) -> None:
        first, *others = self._fed
        alone = not others and not self._distributed
        for at, tensors in enumerate(first):
            same = all(len(fed) > at and _same_objects(fed[at], tensors) for fed in others) and (others or alone)
            if same and any(len(each) > 1 for each in tensors):
                self._tell(
                    f"calls a mirrored module on one batch of shape {tuple(tensors[0].shape)} in all "
                    f"{self._replicas} replicas, and its gradients count once for each; divide it with "
                    "strategy.distribute_dataset(batches), and hand what that yields to strategy.run"
                )
                return

    def _tell_of_losses(self) -> None:
        if means_over_shards(self._passes, self._rows, self._replicas):
            self._tell(
                f"back-propagates a mean over each replica's rows, and the gradients of {self._replicas} replicas are "
                'added up; compute one loss a row (reduction="none") and give them to ls.compute_average_loss(losses, '
                "global_batch_size=rows), which divides by the global batch"
            )
        if counted_by_each(self._passes, self._rows, self._replicas):
            self._tell(
                "back-propagates a term that is the same in all replicas, as a penalty on weights is, and it counts "
                f"{self._replicas} times; divide it among them with ls.scale_regularization_loss(term)"
            )
        mixing = over_rows(self._passes, self._rows)
        if mixing:
            self._tell(
                f"compares or takes together the rows of its shard ({', '.join(mixing)}), where one device "
                "has all rows of the batch; gather them first with ls.get_replica_context().all_gather(value, axis=0), "
                'or take means and variances from sums, all_reduce("sum", value.sum(0))'
            )
        lines = dict.fromkeys(line for passes in self._passes for line in passes.gradients)
        if lines:
            self._tell(
                f"asks torch.autograd.grad for gradients of weights at {', '.join(lines)}, which are those of one "
                "replica's rows; where it does more with them than to add them up over rows (norms, projections, "
                'penalties), sum them first with ls.get_replica_context().all_reduce("sum", gradient), or call '
                "backward() and read .grad, which is the sum over all replicas"
            )

    def _tell(self, what: str) -> None:
        code = getattr(_plain(self._fn), "__code__", None)
        where = "" if code is None else f" ({Path(code.co_filename).name}:{code.co_firstlineno})"
        name = getattr(_plain(self._fn), "__qualname__", type(self._fn).__qualname__)
        warnings.warn(f"the step {name}{where} {what}", stacklevel=6)


@contextmanager
def _unseen() -> Iterator[None]:
    """For what the look computes itself: no mode of the program sees it; what is freed since is not looked at."""
    with suppress(Exception), torch._C.DisableTorchFunction(), torch.no_grad(), _disable_current_modes():
        yield


def _plain(fn: Any) -> Any:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__func__", fn)


def _explain(stores: HookStores, error: Exception, replicas: int) -> None:
    """Says of an error what has led to it, where replicas have overwritten each other's tensors."""
    try:
        stores.check(replicas)
    except UsageError as cause:
        raise cause from error


def _is_of_libraries(fn: Any) -> bool:
    code = getattr(_plain(fn), "__code__", None)
    return code is not None and code.co_filename.startswith(_LIBRARIES)


def _line_of(frame: FrameType) -> str:
    above: FrameType | None = frame
    while above is not None and above.f_code.co_filename.startswith(_LIBRARIES):
        above = above.f_back
    return "" if above is None else f"{Path(above.f_code.co_filename).name}:{above.f_lineno} in {above.f_code.co_name}"


def captured_by(fn: Any) -> Iterator[tuple[str, Any]]:
    """What a function can reach and change: of its closure, of its object, and its module's globals.

    Containers, numbers, tensors and names that are None, also as attributes of what it can reach.
    """
    while isinstance(fn, functools.partial):
        fn = fn.func
    owner = getattr(fn, "__self__", None if hasattr(fn, "__code__") else fn)
    plain = _plain(fn)
    code: CodeType | None = getattr(plain, "__code__", None)
    if code is not None and code.co_filename.startswith(_LIBRARIES):
        return
    if owner is not None and not isinstance(owner, (nn.Module, ModuleType)):
        yield from _watched(f"{type(owner).__name__}.", getattr(owner, "__dict__", {}).items())
    if code is not None:
        cells = zip(code.co_freevars, plain.__closure__ or (), strict=True)
        yield from _watched("", [(name, cell.cell_contents) for name, cell in cells if _is_set(cell)])
        yield from _watched("", [(name, plain.__globals__.get(name)) for name in code.co_names])


def _watched(prefix: str, items: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    for name, value in items:
        if _is_watched(value):
            yield prefix + name, value
        elif not isinstance(value, nn.Module) and _is_of_the_user(value):
            for attribute, kept in vars(value).items():
                if _is_watched(kept):
                    yield f"{prefix}{name}.{attribute}", kept


def _is_watched(value: Any) -> bool:
    simple = value is None or isinstance(value, (*_CONTAINERS, torch.Tensor)) or type(value) in _NUMBERS
    return simple or _is_array(value) or _is_generator(value)


def _is_of_the_user(value: Any) -> bool:
    """Whether a value is an object of a class that belongs to no library."""
    kind = type(value)
    if isinstance(value, (type, ModuleType)) or not hasattr(value, "__dict__"):
        return False
    if kind.__module__ == "__main__":
        return True
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is not None and not file.startswith((*_INSTALLED, *_LIBRARIES))


def _is_array(value: Any) -> bool:
    return type(value).__module__ == "numpy" and hasattr(value, "tobytes")


def _is_generator(value: Any) -> bool:
    return isinstance(value, random.Random) or type(value).__module__.startswith("numpy.random.")


def _is_set(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # not assigned yet
        return False


def state_of(value: Any) -> Any:
    """What tells whether a container or number has been changed since."""
    if _is_generator(value):
        return pickle.dumps(value)
    if value is None or isinstance(value, torch.Tensor):
        return id(value)
    if _is_array(value):
        return id(value), value.tobytes() if value.nbytes <= _ARRAY_BYTES else b""
    if isinstance(value, dict):
        return [(key, id(each)) for key, each in value.items()]
    return [id(each) for each in value] if isinstance(value, _CONTAINERS) else value


def _counting_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers of a module by name, but those of norms, whose statistics are known."""
    known = {id(buffer) for part in module.modules() if isinstance(part, _NormBase) for buffer in part.buffers()}
    return {name: buffer for name, buffer in module.named_buffers() if id(buffer) not in known}


def _values(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _same_objects(ours: Sequence[Any], theirs: Sequence[Any]) -> bool:
    return len(ours) == len(theirs) and all(mine is other for mine, other in zip(ours, theirs, strict=True))


def _stream_states() -> dict[str, Any]:
    """Where the global random streams stand."""
    states: dict[str, Any] = {"Python": random.getstate()}
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        states["NumPy"] = (kind, keys.tobytes(), *rest)
    return states


def _draws(ran: dict[CodeType, dict[str, Any]], name: str) -> list[str]:
    """The lines, of functions that have run, which name a global random stream's functions."""
    stream = random if name == "Python" else sys.modules["numpy"].random
    home = {random.__file__, *_LIBRARIES, str(Path(getattr(stream, "__file__", "")).parent)}
    found: dict[str, None] = {}
    for code, names in list(ran.items()):
        if code.co_filename.startswith(tuple(home - {str(Path(random.__file__).parent)})):
            continue
        for line, value in _names(code, names):
            if _belongs(value, stream):
                found[f"{Path(code.co_filename).name}:{line} in {code.co_name}"] = None
    return list(found)


def _names(code: CodeType, names: dict[str, Any]) -> Iterator[tuple[int, Any]]:
    """What a function's global names and attributes of modules stand for, with their lines."""
    imported: dict[str, Any] = {}
    above: Any = None
    for instruction in dis.get_instructions(code):
        value = None
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            value = names.get(instruction.argval)
        elif instruction.opname.startswith("LOAD_FAST"):
            value = imported.get(instruction.argval) if isinstance(instruction.argval, str) else None
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and isinstance(above, ModuleType):
            value = getattr(above, instruction.argval, None)
        elif instruction.opname == "IMPORT_NAME":
            value = sys.modules.get(instruction.argval)
        elif instruction.opname == "STORE_FAST" and isinstance(above, ModuleType):
            imported[instruction.argval] = above
        above = value
        if value is not None and instruction.positions is not None:
            yield instruction.positions.lineno or code.co_firstlineno, value


def _belongs(function: Any, stream: Any) -> bool:
    """Whether a function is one of a global stream: a method of the object that the module keeps it in."""
    owner = getattr(function, "__self__", None)
    return owner is not None and not isinstance(owner, ModuleType) and owner is stream.random.__self__
