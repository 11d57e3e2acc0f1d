"""Looks at the first run of a step function for what would give other numbers than one device, and warns.

    before     notes what the function and the module's hooks reach, buffers, and Python's and NumPy's random states
    during     notes which functions run, what the mirrored modules are called with, and which losses are differentiated
    after      compares, and warns once for each step function

Each of these can be intended, so they are warnings. Refused are forward-mode AD, which replicas cannot use at the same
time, and hooks that keep tensors of all replicas in one place. Later runs are not looked at.
"""

from __future__ import annotations

import pickle
import random
import sys
import sysconfig
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FrameType, ModuleType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from lockstep._torch_compat import (
    DisableTorchFunction,
    NormBase,
    disable_dispatch_modes,
    functional_call_code,
    tree_leaves,
)
from lockstep.collectives.communicator import Communicator
from lockstep.errors import LockstepError, UsageError
from lockstep.introspection import attribute_of, attributes_of, is_kind, module_of
from lockstep.mirroring.module.module import MirroredModule
from lockstep.mirroring.step_guard import refuse_forward_mode, refusing_plain_calls
from lockstep.replicas.context import ReplicaContext, get_replica_context
from lockstep.replicas.rng.mode import ReplicaRng
from lockstep.strategies.backward_check import Passes, loss_warnings
from lockstep.strategies.row_check import RowCheck
from lockstep.strategies.seeded_draws import SeededDraws, equal_draws, same_numbers
from lockstep.strategies.step_names import LIBRARIES, description_of_step, is_of_the_package, plain_function

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
Captures = dict[tuple[int, str, str], tuple[Any, Any]]
"""By the id and the name of a hook, or 0 and "" for the step, and a name in it: the value, and its state before."""
_CONTAINERS = (list, dict, set, deque)
_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
_ARRAY_BYTES = 2**20
"""The contents of larger NumPy arrays are not compared."""
_DRAW_ADVICE = (
    "numbers differ from run to run; draw with torch, where each replica has its own, or give each replica a generator "
    "with ls.PerReplica"
)
_FORWARD_MODE = torch.autograd.forward_ad.enter_dual_level.__code__
_BACKWARD = torch.autograd.backward.__code__
_GRADIENTS = torch.autograd.grad.__code__
_GENERATORS = (torch.Generator, random.Random)
_PYTHON_GENERATOR: Any = attribute_of(random.random, "__self__")
_TORCH = ReplicaRng.__torch_function__.__code__
_SUMMING = ReplicaContext.all_reduce.__code__
_GATHERING = ReplicaContext.all_gather.__code__
_SAVING_HOOKS = torch.autograd.graph.saved_tensors_hooks.__init__.__code__


class FirstRun:
    """The first run of one step function ``fn``.

    ``replicas`` are those of all ``workers``, ``rows`` those of each local replica's batch or None, and ``distributed``
    says whether any argument has a value for each replica. ``row_check`` is what checks the losses in the same run.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        modules: Sequence[MirroredModule],
        replicas: int,
        rows: Sequence[int | None],
        *,
        distributed: bool,
        workers: Communicator,
    ) -> None:
        self._fn, self._modules, self.replicas, self._rows = fn, modules, replicas, rows
        self._is_later = False
        self._module_refs = [ref(module) for module in modules]
        self._workers = workers
        self._distributed = distributed
        self.row_check: RowCheck | None = None
        self.waits = False  # for an update, when it shows over how many runs gradients are accumulated
        self.has_warned = False  # whether something was said of losses
        self.cycle = 0  # the number of runs whose gradients are accumulated for an update, once it is known
        self._inputs: list[list[list[Tensor]]] = [[] for _ in rows]  # of each call of a mirrored module
        # Functions with their globals, by id: those that torch.compile makes cannot be hashed.
        self._functions: dict[int, tuple[CodeType, dict[str, Any]]] = {}
        self._passes = [Passes() for _ in rows]
        self._functional_calls: dict[int, tuple[Any, int]] = {}  # by the id of a module: it, and the first replica
        self._seeded_draws = [SeededDraws() for _ in rows]
        self._draws_from_python = False  # a replica has called Python's global generator
        self._weights = {id(weight) for module in modules for copy in module.copies for weight in copy.parameters()}

    @contextmanager
    def looked_at(self) -> Iterator[None]:
        """A block around the run: it notes states before, compares them afterwards, and warns."""
        if self._is_later:
            yield
            self._warn_of_losses(cycle=self.cycle)
            return
        self._begin_scalers()
        captures = {key: (value, state_of(value)) for key, value in self._captured()}
        buffers = [[_counting_buffers(copy) for copy in module.copies] for module in self._modules]
        before = [[{name: buffer.clone() for name, buffer in copy.items()} for copy in copies] for copies in buffers]
        states = _generator_states()
        for module in self._modules:
            module.on_call.append(self._called)
            module.is_in_first_run = True
        try:
            with refusing_plain_calls(self._modules):
                yield
        except (RuntimeError, LookupError, AttributeError) as error:
            # Replicas that overwrite each other's tensors in a hook fail in many ways; the hook is what to tell of.
            if len(self._rows) > 1 and not isinstance(error, LockstepError):
                self._refuse_hooks(captures)
            raise
        finally:
            for module in self._modules:
                module.on_call.remove(self._called)
                module.is_in_first_run = False
        if len(self._rows) > 1:
            self._refuse_hooks(captures)
            self._warn_of_draws(states)
            self._warn_of_captured(captures)
        self._warn_of_equal_draws()
        self._warn_of_buffers(before)
        self._warn_of_inputs()
        for passes in self._passes:
            passes.forget_graphs()
        self._warn_of_losses(cycle=0 if self._accumulates() else 1)
        self._forget()

    def run(self, body: Callable[[], Any]) -> Any:
        """Runs the body of one replica and notes the functions that it calls."""
        # A profiler of the program's is left alone: there is one profile function a thread.
        if sys.getprofile() is not None:
            return body()
        # A function mode sees torch's calls alone. The draws of Python's and NumPy's generators, and which functions of
        # the program have run, show in a profile function only; it is slow, so only a first run has one.
        sys.setprofile(self._entered if len(self._rows) > 1 else self._drawn)
        try:
            return body()
        finally:
            sys.setprofile(None)

    def _drawn(self, frame: FrameType, event: str, arg: Any) -> None:
        """Notes draws of random numbers."""
        code = frame.f_code
        # Thousands of functions in C are called in a step, so types alone are compared before anything else is asked.
        if event == "c_call":
            is_generators = type(arg) is BuiltinFunctionType and type(arg.__self__) in _GENERATORS
            self._draws_from_python |= is_generators and arg.__self__ is _PYTHON_GENERATOR
            context = get_replica_context() if is_generators else None
            if context is not None:
                self._seeded_draws[context.local_replica].called_in_c(arg, partial(_line_of, frame))
        elif event == "call" and code is _TORCH:
            context, local = get_replica_context(), frame.f_locals
            if context is not None:
                call = (local["self"], local["func"], local["args"], local["kwargs"] or {})
                with _unseen():
                    self._seeded_draws[context.local_replica].called(*call, partial(_line_of, frame))
        elif event == "return" and not _is_of_a_library(code.co_filename):
            context = get_replica_context()
            if context is not None:
                self._seeded_draws[context.local_replica].returns(frame)

    def _entered(self, frame: FrameType, event: str, arg: Any) -> None:
        self._drawn(frame, event, arg)
        code = frame.f_code
        if event == "call" and id(code) not in self._functions:
            if code is _FORWARD_MODE:
                refuse_forward_mode()
            self._functions[id(code)] = code, frame.f_globals
        if event == "call" and code is functional_call_code:
            self._refuse_shared_module(frame.f_locals["module"])
        if code is _GATHERING and (context := get_replica_context()) is not None:
            self._passes[context.local_replica].calls_collectives = True
        if code is _BACKWARD or code is _GRADIENTS or code is _SUMMING:
            with _unseen():
                self._differentiates(frame, event, arg)

    def _refuse_shared_module(self, module: Any) -> None:
        """``functional_call`` gives a module other weights for as long as it runs, and takes them away at its end."""
        context = get_replica_context()
        if context is None or is_kind(module, MirroredModule):
            return
        caller = self._functional_calls.setdefault(id(module), (module, context.local_replica))[1]
        if caller != context.local_replica:
            kind = type(module).__name__
            raise UsageError(
                f"the step calls functional_call on one {kind} in replicas {caller} and {context.local_replica}, which "
                "sets weights on it while the other uses it; make the module in the step (copy.deepcopy(net)"
                '.to("meta")), give each replica its own with ls.PerReplica([copy.deepcopy(base), ...]), or call what '
                "strategy.mirror(module) returned"
            )

    def _differentiates(self, frame: FrameType, event: str, arg: Any) -> None:
        context, local = get_replica_context(), frame.f_locals
        if context is None:
            return
        passes = self._passes[context.local_replica]
        # What hooks have saved, as gradient checkpointing's, would be computed anew if it were looked at.
        if event == "call" and frame.f_code is _BACKWARD and local.get("inputs") is None:
            passes.begins_at(local["tensors"], saved=id(_SAVING_HOOKS) not in self._functions)
        elif event == "call" and frame.f_code is _SUMMING:
            for leaf in tree_leaves(local["value"]):
                if isinstance(leaf, Tensor):
                    passes.summed(leaf)
        elif event == "return" and frame.f_code is _GRADIENTS and isinstance(arg, tuple):
            ids = {id(leaf) for leaf in tree_leaves(local["inputs"])}
            passes.differentiated(local["outputs"], arg if ids & self._weights else (), _line_of(frame))

    def _called(self, module: MirroredModule, args: Any, kwargs: Any) -> None:
        """A mirrored module is called in a replica."""
        context = get_replica_context()
        if context is not None and module.training and torch.is_grad_enabled():
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.ndim]
            self._inputs[context.local_replica].append(tensors)

    def _begin_scalers(self) -> None:
        """Has each GradScaler that the step reaches make its scale, which it otherwise does at its first use.

        Two replicas that use it at once may both begin to, and one of them ends in torch's AssertionError
        "_growth_tracker initialized before _scale".
        """
        weights = [weight for module in self._modules for weight in module.module.parameters()]
        for _, scaler in captured_by(self._fn, _is_scaler) if weights else ():
            scaler.scale(torch.ones((), device=weights[0].device))

    def _captured(self) -> Iterator[tuple[tuple[int, str, str], Any]]:
        """Yields the values outside the modules that the step and the hooks can reach, by the keys of ``Captures``."""
        parts = [part for module in self._modules for part in module.module.modules()]
        values = [value for part in (*self._modules, *parts) for value in (part, *vars(part).values())]
        value_ids = {id(value) for value in values if is_kind(value, _CONTAINERS) or attributes_of(value) is not None}
        for hook in (hook for part in parts for kind in _HOOKS for hook in vars(part).get(kind, {}).values()):
            name = attribute_of(hook, "__qualname__", type(hook).__name__)
            captures = [] if id(attribute_of(hook, "__self__", hook)) in value_ids else captured_by(hook)
            yield from (((id(hook), name, inner), value) for inner, value in captures if id(value) not in value_ids)
        yield from (((0, "", name), value) for name, value in captured_by(self._fn))
        owner = attribute_of(self._fn, "__self__")
        if is_kind(owner, nn.Module) and _is_of_the_user(owner) and id(owner) not in value_ids:
            mutable = _matches_in(f"{type(owner).__name__}.", vars(owner).items(), _is_mutable)
            yield from (((0, "", name), value) for name, value in mutable)

    def _changed(self, before: Captures) -> Iterator[tuple[str, str, Any]]:
        """Yields the values that have changed since ``before``, except dicts with a key for each replica."""
        for key, value in self._captured():
            by_replica = is_kind(value, dict) and set(range(len(self._rows))) <= set(dict.keys(value))
            if key in before and before[key][1] != state_of(value) and not by_replica:
                yield (*key[1:], value)

    def _refuse_hooks(self, before: Captures) -> None:
        for hook, name, value in self._changed(before):
            leaves = tree_leaves(list(value) if is_kind(value, (set, deque)) else value)
            if hook and any(is_kind(leaf, Tensor) for leaf in leaves):
                raise UsageError(
                    f"the hook {hook} keeps tensors of the step in {name!r}, outside of the module, where the replicas "
                    "overwrite each other's; keep them on the part that the hook is called with (part.kept = output), "
                    "and read them in the step from the mirrored module (mirrored.get_submodule(name).kept)"
                )

    def _warn_of_draws(self, before: dict[str, Any]) -> None:
        now = _generator_states()
        for name in before:
            # Threads that prepare data draw meanwhile: KerasHub's preprocessors mask words in those of Grain. Calls of
            # NumPy's generator are not seen, because its functions are Cython's.
            by_replicas = self._draws_from_python or name != "Python"
            lines = _draws(self._functions.values(), name) if by_replicas and before[name] != now[name] else []
            if lines:
                self._warn(
                    f"draws from {name}'s random numbers at {', '.join(lines)}, of which all replicas have one stream, "
                    f"so {_DRAW_ADVICE}"
                )

    def _warn_of_equal_draws(self) -> None:
        line = equal_draws(self._seeded_draws)
        if line:
            self._warn(same_numbers(line))
        elif self.replicas > len(self._rows):
            digest, lines = self._seeded_draws[0].digest(), [line for _, line in self._seeded_draws[0].draws.values()]
            if digest:
                message = f"{description_of_step(self._fn)} {same_numbers(lines[0])}"
                self._workers.compare_draws(digest, partial(warnings.warn, message))

    def _warn_of_captured(self, before: Captures) -> None:
        generators: dict[str, None] = {}
        changes: dict[str, None] = {}
        for _, name, value in self._changed(before):
            (generators if _is_generator(value) else changes)[repr(name)] = None
        if generators:
            self._warn(f"draws from {', '.join(generators)}, which all replicas have in common, so {_DRAW_ADVICE}")
        if changes:
            self._warn(
                f"changes {', '.join(changes)} from outside it, which every one of {len(self._rows)} replicas does; "
                "return the value from the step, and change it after strategy.run"
            )

    def _warn_of_buffers(self, before: Sequence[Sequence[dict[str, Tensor]]]) -> None:
        for module, olds in zip(self._modules, before, strict=True):
            copies = [_counting_buffers(copy) for copy in module.copies]
            for name in [name for name in copies[0] if all(name in buffers for buffers in (*copies, *olds))]:
                now, old = [buffers[name] for buffers in copies], [buffers[name] for buffers in olds]
                if not _as_on_one_device(now, old, self._rows[0] or 0):
                    how = "averaged" if now[0].is_floating_point() else "replica 0's"
                    self._warn(
                        f"changes the buffer {name!r} of {type(module.module).__name__}, in each replica by its own "
                        f"shard, and read outside it is {how}; where it counts rows or adds up values, sum those with "
                        'ls.get_replica_context().all_reduce("sum", value) before they are added'
                    )

    def _warn_of_inputs(self) -> None:
        first, *rest = self._inputs
        if not rest and self._distributed:
            return
        for number, tensors in enumerate(first):
            same = all(len(calls) > number and list(map(id, calls[number])) == list(map(id, tensors)) for calls in rest)
            if same and any(len(tensor) > 1 for tensor in tensors):
                self._warn(
                    f"calls a mirrored module on one batch of shape {tuple(tensors[0].shape)} in all "
                    f"{self.replicas} replicas, and its gradients count once for each; divide it with "
                    "strategy.distribute_dataset(batches), and hand what that yields to strategy.run"
                )
                return

    @contextmanager
    def until_update(self, runs: int) -> Iterator[None]:
        """A block around the ``runs``-th run of a step whose gradients no update has used yet."""
        yield
        if not self._accumulates() and not self.has_warned:
            self._warn_of_losses(cycle=runs)

    def _forget(self) -> None:
        """Releases what a later update does not need, since this may live as long as the step function."""
        self._inputs.clear()
        self._seeded_draws, self._modules, self._functions = [], (), {}

    def _accumulates(self) -> bool:
        """Whether gradients of the run wait for an update. Until then each copy has those of its replica."""
        # Weak references: a look may wait for an update as long as the step function lives.
        modules = [module for reference in self._module_refs if (module := reference()) is not None]
        # An update takes the gradients of all copies away, so those of other copies show one that has not come.
        parameters = [parameter for module in modules for copy in module.copies[1:] for parameter in copy.parameters()]
        self.waits = any(parameter.grad is not None for parameter in parameters)
        return self.waits

    @property
    def calls_collectives(self) -> bool:
        """Whether the step has called a collective."""
        return any(passes.calls_collectives for passes in self._passes)

    def at_losses(self, rows: Sequence[int | None]) -> FirstRun:
        """A check of the losses alone, for a later run whose shards have ``rows`` rows."""
        modules = [module for reference in self._module_refs if (module := reference()) is not None]
        distributed, workers = self._distributed, self._workers
        look = FirstRun(self._fn, modules, self.replicas, rows, distributed=distributed, workers=workers)
        look._is_later, look.cycle = True, self.cycle
        return look

    def _warn_of_losses(self, *, cycle: int) -> None:
        self.cycle = cycle
        if self._distributed and not is_of_the_package(self._fn):
            mixing = None if self.row_check is None else self.row_check.mixing
            for message in loss_warnings(self._passes, self._rows, self.replicas, mixing=mixing, cycle=cycle):
                self.has_warned = True
                self._warn(message)

    def _warn(self, message: str) -> None:
        warnings.warn(f"{description_of_step(self._fn)} {message}", stacklevel=6)


@contextmanager
def _unseen() -> Iterator[None]:
    """Hides from the program's modes what is computed here, and ignores errors, as of tensors freed meanwhile."""
    with suppress(Exception), DisableTorchFunction(), torch.no_grad(), disable_dispatch_modes():
        yield


@lru_cache(maxsize=1024)
def _is_of_a_library(file: str) -> bool:
    return file.startswith((*_INSTALLED, *LIBRARIES))


def _line_of(frame: FrameType) -> str:
    above: FrameType | None = frame
    while above is not None and above.f_code.co_filename.startswith((*LIBRARIES, random.__file__)):
        above = above.f_back
    return "" if above is None else f"{Path(above.f_code.co_filename).name}:{above.f_lineno} in {above.f_code.co_name}"


def _counting_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers of a module by name, without those of norm layers, which are averaged on purpose."""
    norm_buffers = {id(buffer) for part in module.modules() if isinstance(part, NormBase) for buffer in part.buffers()}
    return {name: buffer for name, buffer in module.named_buffers() if id(buffer) not in norm_buffers}


def _as_on_one_device(now: Sequence[Tensor], old: Sequence[Tensor], rows: int) -> bool:
    """Whether the copies of a buffer are what one device would have."""
    if all(torch.equal(buffer, before) for buffer, before in zip(now, old, strict=True)):
        return True
    if any(not torch.equal(now[0].cpu(), copy.cpu()) for copy in now[1:]):
        return False
    if now[0].shape != old[0].shape:
        return True
    increase = (now[0] - old[0]) if now[0].dtype is not torch.bool else now[0].int() - old[0].int()
    # A counter of calls, as batch norm's num_batches_tracked, grows by 0 or 1 on one device too.
    counts_rows = rows > 1 and bool((increase == rows).any())
    return not counts_rows and (now[0].is_floating_point() or bool(((increase == 0) | (increase == 1)).all()))


def _generator_states() -> dict[str, Any]:
    """The states of the global random generators."""
    states: dict[str, Any] = {"Python": random.getstate()}
    # A program that has not imported NumPy cannot have drawn from it, and need not wait for its import.
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        states["NumPy"] = (kind, keys.tobytes(), *rest)
    return states


def _draws(functions: Iterable[tuple[CodeType, dict[str, Any]]], name: str) -> list[str]:
    """The functions that have run and name a function of a global random generator."""
    stream: Any = random if name == "Python" else sys.modules["numpy"].random
    libraries = (*LIBRARIES, random.__file__, *([] if name == "Python" else [str(Path(stream.__file__).parent)]))
    generator = stream.random.__self__
    lines: dict[str, None] = {}
    for code, names in functions:
        values = [names.get(symbol) for symbol in code.co_names]
        if "random" in code.co_names or any(value is stream for value in values):
            values += [vars(stream).get(symbol) for symbol in code.co_names]
        draws = any(attribute_of(value, "__self__") is generator for value in values)
        if draws and not code.co_filename.startswith(libraries):
            lines[f"{Path(code.co_filename).name}:{code.co_firstlineno} in {code.co_name}"] = None
    return list(lines)


def _is_mutable(value: Any) -> bool:
    """Whether it is a container, tensor, array or generator, or a number or None, whose name may be bound anew."""
    simple = value is None or is_kind(value, (*_CONTAINERS, Tensor)) or type(value) in (int, float)
    return simple or _is_array(value) or _is_generator(value)


def _is_scaler(value: Any) -> bool:
    return is_kind(value, torch.amp.GradScaler)


def captured_by(fn: Any, matches: Callable[[Any], bool] = _is_mutable) -> Iterator[tuple[str, Any]]:
    """Names and values that a function can reach and change: in its closure, its object and its module's globals.

    These are containers, numbers, tensors, random generators and None, or what else ``matches``, also as attributes
    of the user's objects.
    """
    # Arguments of partials are reached like names of a closure.
    while is_kind(fn, partial):
        arguments = ((f"argument {number} of a partial", value) for number, value in enumerate(fn.args))
        yield from _matches_in("", arguments, matches)
        fn = fn.func
    plain = plain_function(fn)
    code: CodeType | None = attribute_of(plain, "__code__")
    owner = attribute_of(fn, "__self__", None if plain is fn and code is not None else fn)
    if code is not None and code.co_filename.startswith(LIBRARIES):
        return
    if owner is not None and not is_kind(owner, (nn.Module, ModuleType)):
        yield from _matches_in(f"{type(owner).__name__}.", (attributes_of(owner) or {}).items(), matches)
    if code is not None:
        cells = zip(code.co_freevars, plain.__closure__ or (), strict=True)
        yield from _matches_in("", [(name, cell.cell_contents) for name, cell in cells if _is_set(cell)], matches)
        yield from _matches_in("", [(name, plain.__globals__.get(name)) for name in code.co_names], matches)


def _matches_in(
    prefix: str, items: Iterable[tuple[str, Any]], matches: Callable[[Any], bool]
) -> Iterator[tuple[str, Any]]:
    """Those of the given names and values that match, and such attributes of the user's objects."""
    for name, value in items:
        if matches(value):
            yield prefix + name, value
        elif not is_kind(value, nn.Module) and _is_of_the_user(value):
            for attribute, member in (attributes_of(value) or {}).items():
                if matches(member):
                    yield f"{prefix}{name}.{attribute}", member


def _is_of_the_user(value: Any) -> bool:
    """Whether a value is an object of a class that belongs to no library."""
    if is_kind(value, (type, ModuleType)) or attributes_of(value) is None:
        return False
    home = module_of(type(value))
    file = attribute_of(sys.modules.get(home), "__file__")
    return home == "__main__" or (type(file) is str and not file.startswith((*_INSTALLED, *LIBRARIES)))


def _is_array(value: Any) -> bool:
    return "numpy" in sys.modules and is_kind(value, (sys.modules["numpy"].ndarray, sys.modules["numpy"].generic))


def _is_generator(value: Any) -> bool:
    """Whether it is a random generator of Python or NumPy."""
    numpy = sys.modules.get("numpy")
    kinds = (numpy.random.Generator, numpy.random.RandomState, numpy.random.BitGenerator) if numpy else ()
    return is_kind(value, random.Random) or (is_kind(value, kinds) and module_of(type(value)).startswith("numpy."))


def _is_set(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # not assigned yet
        return False


def state_of(value: Any) -> Any:
    """A value that is equal as long as the container, number or generator has not changed."""
    if is_kind(value, random.Random):
        return None if is_kind(value, random.SystemRandom) else random.Random.getstate(value)
    if _is_generator(value):
        return pickle.dumps(value)
    # By identity: a name that is bound to another tensor is a change. The values of tensors are not compared.
    if value is None or is_kind(value, Tensor):
        return id(value)
    if _is_array(value):
        return id(value), value.tobytes() if value.nbytes <= _ARRAY_BYTES else b""
    for kind in _CONTAINERS:
        if is_kind(value, kind):
            items = dict.items(value) if kind is dict else kind.__iter__(value)
            return [tuple(map(id, item)) if kind is dict else id(item) for item in items]
    return value
