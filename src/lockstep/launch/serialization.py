"""Functions, results and errors as bytes for another process of one launch, by value with cloudpickle.

The launcher serializes a function and its arguments, the chief its result, and each worker the error that ends it. This
module imports no torch, as ``worker`` does not.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def serialize_call(fn: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]) -> bytes:
    """A call as bytes for a fresh process.

    A function of ``__main__``, of a notebook, or of a module that a fresh process would not find by its name, such as a
    test's, is serialized by value. What can be found by name is imported there.
    """
    import cloudpickle  # 40 ms that a worker with a program does not need

    module = inspect.getmodule(fn)
    if module is None or module.__name__ == "__main__" or _is_importable(module):
        return serialize((fn, args, kwargs))
    # The registration is of the process: left in place, later pickles of the user's would carry the module too.
    cloudpickle.register_pickle_by_value(module)
    try:
        return serialize((fn, args, kwargs))
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def serialize(value: object) -> bytes:
    """``value`` as bytes. Raises whatever its classes raise when they are pickled."""
    import cloudpickle

    payload: bytes = cloudpickle.dumps(value)
    return payload


def deserialize(payload: bytes) -> Any:
    """What ``serialize`` was given, in this launch's own processes. Raises whatever its classes raise."""
    import cloudpickle

    return cloudpickle.loads(payload)


def _is_importable(module: ModuleType) -> bool:
    """Whether a fresh process with this one's ``sys.path`` would import the same file."""
    path = None
    spec: ModuleSpec | None = None
    parts = module.__name__.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        specs = (finder.find_spec(name, path) for finder in sys.meta_path)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    file = getattr(module, "__file__", None)  # a built-in module has none
    return spec is not None and (file is None or spec.origin == file)
