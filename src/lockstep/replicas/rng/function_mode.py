"""The function mode through which a replica calls torch: its own random numbers, its guard, its replacements.

So dropout in threads is reproducible and differs between replicas, and one call passes one mode whatever looks at it.
torch's default generator is shared by all threads. Function modes are thread-local, so ``ReplicaRng`` gives every
random function that is called in its thread the replica's own ``torch.Generator``. On a GPU one replica issues at a
time, and its slot swaps the device's default generator instead (``device.streams``).
"""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, nullcontext
from contextvars import Token
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._device
from torch.overrides import TorchFunctionMode

from lockstep._torch_compat import (
    OpOverload,
    default_device,
    disable_dispatch_modes,
    innermost_function_mode,
    num_dispatch_modes,
    num_function_modes,
    pop_function_mode,
    push_function_mode,
    sample_dirichlet,
    standard_gamma,
    without_innermost_function_mode,
)
from lockstep.replicas.context import get_replica_context
from lockstep.replicas.rng.default_generator import GeneratorHere, own_generator
from lockstep.replicas.rng.ops import REWRITTEN, draws
from lockstep.replicas.watcher import PROCEED, TorchCalled

DEFAULT_GENERATOR_LOCK = threading.RLock()
"""Held while torch's default generator draws a replica's numbers, and by other threads that draw from it.

Reentrant: the garbage collector may run a finalizer that asks for it, such as the end of an iteration over data, in the
thread that holds it.
"""

_Tensor, _PARAMETER = torch.Tensor, torch.nn.Parameter
_TAKES_GENERATOR: frozenset[Any] = frozenset(
    [
        *(torch.rand, torch.randn, torch.randint, torch.randperm),
        *(torch.rand_like, torch.randn_like, torch.randint_like),
        *(torch.bernoulli, torch.multinomial, torch.normal, torch.poisson, torch.binomial, standard_gamma),
        *(sample_dirichlet, _Tensor.bernoulli, _Tensor.multinomial, _Tensor.bernoulli_, _Tensor.cauchy_),
        *(_Tensor.exponential_, _Tensor.geometric_, _Tensor.log_normal_, _Tensor.normal_, _Tensor.random_),
        _Tensor.uniform_,
    ]
)
# Python functions that draw through others: their own body is run with the mode still on.
_COMPOSITE: frozenset[Any] = frozenset([F.multi_head_attention_forward, F.gumbel_softmax])
# These draw where gradient checkpointing runs a block once more, so the engine alone is run with the mode on: what else
# they call in torch would be looked at for nothing, 20 us of a backward pass.
_BACKWARDS: frozenset[Any] = frozenset([_Tensor.backward, torch.autograd.backward, torch.autograd.grad])
_ENGINE = "_engine_run_backward"  # the function of torch.autograd that runs it (torch 2.13)
# With dropout between their layers only. Packed sequences put the weights, a tuple or list, one place later.
_RECURRENT: frozenset[Any] = frozenset([torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu])
# Functions that draw inside C++, or that no hot loop calls: the default generator draws for them, one at a time.
_DRAWS_INSIDE: frozenset[Any] = _RECURRENT | frozenset(
    [
        *(torch.rrelu, torch.rrelu_, torch.dropout, torch.dropout_, torch.native_dropout),
        *(torch.feature_dropout, torch.feature_dropout_, torch.alpha_dropout, torch.alpha_dropout_),
        *(torch.feature_alpha_dropout, torch.feature_alpha_dropout_),
        *(F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, F.rrelu),
        *(F.fractional_max_pool2d, F.fractional_max_pool2d_with_indices),
        *(F.fractional_max_pool3d, F.fractional_max_pool3d_with_indices),
        *(torch.nn.init.normal_, torch.nn.init.uniform_, torch.nn.init.kaiming_uniform_),
    ]
)
_DRAWING = _TAKES_GENERATOR | _COMPOSITE | _BACKWARDS | _DRAWS_INSIDE | REWRITTEN.keys()

_FRAMES_TO_CALL = 24
"""How many frames above a mode's call the function can be that was called, with other modes between."""
_METADATA: frozenset[Any] = frozenset(
    [
        *(getattr(_Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "is_nested")),
        _Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
        *(_Tensor.dim, _Tensor.numel, _Tensor.is_floating_point),
    ]
)
"""Calls without keywords that read no values: a third of a transformer's calls, and passed on at once."""


def is_random(func: Callable[..., Any]) -> bool:
    """Whether a torch function draws random numbers."""
    return func in _DRAWING


def is_noise(func: Callable[..., Any]) -> bool:
    """Whether what a torch function gives is random numbers alone, as ``torch.rand`` and ``normal_`` do."""
    return func in _TAKES_GENERATOR


def restore_l1_weight(func: Callable[..., Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call, with the ``weight`` that torch 2.13's ``F.l1_loss`` does not pass on to modes."""
    if func is not F.l1_loss or kwargs.get("weight") is not None:
        return kwargs
    # The weight is nowhere but in the frame of F.l1_loss: torch 2.13 leaves it out of what it hands to modes, and a
    # loss would silently be computed without it (test_the_weights_of_an_l1_loss_are_not_lost).
    frame = sys._getframe(1)
    for _ in range(_FRAMES_TO_CALL):
        if frame.f_back is None:
            break
        frame = frame.f_back
        weight = frame.f_locals.get("weight") if frame.f_code is F.l1_loss.__code__ else None
        if weight is not None:
            return {**kwargs, "weight": weight}
    return kwargs


def _l1_loss(*args: Any, **kwargs: Any) -> torch.Tensor:
    return F.l1_loss(*args, **restore_l1_weight(F.l1_loss, kwargs))


def _instance_norm(*args: Any, **kwargs: Any) -> torch.Tensor:
    """``F.instance_norm``, whose gradient for one row is wrong where the next one is in channels_last (torch 2.13).

    The convolutions of mirrored modules are in that layout, and a replica's shard may well be one picture.
    """
    result = F.instance_norm(*args, **kwargs)
    if result.requires_grad and result.ndim > 3 and result.shape[0] == 1:
        # The gradient is wrong by as much as itself there; two rows are right (findings/instance-norm-one-row-*.sh).
        result.register_hook(_contiguous)  # type: ignore[no-untyped-call]
    return result


def _contiguous(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.contiguous()


def in_replica() -> bool:
    """Whether this is a replica's own code, not a ``combine`` for all, which the last to arrive happens to run."""
    return get_replica_context() is not None


@dataclass(frozen=True, slots=True)
class Guarded:
    """What a guard has to be asked about: other calls, of functions that draw nothing, are made at once.

    Args:
        functions: those whose every call is looked at.
        local: the ids of the tensors of this replica's copies, the only parameters that need no look.
        foreign: the ids of those of other replicas' copies.
    """

    functions: frozenset[Any] = frozenset()
    local: AbstractSet[int] = frozenset()
    foreign: AbstractSet[int] = frozenset()


class ReplicaRng(TorchFunctionMode):
    """Gives random functions called in this thread on CPU tensors the numbers of ``generator``.

    Args:
        generator: a CPU generator that no other thread draws from.
        applies: called before each draw; if its result is not true, torch's default generator is used. None: it always
            is.
        instead: replacements of other torch functions, here because every mode costs time at every call. Watchers see
            the calls here for the same reason: the guard of ``guarded_by`` in all runs, others in the block of
            ``looked_at_by``.
    """

    def __init__(
        self,
        generator: torch.Generator,
        applies: Callable[[], object] | None = None,
        instead: Mapping[Callable[..., Any], Callable[..., Any]] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self.generator = generator
        self._applies = applies
        self._mended: dict[Any, Any] = {F.l1_loss: _l1_loss, F.instance_norm: _instance_norm}
        self._instead = self._all_instead = self._mended | dict(instead)
        self._guard: TorchCalled | None = None
        self._guarded = Guarded()
        self._inspected = _DRAWING  # functions whose every call is looked at by the guard, or draws
        self._looks: tuple[TorchCalled, ...] = ()
        self._passed_on = _METADATA
        self._profile: Any = None  # the function of sys.setprofile, while a call is looked at
        self._bodies: dict[Any, Callable[..., Any]] = {}
        self._entered: list[Token[GeneratorHere | None]] = []

    def guarded_by(self, guard: TorchCalled, guarded: Guarded) -> None:
        """Has ``guard`` asked before every call that ``guarded`` does not tell to be harmless."""
        self._guard, self._guarded = guard, guarded
        self._inspected = _DRAWING | guarded.functions

    def use_replacements(self, *, use: bool) -> None:
        """Whether calls from now on use the functions given as ``instead``."""
        self._instead = self._all_instead if use else self._mended

    def __enter__(self) -> ReplicaRng:
        self._entered.append(own_generator.set(self._generator_here))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        own_generator.reset(self._entered.pop())

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Before all else: these are a third of a transformer's calls.
        if func in self._passed_on:
            return func(*args)
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():  # first, so that compiled code has no guard on what follows
            return self._make(func, args, kwargs)
        if self._looks:
            return self._looked_at(func, args, kwargs)
        # What most of the other calls are. Written out: a call of a function for it would take as long again.
        if func not in self._inspected and type(func) is not OpOverload and "out" not in kwargs:
            local, foreign = self._guarded.local, self._guarded.foreign
            for arg in (*args, *kwargs.values()) if kwargs else args:
                kind = type(arg)
                if kind is tuple or kind is list:
                    break
                if (id(arg) not in local) if kind is _PARAMETER else (id(arg) in foreign):
                    break
            else:
                return self._instead.get(func, func)(*args, **kwargs)
        result = PROCEED if self._guard is None else self._guard(func, args, kwargs)
        return self._make(func, args, kwargs) if result is PROCEED else result

    def _make(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Makes a call, with the replica's generator if it draws random numbers."""
        random = func in _DRAWING or (isinstance(func, OpOverload) and _is_random_operator(func, args, kwargs))
        if not random or _on_accelerator(args, kwargs) or self._generator_here() is None:
            return self._instead.get(func, func)(*args, **kwargs)
        return self._draw(func, args, kwargs)

    @contextmanager
    def looked_at_by(self, looks: tuple[TorchCalled, ...]) -> Iterator[None]:
        """A block in which ``looks`` see every call of a torch function first, those that read sizes included."""
        before = self._looks
        self._look_by(looks)
        try:
            yield
        finally:
            self._look_by(before)

    def _look_by(self, looks: tuple[TorchCalled, ...]) -> None:
        self._looks, self._passed_on = looks, frozenset() if looks else _METADATA

    def _looked_at(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Has a call looked at, and makes it. A function set by ``sys.setprofile`` sees the call alone.

        It would be called thousands of times a step for the looks' own Python, a quarter of the time of a first step.
        A profiler of C, such as cProfile, stays: ``sys.setprofile`` cannot set it again.
        """
        profile = sys.getprofile()
        if type(profile) not in (types.FunctionType, types.MethodType):
            return self._ask(func, args, kwargs)
        self._profile = profile
        sys.setprofile(None)
        try:
            return self._ask(func, args, kwargs)
        finally:
            sys.setprofile(self._profile)
            self._profile = None

    def _ask(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for look in self._looks if in_replica() else ():
            if (result := look(func, args, kwargs)) is not PROCEED:
                return result
        return self.unwatched(func, args, kwargs)

    def unwatched(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Makes a call that the guard alone sees. Of calls inside it the looks see none."""
        looks, profile = self._looks, self._profile
        self._look_by(())
        if profile is not None:
            sys.setprofile(profile)
        try:
            return self.__torch_function__(func, (), args, kwargs)
        finally:
            if profile is not None:
                self._profile = sys.getprofile()
                sys.setprofile(None)
            self._look_by(looks)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """A block of calls, while a call is looked at, that the guard, the looks and the caller's modes do not see."""
        guard, self._guard = self._guard, None
        try:
            # The caller's modes, such as a FLOP counter, would count the watch's calls as the step's.
            with disable_dispatch_modes() if num_dispatch_modes() else nullcontext(), self.looked_at_by(()):
                yield
        finally:
            self._guard = guard

    def default_generator(self) -> torch.Generator:
        """The generator that random functions on CPU tensors draw from here."""
        return self._generator_here() or torch.default_generator

    def _draw(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a function that draws random numbers, with the replica's generator."""
        if func in _TAKES_GENERATOR:
            if kwargs.get("generator") is None and not any(isinstance(arg, torch.Generator) for arg in args):
                kwargs = {**kwargs, "generator": self.generator}
            return func(*args, **kwargs)
        # torch.nn.functional.dropout and attention take no generator, and the default generator would be one at a time.
        if func in REWRITTEN:
            return REWRITTEN[func](self.generator, *args, **kwargs)
        if func in _BACKWARDS:
            return self._differentiating(func)(*args, **kwargs)
        if func in _COMPOSITE:
            return self._with_mode(_body(func), *args, **kwargs)
        if func in _RECURRENT and not _drops_between_layers(*args):
            return func(*args, **kwargs)
        with default_generator_as(self.generator):
            return func(*args, **kwargs)

    def _differentiating(self, func: Any) -> Callable[..., Any]:
        """The body of ``Tensor.backward`` or of a function of ``torch.autograd``; its engine runs with the mode on."""
        body = self._bodies.get(func)
        if body is None:
            engine = func.__globals__.get(_ENGINE)
            if func is _Tensor.backward:
                autograd = _With(torch.autograd, backward=self._differentiating(torch.autograd.backward))
                body = _body_with(func, {"torch": _With(torch, autograd=autograd)})
            elif engine is not None:
                body = _body_with(func, {_ENGINE: functools.partial(self._with_mode, engine)})
            else:
                body = functools.partial(self._with_mode, _body(func))
            self._bodies[func] = body
        return body

    def _with_mode(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        push_function_mode(self)  # as entering does, which also sets the context's generator, and that is set
        try:
            return func(*args, **kwargs)
        finally:
            pop_function_mode()

    def _generator_here(self) -> torch.Generator | None:
        return self.generator if self._applies is None or self._applies() else None


@contextmanager
def without_replica_rng() -> Iterator[None]:
    """A block in which the replica's function mode is off: a compiler would trace it in every call of torch."""
    is_innermost = num_function_modes() and isinstance(innermost_function_mode(), ReplicaRng)
    with without_innermost_function_mode() if is_innermost else nullcontext():
        yield


@contextmanager
def default_generator_as(generator: torch.Generator) -> Iterator[None]:
    """A block in which torch's default generator draws the numbers of ``generator``; one thread at a time."""
    # By value and under a lock, since on a CPU torch's default generator cannot be replaced by another one.
    default = torch.default_generator
    with DEFAULT_GENERATOR_LOCK:
        previous = default.get_state()
        default.set_state(generator.get_state())
        try:
            yield
            generator.set_state(default.get_state())
        finally:
            default.set_state(previous)


def _on_accelerator(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    if device is not None:
        return torch.device(device).type != "cpu"
    first = args[0] if args else next(iter(kwargs.values()), None)
    if isinstance(first, torch.Tensor):
        return first.device.type != "cpu"
    default = default_device()
    return default is not None and default.type != "cpu"


def _is_random_operator(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether it draws, as in code of ``torch.compile``; Lockstep's own operators draw from the replica's generator."""
    if torch.compiler.is_dynamo_compiling() or operator.namespace == "lockstep":  # is_compiling: in any thread
        return False
    return draws(operator, args, kwargs)


def _drops_between_layers(*args: Any) -> bool:
    """For torch.lstm(input, hx, weights, bias, layers, dropout, training, ...) and its like."""
    # Worth the look: without dropout the replicas need not wait for each other at the default generator
    # (test_recurrent_layers_without_dropout_do_not_wait_for_the_generator).
    if len(args) < 8:  # called with keywords, as torch's modules never do
        return True
    first = 6 if isinstance(args[3], (tuple, list)) else 5
    dropout, training = args[first : first + 2]
    return bool(training) and dropout > 0


def _never(*_: Any) -> bool:
    return False


@functools.cache
def _body(func: types.FunctionType) -> Callable[..., Any]:
    """``func`` without its own check for modes: calling ``func`` itself would only come back to the mode."""
    return _body_with(func, {})


class _With:
    """A module with some of its names bound to other objects."""

    def __init__(self, module: types.ModuleType, **names: Any) -> None:
        self._module = module
        vars(self).update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _body_with(func: Any, names: Mapping[str, Any]) -> Callable[..., Any]:
    # A copy of the function with other globals, not a patch of torch: other threads call the function itself meanwhile.
    never = {name: _never for name in func.__globals__ if name.startswith("has_torch_function")}
    body = types.FunctionType(func.__code__, {**func.__globals__, **never, **names}, func.__name__, func.__defaults__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body
