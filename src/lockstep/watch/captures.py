"""The values outside a function that it can reach and change, and whether they have changed.

Containers, numbers, tensors, random generators and None: in its closure, in its object and in its module's globals.
Nothing here runs any code of the values' classes.
"""

from __future__ import annotations

import pickle
import random
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from types import CodeType, ModuleType
from typing import Any

from torch import Tensor, nn

from lockstep.introspection import attribute_of, attributes_of, is_kind, module_of
from lockstep.watch.step_names import LIBRARIES, plain_function

CONTAINERS = (list, dict, set, deque)
_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
_ARRAY_BYTES = 2**20
"""The contents of larger NumPy arrays are not compared."""


@lru_cache(maxsize=1024)
def is_of_a_library(file: str) -> bool:
    """Whether a file of Python code belongs to an installed package, to Python, to torch or to this package."""
    return file.startswith((*_INSTALLED, *LIBRARIES))


def is_mutable(value: Any) -> bool:
    """Whether it is a container, tensor, array or generator, or a number or None, whose name may be bound anew."""
    simple = value is None or is_kind(value, (*CONTAINERS, Tensor)) or type(value) in (int, float)
    return simple or _is_array(value) or is_generator(value)


def captured_by(fn: Any, matches: Callable[[Any], bool] = is_mutable) -> Iterator[tuple[str, Any]]:
    """Names and values that a function can reach and change: in its closure, its object and its module's globals.

    These are containers, numbers, tensors, random generators and None, or what else ``matches``, also as attributes
    of the user's objects.
    """
    # Arguments of partials are reached like names of a closure.
    while is_kind(fn, partial):
        arguments = ((f"argument {number} of a partial", value) for number, value in enumerate(fn.args))
        yield from matches_in("", arguments, matches)
        fn = fn.func
    plain = plain_function(fn)
    code: CodeType | None = attribute_of(plain, "__code__")
    owner = attribute_of(fn, "__self__", None if plain is fn and code is not None else fn)
    if code is not None and code.co_filename.startswith(LIBRARIES):
        return
    if owner is not None and not is_kind(owner, (nn.Module, ModuleType)):
        yield from matches_in(f"{type(owner).__name__}.", (attributes_of(owner) or {}).items(), matches)
    if code is not None:
        cells = zip(code.co_freevars, plain.__closure__ or (), strict=True)
        yield from matches_in("", [(name, cell.cell_contents) for name, cell in cells if _is_set(cell)], matches)
        yield from matches_in("", [(name, plain.__globals__.get(name)) for name in code.co_names], matches)


def matches_in(
    prefix: str, items: Iterable[tuple[str, Any]], matches: Callable[[Any], bool]
) -> Iterator[tuple[str, Any]]:
    """Those of the given names and values that match, and such attributes of the user's objects."""
    for name, value in items:
        if matches(value):
            yield prefix + name, value
        elif not is_kind(value, nn.Module) and is_of_the_user(value):
            for attribute, member in (attributes_of(value) or {}).items():
                if matches(member):
                    yield f"{prefix}{name}.{attribute}", member


def is_of_the_user(value: Any) -> bool:
    """Whether a value is an object of a class that belongs to no library."""
    if is_kind(value, (type, ModuleType)) or attributes_of(value) is None:
        return False
    home = module_of(type(value))
    file = attribute_of(sys.modules.get(home), "__file__")
    return home == "__main__" or (type(file) is str and not is_of_a_library(file))


def _is_array(value: Any) -> bool:
    return "numpy" in sys.modules and is_kind(value, (sys.modules["numpy"].ndarray, sys.modules["numpy"].generic))


def is_generator(value: Any) -> bool:
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
    if is_generator(value):
        return pickle.dumps(value)
    # By identity: a name that is bound to another tensor is a change. The values of tensors are not compared.
    if value is None or is_kind(value, Tensor):
        return id(value)
    if _is_array(value):
        return id(value), value.tobytes() if value.nbytes <= _ARRAY_BYTES else b""
    for kind in CONTAINERS:
        if is_kind(value, kind):
            items = dict.items(value) if kind is dict else kind.__iter__(value)
            return [tuple(map(id, item)) if kind is dict else id(item) for item in items]
    return value
