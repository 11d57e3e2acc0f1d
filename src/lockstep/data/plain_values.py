"""Values of attributes as a checkpoint can hold them: numbers, texts, containers and arrays of these, and generators.

    [3, 1, 2]                  <->  {"list": [3, 1, 2]}
    random.Random(7)           <->  {"random.Random": [version, tensor, None]}

``encoded`` makes a copy, so that what the program does to the value later changes nothing here. Nothing is pickled:
reading a checkpoint runs no code of its own.
"""

from __future__ import annotations

import ast
import itertools
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

_ATOMS = (type(None), bool, int, float, str)
_SEQUENCES: Mapping[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset", deque: "deque"}
_MAPPINGS: Mapping[type, str] = {dict: "dict", OrderedDict: "OrderedDict", Counter: "Counter"}
_FACTORIES: Mapping[str, type] = {kind.__name__: kind for kind in (int, float, bool, str, list, tuple, dict, set)}
"""Of a defaultdict that is encoded."""
_CONTAINERS: Mapping[str, type] = {name: kind for kind, name in (*_SEQUENCES.items(), *_MAPPINGS.items())}
_MAX_ITEMS = 100_000  # copying more would take longer than 0.1 s at the beginning of each epoch
MAX_BYTES = 64 * 2**20
_MAX_DEPTH = 20
_PACKED = 64
"""A list of so many integers becomes a tensor: 8 bytes a number, instead of text and a Python object for each."""


class NotPlainError(Exception):
    """A value that a checkpoint cannot hold, or that is too large."""


def is_generator(value: Any) -> bool:
    """Whether it is a random generator of Python's, NumPy's or torch's whose state can be told."""
    kind = type(value)
    if issubclass(kind, random.Random):
        # SystemRandom draws from the operating system. It has no state that could be brought back.
        return not issubclass(kind, random.SystemRandom)
    return issubclass(kind, torch.Generator) or (
        (numpy := sys.modules.get("numpy")) is not None
        and issubclass(kind, (numpy.random.RandomState, numpy.random.Generator))
    )


def is_container(value: Any) -> bool:
    """Whether it is a list, dict or another container of Python's own, and of no class derived from it."""
    return type(value) in _SEQUENCES or type(value) in _MAPPINGS or type(value) is defaultdict


def encoded(value: Any, *, max_bytes: int = MAX_BYTES) -> Any:
    """Returns a copy of a value for ``decoded``, of numbers, texts, tensors, lists and dicts with texts as keys.

    A generator is encoded alone, and not in a container.

    Raises:
        NotPlainError: anything else, such as a defaultdict with a function of the program's; more than 100,000 items or
            800,000 integers, or larger arrays.
    """
    return _Encoder(max_bytes).encoded(value)


def decoded(code: Any) -> Any:
    """Returns a new value equal to the one that ``encoded`` was given."""
    if not isinstance(code, Mapping):
        return code
    ((kind, content),) = code.items()
    if kind not in _CONTAINERS:
        return _DECODERS[kind](content)
    if isinstance(content, torch.Tensor):
        return _CONTAINERS[kind](content.tolist())
    if kind in _MAPPINGS.values():
        return _CONTAINERS[kind]({decoded(key): decoded(item) for key, item in content})
    return _CONTAINERS[kind](map(decoded, content))


def restored(code: Any, present: Any, *, in_place: bool) -> Any:
    """Returns the value that ``encoded`` was given: ``present`` itself, brought to it, or a new one.

    A generator is brought to its state where it is, since others may draw from it too. ``in_place`` says the same of
    containers and arrays.
    """
    kind = next(iter(code)) if isinstance(code, Mapping) else ""
    if kind in _GENERATORS:
        make, bring = _GENERATORS[kind]
        generator = present if _name(present) == kind else make(code[kind])
        bring(generator, code[kind])
        return generator
    value = decoded(code)
    return present if in_place and type(present) is type(value) and _filled(present, value) else value


def same(code: Any, other: Any) -> bool:
    """Whether two values that ``encoded`` returned are equal, bit by bit."""
    if type(code) is not type(other):
        return False
    if isinstance(code, torch.Tensor):
        equal = code.shape == other.shape and code.dtype == other.dtype and code.device == other.device
        # As bytes: NaN is not equal to itself, and -0.0 is equal to 0.0.
        return equal and torch.equal(_bytes(code), _bytes(other))
    if isinstance(code, dict):
        return code.keys() == other.keys() and all(same(code[key], other[key]) for key in code)
    if isinstance(code, list):
        return len(code) == len(other) and all(map(same, code, other))
    return bool(code == other) or (code != code and other != other)


class _Encoder:
    """Encodes one value, and counts what is in it."""

    def __init__(self, max_bytes: int) -> None:
        self._items = self._bytes = 0
        self._max_bytes = max_bytes

    def encoded(self, value: Any, depth: int = 0) -> Any:
        kind = type(value)
        if kind in _ATOMS:
            return value
        if depth == _MAX_DEPTH:  # a list may be an item of itself
            raise NotPlainError
        # A deque with a bound is encoded in _array, with its bound.
        if kind in _SEQUENCES and getattr(value, "maxlen", None) is None:
            packed = _packed(value) if _PACKED <= len(value) <= 8 * _MAX_ITEMS else None
            self._count(items=len(value) // (1 if packed is None else 8))
            return {
                _SEQUENCES[kind]: [self.encoded(item, depth + 1) for item in list(value)] if packed is None else packed
            }
        if kind in _MAPPINGS:
            self._count(items=2 * len(value))
            pairs = [[self.encoded(key, depth + 1), self.encoded(item, depth + 1)] for key, item in list(value.items())]
            return {_MAPPINGS[kind]: pairs}
        if kind is defaultdict:
            return {"defaultdict": [_factory(value), self.encoded(dict(value), depth + 1)["dict"]]}
        if is_generator(value):
            if depth:  # it is brought to its state where it is, so its container is not copied as a whole
                raise NotPlainError
            return {_name(value): _state(value)}
        return self._array(value)

    def _array(self, value: Any) -> Any:
        kind = type(value)
        if kind is nn.Parameter and is_array(value):
            return {"parameter": self._array(value.detach())["tensor"]}
        if kind is torch.Tensor and value.layout is torch.strided and not (value.is_meta or value.is_quantized):
            self._count(size=value.nbytes)
            return {"tensor": value.detach().clone()}
        if kind is bytes:
            self._count(size=len(value))
            return {"bytes": _tensor(value)}
        if kind is deque:
            return {"bounded": [value.maxlen, self.encoded(list(value))]}
        if kind is complex:
            return {"complex": [value.real, value.imag]}
        if kind is itertools.count:  # since Python 3.14 its repr alone says what comes next
            return {"count": repr(value).removeprefix("count")}
        if _is_numpys(value) and not value.dtype.hasobject and value.dtype.names is None:
            self._count(size=value.nbytes)
            return {"array": [value.dtype.str, list(value.shape), _tensor(value.tobytes())]}
        raise NotPlainError

    def _count(self, *, items: int = 0, size: int = 0) -> None:
        self._items += items
        self._bytes += size
        if self._items > _MAX_ITEMS or self._bytes > self._max_bytes:
            raise NotPlainError


def _packed(values: Collection[Any]) -> torch.Tensor | None:
    """Integers as a tensor; None if one is something else or has more than 64 bits."""
    if set(map(type, values)) != {int} or min(values) < -(2**63) or max(values) >= 2**63:
        return None
    return torch.tensor(list(values), dtype=torch.int64)


def _tensor(value: bytes) -> torch.Tensor:
    # A bytearray, as torch warns of a tensor over bytes, which cannot be written to. torch.frombuffer refuses an empty
    # buffer.
    return torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0, dtype=torch.uint8)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def is_array(value: Any) -> bool:
    """Whether it is a tensor, or an array of numbers of NumPy's, and of no class derived from it.

    A parameter with a gradient is none: it may be trained, and is then what the model's checkpoint says.
    """
    if type(value) is nn.Parameter:
        return not value.requires_grad
    return type(value) is torch.Tensor or (_is_numpys(value) and bool(value.shape) and not value.dtype.hasobject)


def _is_numpys(value: Any) -> bool:
    """Whether it is an array or a number of NumPy's."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and (type(value) is numpy.ndarray or issubclass(type(value), numpy.generic))


def _array(content: Any) -> Any:
    import numpy

    kind, shape, raw = content
    array = numpy.frombuffer(raw.numpy().tobytes(), dtype=kind).reshape(shape)
    # The array of frombuffer is read-only. One without a dimension stands for a number of NumPy's.
    return array.copy() if shape else array[()]


def _filled(present: Any, value: Any) -> bool:
    """Brings a container or an array to a value of its type; returns whether it can be."""
    if isinstance(present, (list, deque)):
        present.clear()
        present.extend(value)
    elif isinstance(present, (set, dict)):
        present.clear()
        # dict's own update: that of a Counter would add the numbers.
        dict.update(present, value) if isinstance(present, dict) else present.update(value)
    elif getattr(present, "shape", ()) != getattr(value, "shape", None) or present.dtype != value.dtype:
        return False
    elif isinstance(present, torch.Tensor):
        present.detach().copy_(value)
    else:
        present[...] = value
    return True


_DECODERS: Mapping[str, Callable[[Any], Any]] = {
    "tensor": torch.clone,
    "parameter": lambda content: nn.Parameter(content.clone(), requires_grad=False),
    "defaultdict": lambda content: defaultdict(_FACTORIES.get(content[0]), decoded({"dict": content[1]})),
    "bytes": lambda content: content.numpy().tobytes(),
    "bounded": lambda content: deque(decoded(content[1]), content[0]),
    "complex": lambda content: complex(*content),
    "count": lambda content: itertools.count(*_arguments(content)),
    "array": _array,
}


def _factory(value: Any) -> str:
    """The name of what a defaultdict calls; empty if there is none."""
    factory = value.default_factory
    name = next((name for name, kind in _FACTORIES.items() if kind is factory), "")
    if factory is not None and not name:
        raise NotPlainError
    return name


def _arguments(text: str) -> tuple[Any, ...]:
    arguments = ast.literal_eval(text)
    return arguments if isinstance(arguments, tuple) else (arguments,)


# ---- generators


def _name(value: Any) -> str:
    if isinstance(value, random.Random):
        return "random.Random"
    return f"{'torch' if isinstance(value, torch.Generator) else 'numpy'}.{type(value).__name__}"


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        version, numbers, spare = generator.getstate()
        return [version, torch.tensor(numbers), spare]
    if isinstance(generator, torch.Generator):
        return [str(generator.device), generator.get_state()]
    legacy = not hasattr(generator, "bit_generator")
    return encoded(generator.get_state(legacy=False) if legacy else generator.bit_generator.state)


def _set_pythons(generator: Any, state: Any) -> None:
    version, numbers, spare = state
    generator.setstate((version, tuple(numbers.tolist()), spare))


def _new_numpys(state: Any) -> Any:
    import numpy

    return numpy.random.Generator(getattr(numpy.random, decoded(state)["bit_generator"])())


def _new_legacy(state: Any) -> Any:
    import numpy

    return numpy.random.RandomState()


_GENERATORS: Mapping[str, tuple[Callable[[Any], Any], Callable[[Any, Any], None]]] = {
    "random.Random": (lambda state: random.Random(), _set_pythons),
    "torch.Generator": (
        lambda state: torch.Generator(state[0]),
        lambda generator, state: generator.set_state(state[1].clone()),
    ),
    "numpy.RandomState": (_new_legacy, lambda generator, state: generator.set_state(decoded(state))),
    "numpy.Generator": (
        _new_numpys,
        lambda generator, state: setattr(generator.bit_generator, "state", decoded(state)),
    ),
}
"""By name: how a generator is made whose place is empty, and how one is brought to a state."""
