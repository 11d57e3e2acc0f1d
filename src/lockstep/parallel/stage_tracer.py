"""Traces the forward of a module whose parts are called in several stages of a pipeline, by torch.fx.

Only the code of containers is traced, which are the modules around those at which stages begin. What a graph would do
otherwise than the code is an error: a branch on data, a block such as ``torch.no_grad``, an attribute that is set.
"""

from __future__ import annotations

import dis
import operator
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, new_class
from typing import Any

import torch
from torch import fx, nn

from lockstep._torch_compat import num_function_modes, pop_function_mode, push_function_mode, saved_tensors_hooks
from lockstep.errors import ConfigError, UsageError

ADVICE = "move that code into a module of its own, which is not traced, or choose other names for pipeline_split"
IN_PLACE = tuple(
    getattr(operator, f"i{name}")
    for name in ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
)
"""The functions of operators such as ``+=``."""
_ROOT = "root"
PLAIN = (bool, int, float, str, type(None))
"""The classes of attributes that a trace depends on."""
_OF_MODULES = ("_parameters", "_buffers", "_modules")  # the attributes of a module that say what it consists of
_OF_ALL_MODULES = frozenset(vars(nn.Module()))
_MISSING = object()


@dataclass(frozen=True)
class AttributeRead:
    """An attribute, of the module of this name, that traced code has read. The graph has its value."""

    module: str
    attribute: str
    value: Any

    def is_still(self, part: nn.Module) -> bool:
        """Whether the module has this value now."""
        now = vars(part).get(self.attribute, _MISSING)
        return now is self.value or (type(now) is type(self.value) and type(now) in PLAIN and now == self.value)


def outline(module: nn.Module) -> nn.Module:
    """A copy of a module's structure, whose weights are on the meta device; what is no module or tensor is aliased."""
    # A memo tells deepcopy what it need not copy: attributes that are no modules or tensors stay the same objects, and
    # tensors become blanks, so that a trace of a model of any size takes no memory.
    memo: dict[int, Any] = {}
    for part in module.modules():
        memo |= {id(value): value for name, value in vars(part).items() if name not in _OF_MODULES}
    for tensor in (*module.parameters(), *module.buffers()):
        blank = torch.empty_like(tensor, device="meta")
        is_weight = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(blank, requires_grad=tensor.requires_grad) if is_weight else blank
    return deepcopy(module, memo)


def trace_stages(
    module: nn.Module, starts: Sequence[str], containers: Collection[str], inputs: Iterable[str]
) -> tuple[fx.Graph, list[AttributeRead]]:
    """The graph of a module's forward, which takes the inputs in a dict, and the attributes that it has the values of.

    Each node has in ``meta`` its "stage", and the "name" of the module or tensor that it uses, or the "constant".

    Args:
        module: an ``outline``.
        starts: the names of the modules at which stages begin, from the second stage on.
        containers: the names of the modules whose code is traced.
        inputs: the names of the inputs that the forward is given.

    Raises:
        ConfigError: code that cannot be traced; stages that do not begin in their order.
    """
    tracer, call = _StageTracer(starts, containers), _Call(module, sorted(inputs))
    parts = [module.get_submodule(name) for name in containers]
    read: list[AttributeRead] = []
    try:
        with _without_function_modes(), _keeping(parts), _noting_reads(module, read):
            graph = tracer.trace(call)
    except Exception as error:  # code of the user's, run on proxies, fails in any way
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"pipeline_split cannot trace the forward of {type(module).__name__} with "
            f"{', '.join(sorted(inputs)) or 'no inputs'}, at "
            f"{_place_of(error)} ({type(error).__name__}: {reason}); {ADVICE}"
        ) from error
    if tracer.begun != list(starts):
        missing = [name for name in starts if name not in tracer.begun]
        problem = f"{missing[0]} is never called" if missing else f"they are called as {', '.join(tracer.begun)}"
        raise ConfigError(
            f"pipeline_split={list(starts)}: {problem}; name modules that the forward calls, in their order there"
        )
    for node in graph.nodes:
        if node.op in ("call_module", "get_attr"):
            target = str(node.target)
            is_constant = target != _ROOT and not target.startswith(f"{_ROOT}.")
            node.meta |= {"constant": getattr(call, target)} if is_constant else {"name": _plain_name(target)}
    return graph, read


def _in_place(function: Callable[..., Any]) -> Callable[[fx.Proxy, Any], fx.Proxy]:
    return lambda proxy, other: proxy.tracer.create_proxy("call_function", function, (proxy, other), {})


# fx traces x += 1 as x = x + 1, which other names of x do not see.
_Proxy = type("_Proxy", (fx.Proxy,), {f"__{function.__name__}__": _in_place(function) for function in IN_PLACE})


class _StageTracer(fx.Tracer):
    proxy_buffer_attributes = True

    def __init__(self, starts: Sequence[str], containers: Collection[str]) -> None:
        super().__init__()
        self._numbers = {name: number for number, name in enumerate(starts, 1)}
        self._containers = containers
        self._thread = threading.get_ident()
        self._settings = _settings()
        self._stage = 0
        self.begun: list[str] = []

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return _plain_name(module_qualified_name) not in self._containers

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        # torch.fx patches nn.Module.__call__ for the whole process while it traces, so calls of other threads, such as
        # a prefetching one, come here too.
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        name = _plain_name(self.path_of_module(m))
        if name in self._numbers and name not in self.begun:
            self.begun.append(name)
            self._stage = max(self._stage, self._numbers[name])
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        proxy: fx.Proxy = _Proxy(node, self)
        return proxy

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Puts the condition of an ``assert`` into the graph, to be checked there. Other branches cannot be traced."""
        # The truth of a value is asked for by a branch, which a graph cannot have, or by an assert, which it can. Only
        # the bytecode of the calling frame tells them apart.
        if not _is_asserted(sys._getframe(2)):  # the frame of the code that is traced, which called __bool__
            return super().to_bool(obj)
        self.create_proxy("call_function", _check_assertion, (obj,), {})
        return True

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        # A graph has operators and no blocks: it would compute with gradients what torch.no_grad surrounds.
        if _settings() != self._settings:
            raise UsageError("a block of torch.no_grad, torch.autocast or checkpoint is not kept in a trace")
        node = super().create_node(*args, **kwargs)
        node.meta["stage"] = self._stage
        return node


class _Call(nn.Module):
    """Calls a module with inputs by name."""

    def __init__(self, root: nn.Module, names: Iterable[str]) -> None:
        super().__init__()
        self.root, self._names = root, tuple(names)

    def forward(self, inputs: Mapping[str, Any]) -> Any:
        return self.root(**{name: inputs[name] for name in self._names})


@contextmanager
def _keeping(parts: Iterable[nn.Module]) -> Iterator[None]:
    """A block after which modules are as before; an attribute that was set is an error, which a graph would not set."""
    before = [(part, dict(vars(part)), dict(part._buffers)) for part in parts]
    yield
    for part, attributes, buffers in before:
        changed = [name for name, value in vars(part).items() if value is not attributes.get(name, _MISSING)]
        for name, value in part._buffers.items():
            if value is not buffers.get(name, _MISSING) and not _is_changed_in_place(value):
                changed.append(name)
        part._buffers = buffers
        if changed:
            raise UsageError(f"{type(part).__name__} sets its attribute {changed[0]!r}, which a trace does not keep")


@contextmanager
def _noting_reads(module: nn.Module, read: list[AttributeRead]) -> Iterator[None]:
    """A block that notes in ``read`` the attributes of modules that code reads, except those that all modules have."""
    names = {part: name for name, part in module.named_modules()}

    def noting(part: nn.Module, attribute: str) -> Any:
        value = object.__getattribute__(part, attribute)
        if attribute not in _OF_ALL_MODULES and attribute in object.__getattribute__(part, "__dict__"):
            read.append(AttributeRead(names[part], attribute, value))
        return value

    def noted(kind: type[nn.Module]) -> type[nn.Module]:
        overrides = {"__getattribute__": noting, "__module__": kind.__module__}
        return new_class(kind.__name__, (kind,), exec_body=lambda members: members.update(overrides))

    # Python looks __getattribute__ up on the class, so an instance cannot have its own: each module is of a subclass
    # for as long as the trace runs.
    kinds = {part: type(part) for part in names if not isinstance(part, torch.jit.ScriptModule)}
    classes = {kind: noted(kind) for kind in set(kinds.values())}
    for part, kind in kinds.items():
        part.__class__ = classes[kind]
    try:
        yield
    finally:
        for part, kind in kinds.items():
            part.__class__ = kind


def _is_changed_in_place(value: Any) -> bool:
    """Whether this stands for ``buffer += 1``, which a graph does and Python follows by setting the attribute."""
    node: Any = value.node if isinstance(value, fx.Proxy) else None
    while node is not None and node.target in IN_PLACE:
        node = node.args[0]
    return node is not None and node.op == "get_attr"


def _plain_name(target: str) -> str:
    return target.removeprefix(_ROOT).removeprefix(".")


def _settings() -> tuple[Any, ...]:
    """What blocks of torch change in this thread; a graph would not enter them."""
    autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    return (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast, saved_tensors_hooks(True))


def _is_asserted(frame: FrameType) -> bool:
    """Whether the truth of a value is about to be asserted."""
    instructions = (
        instruction.opname for instruction in dis.get_instructions(frame.f_code) if instruction.offset >= frame.f_lasti
    )
    # From Python 3.13 on a comparison may take the truth of what it found itself.
    names = [name for name in instructions if name not in ("COMPARE_OP", "TO_BOOL", "EXTENDED_ARG")][:2]
    return names[0].endswith("IF_TRUE") and names[1] == "LOAD_ASSERTION_ERROR"


def _check_assertion(value: Any) -> None:
    if not value:
        raise AssertionError("an assertion in the model's forward does not hold")


def _place_of(error: Exception) -> str:
    """The line of the traced code that failed."""
    frames = traceback.extract_tb(error.__traceback__)
    traced = [frame for frame in frames if "fx" not in Path(frame.filename).parts and frame.filename != __file__]
    return f"{Path(traced[-1].filename).name}:{traced[-1].lineno}" if traced else "its call"


@contextmanager
def _without_function_modes() -> Iterator[None]:
    """A block without torch's function modes, which would take proxies for tensors."""
    modes = [pop_function_mode() for _ in range(num_function_modes())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            push_function_mode(mode)
