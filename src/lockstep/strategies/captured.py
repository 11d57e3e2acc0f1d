"""What a step function and the hooks of modules can reach outside of themselves, compared before and after a run.

All replicas share these objects. ``captured_by`` lists those of one function, ``state_of`` tells whether one of them
has changed, and ``HookStores`` finds tensors that hooks keep in one place for all replicas.
"""

from __future__ import annotations

import pickle
import random
import sys
import sysconfig
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from lockstep._torch_compat import tree_leaves
from lockstep.errors import UsageError
from lockstep.mirroring.module.module import MirroredModule

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_CONTAINERS = (list, dict, set, deque)
_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
_ARRAY_BYTES = 2**20
"""The contents of larger NumPy arrays are not compared."""
LIBRARIES = tuple(str(Path(each.__file__ or "").parent) for each in (torch, sys.modules["lockstep"]))
"""The folders of torch and of this package, whose own functions are not looked at."""


def plain_function(fn: Any) -> Any:
    """The function under partials and bound methods."""
    while isinstance(fn, partial):
        fn = fn.func
    return getattr(fn, "__func__", fn)


def hooks_of(module: nn.Module) -> Iterator[Any]:
    """The forward and backward hooks of a module, without its submodules'."""
    for kind in _HOOKS:
        yield from vars(module).get(kind, {}).values()


def captured_by(fn: Any) -> Iterator[tuple[str, Any]]:
    """Names and values that a function can reach and change: in its closure, its object and its module's globals.

    These are containers, numbers, tensors, random generators and None, also as attributes of the user's objects.
    """
    while isinstance(fn, partial):
        fn = fn.func
    owner = getattr(fn, "__self__", None if hasattr(fn, "__code__") else fn)
    plain = plain_function(fn)
    code: CodeType | None = getattr(plain, "__code__", None)
    if code is not None and code.co_filename.startswith(LIBRARIES):
        return
    if owner is not None and not isinstance(owner, (nn.Module, ModuleType)):
        yield from mutable_in(f"{type(owner).__name__}.", getattr(owner, "__dict__", {}).items())
    if code is not None:
        cells = zip(code.co_freevars, plain.__closure__ or (), strict=True)
        yield from mutable_in("", [(name, cell.cell_contents) for name, cell in cells if _is_set(cell)])
        yield from mutable_in("", [(name, plain.__globals__.get(name)) for name in code.co_names])


def mutable_in(prefix: str, items: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Those of the given names and values that a program can change, and such attributes of the user's objects."""
    for name, value in items:
        if _is_mutable(value):
            yield prefix + name, value
        elif not isinstance(value, nn.Module) and is_of_the_user(value):
            for attribute, kept in vars(value).items():
                if _is_mutable(kept):
                    yield f"{prefix}{name}.{attribute}", kept


def _is_mutable(value: Any) -> bool:
    """Whether it is a container, tensor, array or generator, or a number or None, whose name may be bound anew."""
    simple = value is None or isinstance(value, (*_CONTAINERS, torch.Tensor)) or type(value) in (int, float)
    return simple or _is_array(value) or is_generator(value)


def is_of_the_user(value: Any) -> bool:
    """Whether a value is an object of a class that belongs to no library."""
    kind = type(value)
    if isinstance(value, (type, ModuleType)) or not hasattr(value, "__dict__"):
        return False
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return kind.__module__ == "__main__" or (file is not None and not file.startswith((*_INSTALLED, *LIBRARIES)))


def _is_array(value: Any) -> bool:
    return type(value).__module__ == "numpy" and hasattr(value, "tobytes")


def is_generator(value: Any) -> bool:
    """Whether it is a random generator of Python or NumPy."""
    return isinstance(value, random.Random) or type(value).__module__.startswith("numpy.random.")


def _is_set(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # not assigned yet
        return False


def state_of(value: Any) -> Any:
    """A value that is equal as long as the container, number or generator has not changed."""
    if is_generator(value):
        return pickle.dumps(value)
    if value is None or isinstance(value, torch.Tensor):
        return id(value)
    if _is_array(value):
        return id(value), value.tobytes() if value.nbytes <= _ARRAY_BYTES else b""
    if isinstance(value, dict):
        return [(key, id(each)) for key, each in value.items()]
    return [id(each) for each in value] if isinstance(value, _CONTAINERS) else value


class HookStores:
    """The containers and objects outside of modules that their hooks reach, and the tensors in them before a run."""

    def __init__(self, modules: Sequence[MirroredModule]) -> None:
        self._modules = modules
        self._before = {id(store): _tensors(store) for _, _, store in self._stores()}

    def check(self, replicas: int) -> None:
        """Called after the run, or after its failure.

        Raises:
            UsageError: a hook has kept a tensor in one place for all replicas.
        """
        for hook, name, store in self._stores():
            seen = {id(each) for each in self._before.get(id(store), ())}
            fresh = any(id(each) not in seen for each in _tensors(store))
            by_replica = isinstance(store, dict) and set(range(replicas)) <= {key for key in store if type(key) is int}
            if fresh and not by_replica:
                raise UsageError(
                    f"the hook {hook} keeps tensors of the step in {name}, outside of the module, where the replicas "
                    "overwrite each other's; keep them on the part that the hook is called with (part.kept = output), "
                    "and read them in the step from the mirrored module (mirrored.get_submodule(name).kept)"
                )

    def _stores(self) -> Iterator[tuple[str, str, Any]]:
        for copy in (copy for module in self._modules for copy in module.copies):
            parts = list(copy.modules())
            hooks = [hook for part in parts for hook in hooks_of(part)]
            own = {id(value) for part in parts for value in vars(part).values()} if hooks else set()
            for hook in hooks:
                for name, store in _reached(hook):
                    if id(store) not in own:
                        yield getattr(hook, "__qualname__", type(hook).__name__), name, store


def _reached(hook: Any) -> Iterator[tuple[str, Any]]:
    while isinstance(hook, partial):
        yield from (("an argument of a partial", value) for value in hook.args if isinstance(value, _CONTAINERS))
        hook = hook.func
    if isinstance(hook, FunctionType):
        for name, value in captured_by(hook):
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
