"""Sees the Python functions that a step's first run calls, where no function mode of torch does.

    random.random(), numpy.random.rand()                       draws from streams that all replicas have in common
    torch.manual_seed(step), numpy.random.default_rng(step)    generators that replicas seed alike
    torch.func.jvp, torch.func.functional_call                 what replicas cannot do at the same time

Generators of Python and NumPy draw in C, and a program may have bound their functions to names of its own, so that only
a function of ``sys.setprofile`` sees all draws. It is slow, so only a first run has one. A profiler of the program's is
left alone, since a thread has one such function. States compared before and after a run do not do: they tell neither
which thread drew, of the replicas and those that load data, nor see a generator that a step makes and drops, whose type
in C takes no patch (NumPy 2.4); ``sys.monitoring`` came with Python 3.12. Seeds are told by the states that draws begin
at: those that differ by replica are right, and so are seeds that nothing is drawn after.
"""

from __future__ import annotations

import pickle
import random
import sys
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FrameType
from typing import Any

import torch

from lockstep._torch_compat import DisableTorchFunction, functional_call_code
from lockstep.collectives.communicator import call_site
from lockstep.errors import UsageError
from lockstep.introspection import attribute_of, is_kind
from lockstep.mirroring.module.module import MirroredModule
from lockstep.replicas.context import get_replica_context
from lockstep.replicas.rng.function_mode import ReplicaRng, is_random
from lockstep.replicas.watcher import PROCEED, Run, TorchCalled, Watcher
from lockstep.watch.captures import is_of_a_library
from lockstep.watch.step_guard import refuse_forward_mode
from lockstep.watch.step_names import LIBRARIES, description_of_step, warn_of_step

DRAW_ADVICE = (
    "numbers differ from run to run; draw with torch, where each replica has its own, or give each replica a generator "
    "with ls.PerReplica"
)
_FORWARD_MODE = torch.autograd.forward_ad.enter_dual_level.__code__
_GENERATORS = (torch.Generator, random.Random)
_PYTHON_GENERATOR: Any = attribute_of(random.random, "__self__")
_SEEDS = ("manual_seed", "set_state")
"""Methods of ``torch.Generator`` that ``torch.manual_seed``, ``torch.set_rng_state`` and their like call."""
_DRAWS = ("random", "getrandbits")
"""Methods in C of ``random.Random`` that all others draw with."""
_SEED_ADVICE = (
    "so that rows of different replicas get the same noise; put the replica's number into the seed (seed * "
    "context.num_replicas_in_sync + context.replica_id_in_sync_group, with context = ls.get_replica_context()), or "
    "leave the seed out: each replica has numbers of its own, from the strategy's seed. Where all are to draw the same "
    'numbers, as in zeroth-order training, say so with warnings.filterwarnings("ignore", "the step .* same random '
    'numbers")'
)


@dataclass(slots=True)
class SeededDraws:
    """What one replica draws after a seed of the step, or from generators that are not its own stream."""

    draws: dict[int, tuple[Any, str]] = field(default_factory=dict)
    """By a digest of the state that a draw begins at: the generator, held so that no other has its id, and the line."""
    _is_seeded: bool = False

    def called_in_c(self, function: Any, line: Callable[[], str]) -> None:
        """Notes a call of a function in C that the step is about to make."""
        if type(function) is not BuiltinFunctionType:
            return
        owner = function.__self__
        if type(owner) is torch.Generator:
            self._is_seeded |= function.__name__ in _SEEDS
        elif type(owner) is random.Random and function.__name__ in _DRAWS and owner is not _PYTHON_GENERATOR:
            self.add(owner, repr(owner.getstate()).encode(), line())

    def called(self, rng: ReplicaRng, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Notes a call of a random function of torch that the step is about to make. ``rng`` makes its draws."""
        for generator in (value for value in (*args, *kwargs.values()) if type(value) is torch.Generator):
            self.add(generator, generator.get_state().numpy().tobytes(), call_site())
            return
        # Only the first draw after a seed is looked at: the ones after it go on from the same state.
        if self._is_seeded:
            self._is_seeded = False
            for generator in (rng.generator, *torch.cuda.default_generators):  # replicas of one GPU have one in turn
                self.add(rng, generator.get_state().numpy().tobytes(), call_site())

    def returns(self, frame: FrameType) -> None:
        """Notes the NumPy generators among the local variables of a user's function that returns."""
        # NumPy's generators draw in Cython, which no profile function sees: their states are read as a function ends.
        numpy: Any = sys.modules.get("numpy")
        kinds = (numpy.random.Generator, numpy.random.RandomState) if numpy is not None else ()
        for value in frame.f_locals.values() if kinds else ():
            if type(value) in kinds:
                code = frame.f_code
                self.add(value, pickle.dumps(value), f"{code.co_filename.rpartition('/')[2]} in {code.co_name}")

    def add(self, generator: Any, state: bytes, line: str) -> None:
        """Notes a draw."""
        # 32 bits, as many as a record between workers has for them.
        self.draws.setdefault(zlib.crc32(state), (generator, line))

    def digest(self) -> int:
        """32 bits of all draws, to be compared with those of other workers; 0 if there are none."""
        return zlib.crc32(repr(sorted(self.draws)).encode()) if self.draws else 0


class PythonDraws(Watcher):
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
        line = _equal_draws(self._seeded_draws)
        if line:
            warn_of_step(self._fn, _same_numbers(line))
        elif run.strategy.num_replicas_in_sync > len(run.rows):
            digest, lines = self._seeded_draws[0].digest(), [line for _, line in self._seeded_draws[0].draws.values()]
            if digest:
                message = f"{description_of_step(self._fn)} {_same_numbers(lines[0])}"
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


def _equal_draws(replicas: Sequence[SeededDraws]) -> str:
    """Where two replicas draw the same numbers, from generators of their own; empty if none do."""
    for one, other in combinations(replicas, 2):
        for state in one.draws.keys() & other.draws.keys():
            (generator, line), (another, _) = one.draws[state], other.draws[state]
            # One generator in both replicas has one stream, of which ``PythonDraws`` warns otherwise.
            if generator is not another:
                return line
    return ""


def _same_numbers(line: str) -> str:
    """The warning about a draw that is the same in several replicas."""
    return f"draws the same random numbers in several replicas at {line}, since they seed alike, {_SEED_ADVICE}"
