"""Sees the Python functions that a step's first run calls, where no function mode of torch does.

    random.random(), numpy.random.rand()      draws from streams that all replicas have in common
    numpy.random.default_rng(step)            generators that replicas seed alike (``seeded_draws``)
    torch.func.jvp, torch.func.functional_call      what replicas cannot do at the same time

Generators of Python and NumPy draw in C, and a program may have bound their functions to names of its own, so that only
a function of ``sys.setprofile`` sees all draws. It is slow, so only a first run has one. A profiler of the program's is
left alone, since a thread has one such function.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FrameType
from typing import Any

import torch

from lockstep._torch_compat import DisableTorchFunction, functional_call_code
from lockstep.errors import UsageError
from lockstep.introspection import attribute_of, is_kind
from lockstep.mirroring.module.module import MirroredModule
from lockstep.replicas.context import get_replica_context
from lockstep.replicas.rng.mode import ReplicaRng, is_random
from lockstep.replicas.watcher import PROCEED, Run, TorchCalled, Watcher
from lockstep.watch.captures import is_of_a_library
from lockstep.watch.seeded_draws import SeededDraws, equal_draws, same_numbers
from lockstep.watch.step_guard import refuse_forward_mode
from lockstep.watch.step_names import LIBRARIES, description_of_step, warn_of_step

DRAW_ADVICE = (
    "numbers differ from run to run; draw with torch, where each replica has its own, or give each replica a generator "
    "with ls.PerReplica"
)
_FORWARD_MODE = torch.autograd.forward_ad.enter_dual_level.__code__
_GENERATORS = (torch.Generator, random.Random)
_PYTHON_GENERATOR: Any = attribute_of(random.random, "__self__")


class ProfiledCalls(Watcher):
    """Looks at the functions that a step calls in one run. ``modes`` are the local replicas' function modes."""

    def __init__(self, run: Run, modes: Sequence[ReplicaRng]) -> None:
        self._fn, self._modes, self._has_others = run.fn, modes, len(run.rows) > 1
        # Functions with their globals, by id: those that torch.compile makes cannot be hashed.
        self._functions: dict[int, tuple[CodeType, dict[str, Any]]] = {}
        self._functional_calls: dict[int, tuple[Any, int]] = {}  # by the id of a module: it, and the first replica
        self._seeded_draws = [SeededDraws() for _ in run.rows]
        self._draws_from_python = False  # a replica has called Python's global generator

    def run_begins(self, run: Run) -> None:
        self._states = _generator_states()

    @contextmanager
    def in_replica(self, replica: int) -> Iterator[None]:
        if sys.getprofile() is not None:
            yield
            return
        sys.setprofile(self._entered if self._has_others else self._drawn)
        try:
            yield
        finally:
            sys.setprofile(None)

    def torch_called(self, replica: int) -> TorchCalled | None:
        return partial(self._torch_drawn, replica)

    def run_ended(self, run: Run, error: BaseException | None) -> None:
        if error is None:
            if self._has_others:
                self._warn_of_draws(self._states)
            self._warn_of_equal_draws(run)

    def _torch_drawn(self, replica: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_random(func):
            with self._modes[replica].aside(), DisableTorchFunction():
                self._seeded_draws[replica].called(self._modes[replica], args, kwargs)
        return PROCEED

    def _drawn(self, frame: FrameType, event: str, arg: Any) -> None:
        """Notes draws of random numbers."""
        # Thousands of functions in C are called in a step, so types alone are compared before anything else is asked.
        if event == "c_call":
            is_generators = type(arg) is BuiltinFunctionType and type(arg.__self__) in _GENERATORS
            self._draws_from_python |= is_generators and arg.__self__ is _PYTHON_GENERATOR
            context = get_replica_context() if is_generators else None
            if context is not None:
                self._seeded_draws[context.local_replica].called_in_c(arg, partial(_line_of, frame))
        elif event == "return" and not is_of_a_library(frame.f_code.co_filename):
            context = get_replica_context()
            if context is not None:
                self._seeded_draws[context.local_replica].returns(frame)

    def _entered(self, frame: FrameType, event: str, arg: Any) -> None:
        """Notes draws, and the functions that run."""
        self._drawn(frame, event, arg)
        code = frame.f_code
        if event == "call" and id(code) not in self._functions:
            if code is _FORWARD_MODE:
                refuse_forward_mode()
            self._functions[id(code)] = code, frame.f_globals
        if event == "call" and code is functional_call_code:
            self._refuse_shared_module(frame.f_locals["module"])

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

    def _warn_of_draws(self, before: dict[str, Any]) -> None:
        now = _generator_states()
        for name in before:
            # Threads that prepare data draw meanwhile: KerasHub's preprocessors mask words in those of Grain. Calls of
            # NumPy's generator are not seen, because its functions are Cython's.
            by_replicas = self._draws_from_python or name != "Python"
            lines = _draws(self._functions.values(), name) if by_replicas and before[name] != now[name] else []
            if lines:
                warn_of_step(
                    self._fn,
                    f"draws from {name}'s random numbers at {', '.join(lines)}, of which all replicas have one stream, "
                    f"so {DRAW_ADVICE}",
                )

    def _warn_of_equal_draws(self, run: Run) -> None:
        line = equal_draws(self._seeded_draws)
        if line:
            warn_of_step(self._fn, same_numbers(line))
        elif run.strategy.num_replicas_in_sync > len(run.rows):
            digest, lines = self._seeded_draws[0].digest(), [line for _, line in self._seeded_draws[0].draws.values()]
            if digest:
                message = f"{description_of_step(self._fn)} {same_numbers(lines[0])}"
                run.strategy.workers.compare_draws(digest, partial(warnings.warn, message))


def _line_of(frame: FrameType) -> str:
    above: FrameType | None = frame
    while above is not None and above.f_code.co_filename.startswith((*LIBRARIES, random.__file__)):
        above = above.f_back
    return "" if above is None else f"{Path(above.f_code.co_filename).name}:{above.f_lineno} in {above.f_code.co_name}"


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
