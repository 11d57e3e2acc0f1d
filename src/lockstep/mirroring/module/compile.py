"""torch.compile for a mirrored module: one code for the copies of all replicas, compiled under a lock.

    replica 0 --.                          .-- its copy's parameters --.
                +-- one compiled forward --+                           +-- outputs
    replica 1 --'   (per shape and mode)   '-- its copy's parameters --'

The parameters are inputs of the code. The whole forward becomes one graph or is refused: a part that stayed in Python
would run without the replica's random numbers. One thread at a time looks up the code that serves a call: with two,
torch 2.13 did not find it for some and compiled again, up to its limit of 8.
"""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from functools import partial
from types import FunctionType
from typing import Any, Literal, Self, get_args

import torch
from torch import nn

from lockstep._torch_compat import (
    TorchDispatchMode,
    detect_fake_mode,
    dynamo,
    inductor,
    tree_leaves,
)
from lockstep.errors import ConfigError, LockstepError, ReplicaError
from lockstep.replicas.compiled import COMPILE_LIMIT_S, compile_for_replicas
from lockstep.replicas.rng.function_mode import without_replica_rng
from lockstep.replicas.rng.ops import draws

CompileMode = Literal["default", "max-autotune-no-cudagraphs"]


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """How a module is compiled.

    Args:
        mode: a mode of torch.compile, but none with CUDA graphs of its own: ``fit`` captures whole steps.
        dynamic: True for one code for all shapes, False for one for each. None is one for the first shape, and one for
            all others, in which the sizes that differ from the first are variable; so uneven shards cost one more.
        backend: "inductor", or another that torch knows.
    """

    mode: CompileMode = "default"
    dynamic: bool | None = None
    backend: str = "inductor"

    def __post_init__(self) -> None:
        if self.mode not in get_args(CompileMode):
            raise ConfigError(f"mode={self.mode!r}; choose one of {get_args(CompileMode)}, which make no CUDA graphs")
        if self.dynamic not in (None, True, False):
            raise ConfigError(
                f"dynamic={self.dynamic!r}; give True for one code for all shapes, False for one each, or None for one "
                "for the first and one for all others"
            )
        if self.backend not in torch.compiler.list_backends(exclude_tags=()) or self.backend == "cudagraphs":
            raise ConfigError(
                f"backend={self.backend!r} is unknown to torch, or makes CUDA graphs of its own; choose 'inductor'"
            )

    @classmethod
    def of(cls, settings: Any) -> Self | None:
        """What ``compile_module=`` means: True, False or a dict of these settings. Raises ConfigError for others."""
        if isinstance(settings, bool):
            return cls() if settings else None
        names = [setting.name for setting in fields(cls)]
        if not isinstance(settings, Mapping) or not set(settings) <= set(names):
            raise ConfigError(f"compile_module={settings!r}; give True, False or a dict of {', '.join(names)}")
        return cls(**settings)


class CompiledCopies:
    """The compiled forward of every replica's copy.

    Args:
        copies: the copies of the module.
        compilation: how they are compiled.
        backend: the one of the user's torch.compile, instead of that of ``compilation``; then replicas share no code.
    """

    def __init__(self, copies: Sequence[nn.Module], compilation: Compilation, backend: Any = None) -> None:
        parameter = next(copies[0].parameters(), None)
        on_cpu = parameter is None or parameter.device.type == "cpu"
        self._name = type(copies[0]).__name__
        self._of_first, self._of_others = (
            [
                _compiled(copy, _Backend(compilation, on_cpu, serves, _Identity(backend)), replica)
                for replica, copy in enumerate(copies)
            ]
            for serves in ("first shape", "other shapes")
        )
        self._takes_others = compilation.dynamic is None
        # Per replica the forms of the arguments of its first call: which replica comes first is chance, and must not
        # decide which code another one runs.
        self._first: list[dict[Hashable, Sequence[Hashable]]] = [{} for _ in copies]
        self._compiled_forms: list[set[Hashable]] = [set() for _ in copies]

    def __call__(self, replica: int, training: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the replica's copy; the first time with such arguments while no other replica does."""
        leaves = tree_leaves((args, kwargs))
        forms = tuple(map(_form, leaves))
        mode = (training, torch.is_grad_enabled())
        # A first call keeps the lock to its end, since compiling and choosing among kernels are for all replicas. Later
        # ones give it up where the code begins, or replicas would compute one after another.
        ends_with_look_up = (mode, forms) in self._compiled_forms[replica]
        try:
            with _LOOKUP.locked(self._name, ends_with_look_up=ends_with_look_up), without_replica_rng():
                first = self._first[replica].setdefault(mode, forms)
                is_other = self._takes_others and forms != first
                if is_other:
                    _mark_what_differs(leaves, first)
                outputs = (self._of_others if is_other else self._of_first)[replica](*args, **kwargs)
        # dynamo wraps what a backend raises; an error of this package says what to do and is raised as it is.
        except dynamo().exc.TorchDynamoException as error:
            cause = getattr(error, "inner_exception", error)
            if isinstance(cause, LockstepError):
                raise cause from None
            reason = str(cause).strip().split("\n", 1)[0]
            raise ConfigError(
                f"torch.compile cannot take the whole forward of {self._name}: {reason}; change that, or leave "
                "compile_module out"
            ) from error
        self._compiled_forms[replica].add((mode, forms))
        return outputs


class SurroundingCompile:
    """Serves a ``torch.compile`` that the user has put around the mirrored module, or around what calls it.

    Traced into, the module would be cut into pieces at everything of ours that dynamo cannot follow, and the pieces
    shared by the replicas: guards on the replica's number ran into dynamo's limit of 8, and which size came first, so
    that its code was for that size alone, depended on threads. So each replica's copy is one graph, with code of its
    own. A copy that cannot be one runs as it is, with a warning.
    """

    def __init__(self, copies: Sequence[nn.Module]) -> None:
        self._copies = copies
        self._compiled: list[tuple[Any, CompiledCopies]] = []
        self._as_it_is: set[int] = set()  # replicas
        self._lock = threading.Lock()

    def __call__(
        self, backend: Any, replica: int, training: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Calls the replica's copy, compiled with ``backend``."""
        if replica not in self._as_it_is:
            try:
                return self._compiled_by(backend)(replica, training, args, kwargs)
            except ConfigError as error:
                self._warn(error)
                self._as_it_is.add(replica)
        return self._copies[replica](*args, **kwargs)

    def _compiled_by(self, backend: Any) -> CompiledCopies:
        with self._lock:
            # A list and ==, since not all backends can be hashed.
            for other, compiled in self._compiled:
                if other is backend or other == backend:
                    return compiled
            compilation = Compilation(dynamic=getattr(backend, "dynamic", None))
            self._compiled.append((backend, CompiledCopies(self._copies, compilation, backend)))
            return self._compiled[-1][1]

    def _warn(self, error: ConfigError) -> None:
        with self._lock:
            if not self._as_it_is:
                warnings.warn(
                    f"torch.compile around a mirrored module compiles its whole forward or nothing, and this one runs "
                    f"uncompiled: {error}",
                    stacklevel=2,
                )


def _call(copy: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return copy(*args, **kwargs)


_NUMBERS = itertools.count()


def _compiled(copy: nn.Module, backend: _Backend, replica: int) -> Callable[..., Any]:
    """A copy's forward as one graph. All copies have the same code; each its own in a surrounding torch.compile."""
    options: dict[str, Any] = {"backend": backend, "fullgraph": True, "dynamic": backend.compilation.dynamic}
    if backend.surrounding.backend is None:
        return torch.compile(copy, **options)
    # dynamo keeps code, its limit of 8, and the sizes seen so far, by the function in which it begins, and by its name.
    # So each replica gets a function, and a name, of its own.
    code = _call.__code__.replace(co_name=f"_call_{next(_NUMBERS)}_of_replica_{replica}")
    return partial(torch.compile(FunctionType(code, _call.__globals__, code.co_name), **options), copy)


@dataclass(frozen=True)
class _Identity:
    """A backend of the user's, or None; others are unequal, since not all can be hashed."""

    backend: Any = field(hash=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.backend is other.backend


def _mark_what_differs(leaves: Sequence[Any], first: Sequence[Hashable]) -> None:
    """Has the sizes in which arguments differ from the first ones be variable in the code."""
    for leaf, form in zip(leaves, first, strict=False):
        shape = form[0] if isinstance(form, tuple) else ()
        if isinstance(leaf, torch.Tensor) and leaf.dim() == len(shape):
            for dim, size in enumerate(shape):
                if leaf.shape[dim] != size:
                    dynamo().maybe_mark_dynamic(leaf, dim)


class _Lookup(threading.local):
    """A lock for the look-up of code by all threads and for all modules, since those of one class share guards."""

    _lock = threading.RLock()  # knows its owner, wherever a replica is interrupted
    _ends_with_look_up = False

    @contextmanager
    def locked(self, name: str, *, ends_with_look_up: bool) -> Iterator[None]:
        """Holds the lock until the block ends, or until the code has been found if ``ends_with_look_up``."""
        try:
            if not self._lock.acquire(timeout=COMPILE_LIMIT_S):
                raise ReplicaError(
                    f"{name} has waited {COMPILE_LIMIT_S:g} s for a compiled module that is being compiled or "
                    "waits in a collective; a compiled module must not call collectives"
                )
            self._ends_with_look_up = ends_with_look_up
            yield
        finally:
            self._end()

    def release_early(self) -> None:
        """The code begins."""
        if self._ends_with_look_up:
            self._end()

    def _end(self) -> None:
        with suppress(RuntimeError):  # this thread does not hold it
            self._lock.release()


_LOOKUP = _Lookup()


@dataclass(frozen=True)
class _Backend:
    """Compiles a graph, if the compiled code gives the same numbers. Modules of equal backends share code."""

    compilation: Compilation
    on_cpu: bool
    serves: str
    surrounding: _Identity

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        user_backend = self.surrounding.backend
        name = (
            self.compilation.backend
            if user_backend is None
            else getattr(user_backend, "compiler_name", str(user_backend))
        )
        if name == "inductor":
            options = (
                inductor().list_mode_options(self.compilation.mode)
                if user_backend is None
                else dict(user_backend.config)
            )
            code = compile_for_replicas(graph, inputs, options)
        else:
            if self.on_cpu:
                _refuse_random(graph, inputs, name)
            code = (user_backend or dynamo().lookup_backend(name))(graph, inputs)

        def run(*args: Any) -> Any:
            _LOOKUP.release_early()
            return code(*args)

        return run


def _refuse_random(graph: torch.fx.GraphModule, inputs: list[Any], backend: str) -> None:
    """Raises ConfigError if code for a CPU draws: from the process's default generator, which all replicas share."""
    fake = detect_fake_mode(inputs)
    if fake is None:
        return
    with fake, torch.no_grad(), _Draws() as drawn:
        graph(*[fake.from_tensor(input) if isinstance(input, torch.Tensor) else input for input in inputs])
    if drawn.names:
        raise ConfigError(
            f"the compiled module draws random numbers on a CPU ({drawn.names[0]}), where code of backend={backend!r} "
            "has not the replica's own; choose 'inductor', set dropout to 0, or leave compile_module out"
        )


class _Draws(TorchDispatchMode):
    """The operators that draw random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if draws(func, args, kwargs or {}):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def _form(leaf: Any) -> Hashable:
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else str(type(leaf))
