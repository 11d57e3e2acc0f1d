"""What a function can reach outside of itself, which all replicas have in common, compared before and after a run.

``captured_by`` lists the objects, and ``state_of`` tells whether one of them has changed.
"""

from __future__ import annotations

import pickle
import random
import sys
import sysconfig
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import nn

CONTAINERS = (list, dict, set, deque)
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


def captured_by(fn: Any) -> Iterator[tuple[str, Any]]:
    """Names and values that a function can reach and change: in its closure, its object and its module's globals.

    These are containers, numbers, tensors, random generators and None, also as attributes of the user's objects.
    """
    while isinstance(fn, partial):
        yield from mutable_in("", ((f"argument {number} of a partial", each) for number, each in enumerate(fn.args)))
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
    simple = value is None or isinstance(value, (*CONTAINERS, torch.Tensor)) or type(value) in (int, float)
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
    return [id(each) for each in value] if isinstance(value, CONTAINERS) else value
