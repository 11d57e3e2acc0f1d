"""The attributes of samplers, datasets and collate functions that change from one iteration to the next.

    a sampler's random.Random, an epoch that it counts, a list that it shuffles, a pointer into buckets

What they were when an iteration began is part of the position in the data, so that a resumed iteration has the same
order. Attributes that never change are not saved: a program may set them otherwise when it goes on. Objects with
``state_dict`` and ``load_state_dict`` tell their state themselves. A warning names what changes and cannot be saved.

Only types, and what is in the dicts of objects, are looked at: no property or other code of theirs runs.
"""

from __future__ import annotations

import dis
import io
import sys
import types
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from lockstep.data.object_attributes import content_of, set_attribute
from lockstep.data.plain_values import (
    MAX_BYTES,
    NotPlainError,
    decoded,
    encoded,
    is_array,
    is_container,
    is_generator,
    restored,
    same,
)
from lockstep.errors import DataError

AttributeState = list[Any]
"""Of each attribute [path of its owner, kind, key, value as ``encoded`` returns it, whether it is changed in place]."""

_ORDER, _ROWS = ("sampler", "batch_sampler"), ("dataset", "collate_fn")
_ORDER_PATHS = tuple(f".{name}" for name in _ORDER)
_ROWS_PATHS = tuple(f".{name}" for name in _ROWS)
_DATA = (*_ORDER, *_ROWS, "source")
"""Attributes whose objects are the data's in any case. A module elsewhere may be one that is trained."""
_LOADERS = ("torch", "torchdata", "accelerate")
_WITHOUT_STATE = frozenset(
    [
        *("lockstep", "lockstep_tools", "tokenizers", "PIL", "h5py", "datetime", "uuid", "pathlib", "re", "typing"),
        *("logging", "threading", "multiprocessing", "concurrent", "queue", "asyncio", "socket", "sqlite3"),
        *("_thread", "_io", "_queue", "weakref", "abc"),
    ]
)
"""Packages of whose objects none decides what comes next."""
_WHOLE = frozenset(["builtins", "itertools", "torch", "numpy", "pandas", "pyarrow", "datasets"])
"""Packages whose objects are not looked into, but for torch's samplers and datasets: another object is a change."""
_NO_OBJECTS = frozenset(["builtins", "collections", "functools", "itertools", "types", "torch", "numpy"])
_NO_STATE = frozenset(["deprecation_warnings"])
"""Attributes that decide nothing: what was said already. DataCollatorWithPadding (transformers 5.23) sets and resets an
item of its tokenizer's at each batch, and every checkpoint within an epoch warned of it."""
_MAX_PLACES = 20_000  # in one source: looking at one takes about 2 us
_MAX_PARTS = 1_000  # of a container that holds objects
_MAX_LINKED = 2_000  # objects behind one at the greatest depth, as of a ring
_MAX_DEPTH = 12
_CALL_DEPTH = 4  # that a function counts which another one names: three of them from an object of the loader
_CONTAINER_DEPTH = _MAX_DEPTH - 2  # of what is in a class or module: generators may be in containers there
_COPIED_BYTES = 2**16  # larger arrays of a dataset are copied once they have changed
_COMPARED = 64

RowsState = Literal["begun", "now", "unknown"]
Kind = Literal["attribute", "item", "variable", "state"]


@dataclass(slots=True, eq=False)
class _Value:
    """A value at one place: ``key`` of an owner, which is found at the path ``at``."""

    at: str
    kind: Kind
    key: Any
    holder: str  # the class of the object whose attribute it is, or that has it in a container
    value: Any
    code: Any = None  # as ``encoded`` returns it; None for what cannot be saved, and for large arrays
    mark: Any = None  # of these: what differs when it has changed

    @property
    def path(self) -> str:
        return {"item": f"{self.at}[{self.key!r}]", "state": self.at}.get(self.kind, f"{self.at}.{self.key}")

    def is_in(self, path: str | None) -> bool:
        """Whether it is in the object at a path."""
        return path is not None and f"{self.at}.".startswith((f"{path}.", f"{path}[", f"{path}<"))

    @property
    def has_code(self) -> bool:
        return self.code is not None or self.value is None

    @property
    def is_blank(self) -> bool:
        """Whether it is None or an empty container."""
        if not isinstance(self.code, dict):
            return self.value is None
        ((kind, content),) = self.code.items()
        return bool(content == [] or (kind == "defaultdict" and content[1] == []))

    @property
    def is_beyond_saving(self) -> bool:
        """Whether no checkpoint can hold it. A large array without a code has not changed yet."""
        return not self.has_code and not (is_array(self.value) and self.value.nbytes <= MAX_BYTES)

    def differs(self, before: _Value) -> bool:
        """Whether it is another value than before, or may be one."""
        if self.has_code and before.has_code:
            return not same(self.code, before.code)
        if self.is_blank or before.is_blank:  # a file that is opened late, a cache that is filled
            return False
        if _advances(self.value):  # one made anew for each iteration is at its beginning
            return self.value is before.value
        return bool(self.mark != before.mark)


class Look:
    """The values of a source's attributes at one moment, by path."""

    def __init__(self, source: Any, stateful: Any = None) -> None:
        self.values: dict[str, _Value] = {}
        self.owners: dict[str, Any] = {"": source}
        self.pointers: dict[str, _Value] = {}  # the objects that are looked into, at all places
        self._visited: dict[int, Any] = {}
        self._linked: dict[int, Any] = {}
        self._stateful = stateful
        self.stateful_path: str | None = None
        for name, value in _roots(source):
            self._add(_Value("", "attribute", name, type(source).__name__, value), 0, all_values=True)

    def _add(self, place: _Value, depth: int, *, all_values: bool) -> None:
        """Adds one value, and those that are in it; only generators unless ``all_values``."""
        value = place.value
        if len(self.values) > _MAX_PLACES or (place.kind == "attribute" and place.key in _NO_STATE):
            return
        if all_values and _is_object(value) and len(self.pointers) <= _MAX_PLACES:
            if depth > _MAX_DEPTH:
                self._add_linked(value)
            else:
                self.pointers[place.path] = place
        # Each object is looked into once: a ring of linked objects has no end.
        if id(value) in self._visited or depth > _MAX_DEPTH:
            return
        of_order = place.path.startswith(_ORDER_PATHS)
        # A large array is only marked here, and copied once it has changed: to copy a dataset in memory at the
        # beginning of every epoch would cost its size again.
        is_large = is_array(value) and value.nbytes > (MAX_BYTES if of_order else _COPIED_BYTES)
        try:
            place.code = None if is_large else encoded(value, max_bytes=MAX_BYTES if of_order else _COPIED_BYTES)
        except NotPlainError:
            self._add_parts(place, depth, all_values)
            return
        if is_container(value) or is_large or is_generator(value):
            self._visited[id(value)] = value
        place.mark = _mark(value) if is_large else None
        if all_values or is_generator(value):
            self.values[place.path] = place

    def _add_parts(self, place: _Value, depth: int, all_values: bool) -> None:
        value, path = place.value, place.path
        self._visited[id(value)] = value
        if value is self._stateful:
            self.stateful_path = path
        elif _tells_state(value):
            self.owners[path] = value
            code = _told_state(value)
            place = _Value(path, "state", "state_dict()", type(value).__name__, value, code, mark=object())
            self.values[path] = place
            return
        whole = all_values and not _is_foreign(place)
        parts, classes = _parts(value, tensors=whole), _classes(value) if whole else []
        if parts is None or _is_sequence(value) or is_container(value):
            place.mark = _mark(value)
            if all_values:
                self.values[path] = place
        if (parts is None and not classes) or (is_container(value) and len(value) > _MAX_PARTS):
            return
        self.owners[path] = value
        holder = place.holder if is_container(value) else type(value).__name__
        for kind, key, part in parts or ():
            self._add(_Value(path, kind, key, holder, part), depth + 1, all_values=whole)
        if type(value) is types.FunctionType and whole:
            self._add_globals(path, value, depth)
        for owner in classes:
            self._add_class(f"{path}<{owner.__name__}>", owner, depth)

    def _add_class(self, path: str, owner: type, depth: int) -> None:
        """The attributes of a class of the user's: a counter may be there, or what its methods close over."""
        if id(owner) in self._visited:
            return
        self._visited[id(owner)] = owner
        self.owners[path] = owner
        for key, value in list(vars(owner).items()):
            if not key.startswith("__") and (is_generator(value) or _is_number(value) or is_container(value)):
                place = _Value(path, "attribute", key, owner.__name__, value)
                self._add(place, _CONTAINER_DEPTH, all_values=True)
            elif (function := _function(value)) is not None:
                self._add_method(f"{path}.{key}", function, depth)

    def _add_method(self, path: str, function: types.FunctionType, depth: int) -> None:
        self.owners[path] = function
        for kind, key, part in () if _is_librarys(function) else _parts(function) or ():
            if key != "__class__":  # of super()
                self._add(_Value(path, kind, key, function.__qualname__, part), depth + 1, all_values=True)
        self._add_globals(path, function, depth)

    def _add_globals(self, path: str, function: types.FunctionType, depth: int) -> None:
        """What a function of the user's names in modules: generators, numbers and items that it sets, and functions."""
        for named in _namespaces(function):
            name = named.get("__name__")
            base, mark, _ = path.partition(f"<{name}>")
            for code in _codes(function.__code__):
                self._add_named(f"{base}{mark or f'<{name}>'}", named, code, function.__qualname__, depth)

    def _add_named(self, path: str, named: dict[str, Any], code: types.CodeType, holder: str, depth: int) -> None:
        for name in code.co_names:
            value: Any = named.get(name)
            place = _Value(path, "item", name, holder, value)
            if type(value) is types.FunctionType:
                if not _is_librarys(value):
                    self._add(place, depth + _CALL_DEPTH, all_values=True)
            elif is_container(value):
                # The bytecode says whether the function sets items of a container. If it does, all of the container is
                # followed; if it does not, only generators in it are, and only in a small one.
                sets = _sets_item(code)
                if sets or len(value) <= _COMPARED:
                    self.owners[path] = named
                    self._add(place, _CONTAINER_DEPTH, all_values=sets)
            elif is_generator(value) or (_is_number(value) and _sets_global(code, name)):
                self.owners[path] = named
                self._add(place, _MAX_DEPTH, all_values=True)

    def _add_linked(self, value: Any) -> None:
        """Objects of one class that are linked, of which only the identity is known."""
        to_visit = [value]
        while to_visit and len(self._linked) < _MAX_LINKED:
            value = to_visit.pop()
            if id(value) not in self._visited and id(value) not in self._linked:
                self._linked[id(value)] = value
                to_visit += [part for part in content_of(value).values() if type(part) is type(value)]

    def has(self, value: Any) -> bool:
        """Whether an object was at some place."""
        return id(value) in self._visited or id(value) in self._linked


class SourceAttributes:
    """Follows the attributes of one source from iteration to iteration.

    ``stateful`` is the object whose ``state_dict`` is saved as the position in the data, if there is one. At the end
    of an iteration it may say that nothing is left, so between iterations its attributes are looked at.
    """

    def __init__(self, source: Any, stateful: Any = None) -> None:
        self._source, self._stateful = source, stateful
        self._first: dict[str, _Value] = {}
        self._owners: set[str] = set()  # when the source was new
        self._latest: Look | None = None
        self._changing: set[str] = set()
        self._moved: dict[str, _Value] = {}
        self._reported: set[str] = set()

    def look(self) -> Look:
        """The values now: before an iteration begins, or for ``state``."""
        look = Look(self._source, self._stateful)
        if self._latest is None:
            self._owners = set(look.owners)
            self._first = dict(look.values)
        before = self._first if self._latest is None else self._latest.values
        for path, value in look.values.items():
            first = self._first.setdefault(path, value)
            is_new = first is value and self._latest is not None and value.at in self._owners and value.has_code
            if is_new or (first is not value and (value.differs(first) or value.differs(before.get(path, first)))):
                self._changing.add(path)
                value.code = _code_of(value)
        if self._latest is not None:
            for path, value in _moved(look, self._latest).items():
                if not any(map(value.is_in, self._moved)):
                    self._moved.setdefault(path, value)
        self._latest = look
        return look

    def state(self, begun: Look | None = None, *, rows: RowsState = "begun") -> AttributeState:
        """Returns, for a checkpoint, what changes from iteration to iteration; warns once of what cannot be saved.

        Args:
            begun: the values when the iteration began whose position is saved; None between iterations.
            rows: what dataset and collate function will need when the iteration goes on. "begun": what they had when
                it began, as all batches are loaded again. "now": what they have now, as the source goes on at the
                very sample. "unknown": what they had at the batch before, which is past if batches are loaded ahead.
        """
        now = self.look()
        saved = []
        for path, pointer in self._moved.items():
            self._warn(path, pointer, in_epoch=False)
        for path in sorted(self._changing, key=lambda path: (path.count("."), path)):
            is_order = path.startswith(_ORDER_PATHS)
            look = now if begun is None or (rows == "now" and not is_order) else begun
            value = look.values.get(path)
            if value is None or (rows == "now" and value.is_in(now.stateful_path)):
                continue
            if any(map(value.is_in, self._moved)):  # these are another object's
                continue
            is_lost = rows == "unknown" and begun is not None and not is_order
            if value.at not in self._owners or is_lost or value.is_beyond_saving:
                self._warn(path, value, in_epoch=is_lost)
            elif value.has_code:  # a large array that has not changed before this iteration is that of a new source
                in_place = value.value is self._first[path].value
                if not in_place and _is_sequence(look.owners.get(value.at)):  # the tuple is warned of
                    continue
                saved.append([value.at, value.kind, encoded(value.key), value.code, in_place])
        return saved

    def load(self, state: Sequence[Any]) -> None:
        """Brings the source's attributes to what ``state`` returned. Raises DataError if it has not these objects."""
        if not state:
            return
        owners = self.look().owners
        for at, kind, key_code, code, in_place in state:
            key = decoded(key_code)
            value = _Value(at, kind, key, "", None)
            if at not in owners:
                raise _missing(value)
            try:
                _set(owners[at], kind, key, code, in_place=in_place)
            except (LookupError, AttributeError, TypeError) as error:
                raise _missing(value) from error
            self._changing.add(value.path)

    def _warn(self, path: str, value: _Value, *, in_epoch: bool) -> None:
        if path in self._reported:
            return
        self._reported.add(path)
        changes = "with each batch, and batches are loaded ahead" if in_epoch else "from one iteration to the next"
        advice = (
            "save at the end of epochs, or draw it from a generator seeded by the index of the row"
            if in_epoch
            else f"give {value.holder} state_dict() and load_state_dict(), or have it follow from set_epoch(epoch)"
        )
        warnings.warn(
            f"the position in the data is saved without {path[1:]} ({type(value.value).__name__}) of "
            f"{value.holder}, which changes {changes}: a training that goes on from it may get other rows than one "
            f"that was not interrupted; {advice}",
            stacklevel=2,
        )


def _moved(look: Look, before: Look) -> dict[str, _Value]:
    """Returns the places that hold another object than before, which was at another place then.

    Such a place is a pointer, and no checkpoint can hold it. A dataset may hold what it has read last, so only linked
    objects count there.
    """
    pointers = {}
    for path, place in look.pointers.items():
        earlier = before.pointers.get(path)
        if earlier is None or earlier.value is place.value or not before.has(place.value):
            continue
        if not path.startswith(_ROWS_PATHS) or _is_linked(place.value):
            pointers[path] = place
    return pointers


def _missing(value: _Value) -> DataError:
    return DataError(
        f"the saved position has the state of {value.path[1:]}, which this data does not have; give the data and "
        "samplers that it was saved with"
    )


def _roots(source: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(source, DataLoader):
        if not is_container(source):
            yield "source", source
        return
    for name in (*_ROWS, *_ORDER):  # a sampler may hold the dataset
        yield name, getattr(source, name, None)
    if _package(type(source)) not in _LOADERS:  # a class of the user's
        # What a fresh DataLoader has is torch's own, whatever its version. The other attributes are the program's.
        torch_attributes = vars(DataLoader(range(1)))  # type: ignore[arg-type]
        for name, value in list(vars(source).items()):
            if name not in torch_attributes and not name.startswith("_DataLoader"):
                yield name, value


def _parts(value: Any, *, tensors: bool = True) -> list[tuple[Kind, Any, Any]] | None:
    """What is in a container, object or function: kind, key and value; None for what is not looked into.

    ``tensors`` says whether the buffers and parameters of a module are among its attributes.
    """
    if isinstance(value, partial):
        value_parts = {"func": value.func, "args": value.args, "keywords": value.keywords}
        return [("attribute", key, part) for key, part in value_parts.items()]
    if type(value) is types.MethodType or (type(value) is types.BuiltinMethodType and is_generator(value.__self__)):
        return [("attribute", "__self__", value.__self__)]
    if type(value) is types.FunctionType:
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        return [("variable", name, cell.cell_contents) for name, cell in cells if _is_filled(cell)]
    if isinstance(value, DataLoader):
        return [("attribute", key, part) for key, part in _roots(value)]
    if isinstance(value, (set, frozenset)):
        return None
    if _is_sequence(value):  # a number in it changes with the tuple
        return [("item", key, part) for key, part in enumerate(value) if not _is_key(part)]
    if is_container(value):
        items = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
        return [("item", key, part) for key, part in items if _is_key(key)]
    content = content_of(value, tensors=tensors) if _has_attributes(type(value)) else {}
    return [("attribute", key, part) for key, part in content.items()] if content else None


def _is_key(value: Any) -> bool:
    """Whether it is a number, a text, or a tuple of these."""
    return type(value) in (int, str, bool, float, type(None)) or (type(value) is tuple and all(map(_is_key, value)))


def _is_sequence(value: Any) -> bool:
    """Whether it is a tuple or a named tuple, whose items cannot be set."""
    return type(value) is tuple or (
        isinstance(value, tuple) and type(vars(type(value)).get("_fields")) is tuple and type(value).__mro__[1] is tuple
    )


def _is_object(value: Any) -> bool:
    kind = type(value)
    return kind.__module__ not in _NO_OBJECTS and not is_generator(value) and _has_attributes(kind)


def _is_linked(value: Any) -> bool:
    """Whether an object has another one of its class, also in a container."""
    parts = list(content_of(value).values())
    inside = [part for items in parts if is_container(items) for part in items][:_MAX_PARTS]
    return any(type(part) is type(value) for part in (*parts, *inside))


def _has_attributes(kind: type) -> bool:
    if issubclass(kind, type) or issubclass(kind, types.ModuleType):
        return False
    if issubclass(kind, (Dataset, Sampler)) and _package(kind) != "datasets":
        return True
    return _package(kind) not in _WITHOUT_STATE | _WHOLE


def _is_foreign(place: _Value) -> bool:
    """Whether an object is the training's, and only its generators are the data's: a module, the object of a method."""
    value = place.value
    if isinstance(value, nn.Module):
        return place.key not in _DATA and not isinstance(value, (Dataset, Sampler))
    return type(value) is types.MethodType and not isinstance(value.__self__, (Dataset, Sampler))


def _classes(value: Any) -> list[type]:
    """The classes of an object that are the user's."""
    if is_container(value) or isinstance(value, (type, partial, types.MethodType, types.FunctionType)):
        return []
    return [kind for kind in type(value).__mro__ if _package(kind) not in _WITHOUT_STATE | _WHOLE | {"transformers"}]


def _package(kind: type) -> str:
    return str(kind.__module__).partition(".")[0]


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code of a function and of those defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _function(value: Any) -> types.FunctionType | None:
    """The function that a value in a class is or wraps."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if type(value) is property:
        value = value.fget
    return value if type(value) is types.FunctionType else None


def _is_librarys(function: types.FunctionType) -> bool:
    return _is_library(function.__globals__.get("__name__"), function.__code__.co_filename)


def _is_library(name: Any, path: Any) -> bool:
    """Whether a module is one of Python's or an installed one."""
    package = str(name).partition(".")[0]
    if package in _WITHOUT_STATE | _WHOLE or (package in sys.stdlib_module_names and package != "__main__"):
        return True
    return any(folder in str(path) for folder in ("site-packages", "dist-packages"))


def _namespaces(function: types.FunctionType) -> list[dict[str, Any]]:
    """The variables of a function's module, and of the user's modules that it names."""
    named = function.__globals__
    if str(named.get("__name__")).partition(".")[0] in _WITHOUT_STATE | _WHOLE:
        return []
    names = {name for code in _codes(function.__code__) for name in code.co_names}
    modules = [vars(module) for name in sorted(names) if type(module := named.get(name)) is types.ModuleType]
    return [named, *(other for other in modules if not _is_library(other.get("__name__"), other.get("__file__")))]


@lru_cache(maxsize=1024)
def _sets_item(code: types.CodeType) -> bool:
    """Whether a function has a statement that sets an item of a container."""
    return any(step.opname == "STORE_SUBSCR" for step in dis.get_instructions(code))


@lru_cache(maxsize=1024)
def _sets_global(code: types.CodeType, name: str) -> bool:
    """Whether a function has a statement that binds a name of its module."""
    return any(step.opname == "STORE_GLOBAL" and step.argval == name for step in dis.get_instructions(code))


def _is_filled(cell: types.CellType) -> bool:
    try:
        # There is no other way to ask: reading an empty cell raises a ValueError.
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _is_number(value: Any) -> bool:
    return type(value) in (bool, int, float)


def _tells_state(value: Any) -> bool:
    kind = type(value)
    # A module or optimizer within reach of the data is the training's. To load its state with the position in the data
    # would undo updates.
    if isinstance(value, (nn.Module, torch.optim.Optimizer, DataLoader)) or _package(kind) in _WITHOUT_STATE | _WHOLE:
        return False
    return all(callable(getattr(kind, name, None)) for name in ("state_dict", "load_state_dict"))


def _told_state(value: Any) -> Any:
    try:
        return encoded(value.state_dict())
    except NotPlainError:
        return None


def _advances(value: Any) -> bool:
    """Whether it is an iterator, which an iteration may have left further without a trace."""
    return hasattr(type(value), "__next__") and not isinstance(value, io.IOBase)


def _mark(value: Any) -> Any:
    """Returns a mark of a value that cannot be saved, or not yet. It stays equal while nothing shows a change."""
    if _package(type(value)) in _WITHOUT_STATE:
        return None
    # torch counts its changes in place in _version. A change through NumPy's view of the memory leaves it as it is, so
    # some elements are compared too.
    if type(value) in (torch.Tensor, nn.Parameter) and value.layout is torch.strided:
        flat = value.detach().reshape(-1)
        return (_Same(value), value._version, str(flat[:: max(1, flat.numel() // _COMPARED)].tolist()))
    if type(value).__name__ == "ndarray" and value.ndim:  # one of objects too: other addresses are other bytes
        return (_Same(value), value.flat[:: max(1, value.size // _COMPARED)].tobytes())
    if isinstance(value, dict):  # one that grows is a cache
        return _Same(value)
    if is_container(value) or _is_sequence(value):
        items = list(value)
        return (len(items), *map(_Same, items[:: max(1, len(items) // _COMPARED)]))
    return _Same(value)


class _Same:
    """Equal to another one of the same object, or of an equal number or text."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same):
            return False
        one, two = self._value, other._value
        return one is two or (type(one) is type(two) and type(one) in (bool, int, float, str) and bool(one == two))

    __hash__ = None  # type: ignore[assignment]


def _code_of(value: _Value) -> Any:
    if value.code is None and is_array(value.value):
        try:
            return encoded(value.value)
        except NotPlainError:
            return None
    return value.code


def _set(owner: Any, kind: Kind, key: Any, code: Any, *, in_place: bool) -> None:
    if kind == "state":
        owner.load_state_dict(decoded(code))
        return
    parts = vars(owner).items() if isinstance(owner, type) else [part[1:] for part in _parts(owner) or ()]
    present = dict(parts).get(key)
    value = restored(code, present, in_place=in_place)
    if value is present:
        return
    if kind == "item":
        owner[key] = value
    elif kind == "variable":
        # No statement sets a variable of another function; the cell that holds it can be set.
        owner.__closure__[owner.__code__.co_freevars.index(key)].cell_contents = value
    elif isinstance(owner, type):
        setattr(owner, key, value)
    else:
        set_attribute(owner, key, value)
