"""Types and attributes of objects that this package does not know, without running any code of their classes.

What only looks at a program must not change it. A lazily imported module imports itself when an attribute is read, or
raises ImportError (KerasHub 0.32 has one for tensorflow); a proxy computes its value; and ``isinstance`` reads
``__class__``, which a proxy answers for. So the type is taken with ``type``, and attributes are read from where C keeps
them: slots, getters of extension types, and the ``__dict__`` of instances of Python classes.
"""

from __future__ import annotations

from types import FunctionType, GetSetDescriptorType, MemberDescriptorType, ModuleType
from typing import Any

_ABSENT: Any = object()
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class statement made it. A type of C's may compute a __dict__ (wrapt does)
# Read past metaclasses, which may answer for a class's attributes too.
_BASES = type.__dict__["__mro__"].__get__
_NAMES = type.__dict__["__dict__"].__get__
_HOME = type.__dict__["__module__"].__get__
_FLAGS = type.__dict__["__flags__"].__get__
_IN_C = (GetSetDescriptorType, MemberDescriptorType)
_WITH_ATTRIBUTES = (FunctionType, ModuleType)
_GETTERS_OF = ("builtins", "functools", "_cython_")
"""Modules of C, by the beginnings of their names, whose getters compute nothing: of functions, methods and partials."""


def is_kind(value: object, kinds: type | tuple[type, ...]) -> bool:
    """``isinstance`` by the type alone."""
    return issubclass(type(value), kinds)


def module_of(kind: type) -> str:
    """The name of the module that a class says it is from; empty if it says something else."""
    name = _HOME(kind)
    return name if type(name) is str else ""


def attributes_of(value: object) -> dict[str, Any] | None:
    """The ``__dict__`` of an instance of a Python class, a function or a module; None for others, and for proxies."""
    # The first class in the method resolution order that has ``__dict__`` is the one whose getter Python itself would
    # call.
    for base in _BASES(type(value)):
        getter = _NAMES(base).get("__dict__")
        if getter is not None:
            # Compared by identity: ``==`` of a class may be its metaclass's, and runs code.
            is_plain = any(base is kind for kind in _WITH_ATTRIBUTES) or _FLAGS(base) & _HEAP_TYPE
            attributes = getter.__get__(value) if type(getter) in _IN_C and is_plain else None
            return attributes if type(attributes) is dict else None
    return None


def attribute_of(value: object, name: str, default: Any = None) -> Any:
    """An attribute in the ``__dict__`` of an object, or one that C keeps of functions, methods and slots.

    ``default`` is the answer for what a class computes.
    """
    kind = type(value)
    attributes = attributes_of(value)
    if attributes is not None and name in attributes:
        return attributes[name]
    for base in _BASES(kind):
        getter = _NAMES(base).get(name, _ABSENT)
        if getter is not _ABSENT:
            return _read(getter, value, default) if _is_plain(getter, base) else default
    return default


def _is_plain(getter: Any, base: type) -> bool:
    """Whether a getter reads memory, and computes nothing."""
    is_known = type(getter) is GetSetDescriptorType and module_of(base).startswith(_GETTERS_OF)
    return is_known or type(getter) is MemberDescriptorType


def _read(getter: Any, value: object, default: Any) -> Any:
    try:
        return getter.__get__(value)
    except AttributeError:  # a slot that is not set
        return default
