"""How a function, its arguments, its result and its error cross between processes: by value, with cloudpickle."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import cloudpickle


def pack_call(fn: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]) -> bytes:
    """A call as bytes that a fresh process can unpack.

    A function of a module that a fresh process would not find by its name, such as a test's, travels by value, as one
    of a notebook or of ``__main__`` always does. What can be found by name is imported there.
    """
    module = inspect.getmodule(fn)
    if module is None or module.__name__ == "__main__" or _is_found_by_name(module):
        return pack((fn, args, kwargs))
    cloudpickle.register_pickle_by_value(module)
    try:
        return pack((fn, args, kwargs))
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def pack(value: object) -> bytes:
    """``value`` as bytes. Raises whatever its own classes raise when they are pickled."""
    payload: bytes = cloudpickle.dumps(value)
    return payload


def unpack(payload: bytes) -> Any:
    """What was packed, by this launch's own processes. Raises whatever its own classes raise when they are rebuilt."""
    return cloudpickle.loads(payload)


def _is_found_by_name(module: ModuleType) -> bool:
    """Whether a fresh process with this one's ``sys.path`` would import the same file."""
    path = None
    spec: ModuleSpec | None = None
    parts = module.__name__.split(".")
    for end in range(1, len(parts) + 1):
        spec = _find_spec(".".join(parts[:end]), path)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    file = getattr(module, "__file__", None)  # one that is built in has none
    return spec is not None and (file is None or spec.origin == file)


def _find_spec(name: str, path: list[str] | None) -> ModuleSpec | None:
    found = (finder.find_spec(name, path) for finder in sys.meta_path)
    return next((spec for spec in found if spec is not None), None)
