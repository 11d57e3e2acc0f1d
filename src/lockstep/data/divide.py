"""Ways to say once how a batch is divided whose tensors have other than one row an example: ``ls.divide``.

    images [3], batch_idx 0 0 1 2 2 2, boxes [6, 4]      by_index("batch_idx", of=["boxes"])
    cu_seqlens 0 4 6 9, tokens [9]                       by_boundaries("cu_seqlens", of=["tokens"])
    lengths 4 2 3, tokens [9]                            by_lengths("lengths", of=["tokens"])
    chosen 0, rejected 0, chosen 1, rejected 1, ...      in_groups(2)
    chosen 0, chosen 1, ..., rejected 0, rejected 1      in_blocks(2)
    anything else                                        by_examples(split, join)

``strategy.distribute_dataset(batches, divide=...)`` takes one. Each replica then gets the batch of its examples: flat
tensors with the entries of these alone, an index that counts from 0, boundaries that begin with 0. Everything else in
the batch has one row an example and is divided as usual. Graphs of torch_geometric, packed sequences and nested tensors
need none of this: their types say it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from lockstep.checks import check_number
from lockstep.data.ragged import RaggedLeaf
from lockstep.data.structure import children, is_plain, rebuilt
from lockstep.errors import ConfigError, DataError

Name = str | int | tuple[str | int, ...]
"""Where a tensor is in a batch: a key of a mapping, a place in a tuple, or several of these, from the outside in."""


def by_index(index: Name, *, of: Sequence[Name], column: int | None = None) -> Division:
    """Flat tensors, and an index that says to which example each entry belongs, as detection batches have them.

    Each replica's index counts its examples from 0. The order of entries stays. The number of examples is that of the
    rows of the rest of the batch, such as images.

    Args:
        index: the name of an integer tensor [entries] of numbers from 0 to examples - 1, such as "batch_idx".
        of: the names of the flat tensors [entries, ...], such as ["cls", "bboxes"].
        column: the column of ``index`` that is the index, where it is one column of [entries, columns].

    Example:
        >>> import torch, lockstep as ls
        >>> strategy = ls.MirroredStrategy(["cpu:0"], replicas=2)
        >>> batch = {"image": torch.zeros(3, 1), "at": torch.tensor([0, 2, 2]), "box": torch.tensor([5, 6, 7])}
        >>> data = strategy.distribute_dataset([batch], divide=ls.divide.by_index("at", of=["box"]))
        >>> [shard.tolist() for shard in next(iter(data))["at"]]
        [[0], [0, 0]]
        >>> strategy.close()
    """
    check_number("column", column, whole=True)
    return _ByIndex(index=_path(index), of=_paths("of", of), column=column)


def by_boundaries(*boundaries: Name, of: Sequence[Name], dim: int = 0) -> Division:
    """Flat tensors, and where in them each example begins, as varlen attention takes them (``cu_seqlens``).

    Args:
        *boundaries: the names of integer tensors [examples + 1] from 0 to the number of entries; if there are several,
            such as "cu_seq_lens_q" and "cu_seq_lens_k", they are equal.
        of: the names of the flat tensors, such as ["input_ids", "labels", "position_ids"].
        dim: the dimension in which these are flat: 0 of [entries, ...], 1 of [1, entries].
    """
    if not boundaries:
        raise ConfigError('by_boundaries got no name; give that of the boundaries, such as "cu_seqlens"')
    check_number("dim", dim, least=0, whole=True, optional=False)
    return _ByBoundaries(boundaries=_paths("boundaries", boundaries), of=_paths("of", of), dim=dim)


def by_lengths(lengths: Name, *, of: Sequence[Name], dim: int = 0) -> Division:
    """Flat tensors, and how many of their entries each example has.

    Args:
        lengths: the name of an integer tensor [examples], whose sum is the number of entries.
        of: the names of the flat tensors.
        dim: the dimension in which these are flat: 0 of [entries, ...], 1 of [1, entries].
    """
    check_number("dim", dim, least=0, whole=True, optional=False)
    return _ByLengths(lengths=_path(lengths), of=_paths("of", of), dim=dim)


def in_groups(size: int, *, of: Sequence[Name] | None = None) -> Division:
    """``size`` neighbouring rows are one example: pairs, triplets, the answers to one question.

    Args:
        size: the number of rows of an example.
        of: the names of the tensors of which this is true; None for all that have rows.
    """
    check_number("size", size, least=1, whole=True, optional=False)
    return _InOrder(times=size, of=None if of is None else _paths("of", of), blocks=False)


def in_blocks(number: int, *, of: Sequence[Name] | None = None) -> Division:
    """Row i of each of ``number`` blocks is one example: all chosen answers, and then all rejected ones.

    Args:
        number: the number of blocks, which are equally long.
        of: the names of the tensors of which this is true; None for all that have rows.
    """
    check_number("number", number, least=1, whole=True, optional=False)
    return _InOrder(times=number, of=None if of is None else _paths("of", of), blocks=True)


def by_examples(split: Callable[[Any], Sequence[Any]], join: Callable[[list[Any]], Any]) -> Division:
    """Batches of a type of your own: one function makes examples of a batch, and the other a batch of examples.

    Args:
        split: returns the examples of a batch, in order.
        join: returns the batch of some examples, as the step takes it; also that of an empty list, if there may be
            fewer examples than replicas.
    """
    for name, function in (("split", split), ("join", join)):
        if not callable(function):
            raise ConfigError(f"{name} is a {type(function).__name__}, expected a function")
    return _ByExamples(split=split, join=join)


class Division(ABC):
    """How the batches of one source are divided by example. The functions of this module make one."""

    @abstractmethod
    def mark(self, batch: Any, count_rows: Callable[[Any], int]) -> Any:
        """Returns the batch with a ``RaggedLeaf`` in place of each tensor that has other than one row an example.

        ``count_rows`` returns the number of rows of a batch, or raises a DataError.
        """


class _Members(ABC):
    """Which entries of flat tensors belong to which example of a batch."""

    examples: int

    @abstractmethod
    def take(self, tensor: Tensor, dim: int, start: int, size: int) -> Tensor:
        """The entries of ``size`` examples, from example ``start`` on."""

    @abstractmethod
    def part(self, start: int, size: int) -> _Members:
        """The members of what ``take`` returns."""


@final
@dataclass(frozen=True)
class _Bounds(_Members):
    """Entries in the order of the examples: example i has those from ``starts[i]`` to ``starts[i + 1]``."""

    starts: tuple[int, ...]

    @property
    def examples(self) -> int:  # type: ignore[override]
        return len(self.starts) - 1

    def take(self, tensor: Tensor, dim: int, start: int, size: int) -> Tensor:
        return tensor.narrow(dim, self.starts[start], self.starts[start + size] - self.starts[start])

    def part(self, start: int, size: int) -> _Members:
        first = self.starts[start]
        return _Bounds(tuple(begin - first for begin in self.starts[start : start + size + 1]))


@final
@dataclass(frozen=True)
class _Index(_Members):
    """Entries in any order, with the number of the example of each."""

    numbers: Tensor
    examples: int

    def take(self, tensor: Tensor, dim: int, start: int, size: int) -> Tensor:
        return tensor.index_select(dim, self._places(start, size).to(tensor.device))

    def part(self, start: int, size: int) -> _Members:
        return _Index(self.numbers[self._places(start, size)] - start, size)

    def _places(self, start: int, size: int) -> Tensor:
        return ((self.numbers >= start) & (self.numbers < start + size)).nonzero()[:, 0]


@final
@dataclass(frozen=True)
class _Blocks(_Members):
    """Blocks of one row an example."""

    number: int
    examples: int

    def take(self, tensor: Tensor, dim: int, start: int, size: int) -> Tensor:
        return torch.cat([tensor.narrow(dim, block * self.examples + start, size) for block in range(self.number)], dim)

    def part(self, start: int, size: int) -> _Members:
        return _Blocks(self.number, size)


@final
@dataclass(frozen=True, eq=False)
class _Flat(RaggedLeaf):
    """A flat tensor, whose entries belong to examples."""

    members: _Members
    tensor: Tensor
    dim: int

    @property
    def rows(self) -> int:
        return self.members.examples

    @property
    def value(self) -> Tensor:
        # As ``take_rows``: a step may change its shard in place, which must not be a change of the others'.
        return self.tensor if self.tensor.requires_grad else self.tensor.data

    def part(self, start: int, size: int) -> RaggedLeaf:
        return _Flat(self.members.part(start, size), self.members.take(self.tensor, self.dim, start, size), self.dim)


@final
@dataclass(frozen=True, eq=False)
class _FlatIndex(RaggedLeaf):
    """The index of flat tensors, or a tensor with a column that is one."""

    members: _Members
    tensor: Tensor
    column: int | None

    @property
    def rows(self) -> int:
        return self.members.examples

    @property
    def value(self) -> Tensor:
        return self.tensor

    def part(self, start: int, size: int) -> RaggedLeaf:
        entries = self.members.take(self.tensor, 0, start, size)  # a copy
        if self.column is None:
            entries = entries - start
        else:
            entries[:, self.column] -= start
        return _FlatIndex(self.members.part(start, size), entries, self.column)


@final
@dataclass(frozen=True, eq=False)
class _Boundaries(RaggedLeaf):
    """The boundaries of examples in flat tensors."""

    tensor: Tensor

    @property
    def rows(self) -> int:
        return len(self.tensor) - 1

    @property
    def value(self) -> Tensor:
        return self.tensor

    def part(self, start: int, size: int) -> RaggedLeaf:
        return _Boundaries(self.tensor[start : start + size + 1] - self.tensor[start])


@final
@dataclass(frozen=True, eq=False)
class _Examples(RaggedLeaf):
    """A whole batch, as its examples."""

    examples: Sequence[Any]
    join: Callable[[list[Any]], Any]

    @property
    def rows(self) -> int:
        return len(self.examples)

    @property
    def value(self) -> Any:
        if self.examples:
            return self.join(list(self.examples))
        try:
            return self.join([])
        except Exception as error:
            raise DataError(
                f"a batch has fewer examples than replicas, and join([]) raises {type(error).__name__}: {error}; "
                "return a batch of no examples there, or give larger batches (drop_last=True)"
            ) from error

    def part(self, start: int, size: int) -> RaggedLeaf:
        return _Examples(self.examples[start : start + size], self.join)


@final
@dataclass(frozen=True, kw_only=True)
class _ByIndex(Division):
    index: tuple[str | int, ...]
    of: tuple[tuple[str | int, ...], ...]
    column: int | None

    def mark(self, batch: Any, count_rows: Callable[[Any], int]) -> Any:
        tensor = _tensor_at(batch, self.index)
        numbers = _column_of(tensor, self.column, _label(self.index))
        flat = {path: _tensor_at(batch, path) for path in self.of}
        rest = _replaced(batch, dict.fromkeys([self.index, *self.of]))
        try:
            examples = count_rows(rest)
        except DataError as error:
            raise DataError(
                f"{_label(self.index)} tells which example an entry is of, and not how many examples there are, which "
                f"is the number of rows of the rest of the batch: {error}"
            ) from error
        if numbers.numel() and not (int(numbers.min()) >= 0 and int(numbers.max()) < examples):
            raise DataError(
                f"{_label(self.index)} has numbers from {int(numbers.min())} to {int(numbers.max())}, but the batch "
                f"has {examples} examples; give numbers from 0 to {examples - 1}"
            )
        members = _Index(numbers, examples)
        _check_lengths(flat, 0, len(numbers), _label(self.index))
        leaves: dict[tuple[str | int, ...], RaggedLeaf] = {
            path: _Flat(members, value, 0) for path, value in flat.items()
        }
        return _replaced(batch, {**leaves, self.index: _FlatIndex(members, tensor, self.column)})


@final
@dataclass(frozen=True, kw_only=True)
class _ByBoundaries(Division):
    boundaries: tuple[tuple[str | int, ...], ...]
    of: tuple[tuple[str | int, ...], ...]
    dim: int

    def mark(self, batch: Any, count_rows: Callable[[Any], int]) -> Any:
        first, *further = (_tensor_at(batch, path) for path in self.boundaries)
        name = _label(self.boundaries[0])
        starts = _column_of(first, None, name).tolist()
        if not starts or starts[0] != 0 or starts != sorted(starts):
            raise DataError(
                f"{name} begins with {starts[:4]}, expected boundaries that begin with 0 and do not fall, one more "
                "than there are examples"
            )
        if any(not torch.equal(first, tensor) for tensor in further):
            raise DataError(f"{', '.join(map(_label, self.boundaries))} differ; give boundaries that are equal")
        marked = _marked_flat(batch, self.of, _Bounds(tuple(starts)), self.dim, name)
        return _replaced(marked, {path: _Boundaries(_tensor_at(batch, path)) for path in self.boundaries})


@final
@dataclass(frozen=True, kw_only=True)
class _ByLengths(Division):
    lengths: tuple[str | int, ...]
    of: tuple[tuple[str | int, ...], ...]
    dim: int

    def mark(self, batch: Any, count_rows: Callable[[Any], int]) -> Any:
        lengths = _column_of(_tensor_at(batch, self.lengths), None, _label(self.lengths))
        starts = [0, *lengths.cumsum(0).tolist()]
        return _marked_flat(batch, self.of, _Bounds(tuple(starts)), self.dim, f"the sum of {_label(self.lengths)}")


@final
@dataclass(frozen=True, kw_only=True)
class _InOrder(Division):
    times: int
    of: tuple[tuple[str | int, ...], ...] | None
    blocks: bool

    def mark(self, batch: Any, count_rows: Callable[[Any], int]) -> Any:
        paths = self.of if self.of is not None else tuple(_paths_of_rows(batch))
        if not paths:
            raise DataError("a batch has no tensor with rows to divide; expected tensors with the examples along dim 0")
        return _replaced(batch, {path: self._leaf(_tensor_at(batch, path), path) for path in paths})

    def _leaf(self, tensor: Tensor, path: tuple[str | int, ...]) -> RaggedLeaf:
        if not tensor.ndim or len(tensor) % self.times:
            what = f"{self.times} blocks" if self.blocks else f"groups of {self.times}"
            raise DataError(
                f"{_label(path)} has shape {tuple(tensor.shape)}, whose rows do not make {what}; name the tensors that "
                "do with of=[...]"
            )
        examples = len(tensor) // self.times
        bounds = tuple(range(0, len(tensor) + 1, self.times))
        return _Flat(_Blocks(self.times, examples) if self.blocks else _Bounds(bounds), tensor, 0)


@final
@dataclass(frozen=True, kw_only=True)
class _ByExamples(Division):
    split: Callable[[Any], Sequence[Any]]
    join: Callable[[list[Any]], Any]

    def mark(self, batch: Any, count_rows: Callable[[Any], int]) -> Any:
        return _Examples(list(self.split(batch)), self.join)


def _marked_flat(batch: Any, of: Sequence[tuple[str | int, ...]], members: _Bounds, dim: int, name: str) -> Any:
    flat = {path: _tensor_at(batch, path) for path in of}
    _check_lengths(flat, dim, members.starts[-1], name)
    return _replaced(batch, {path: _Flat(members, value, dim) for path, value in flat.items()})


def _check_lengths(flat: Mapping[tuple[str | int, ...], Tensor], dim: int, entries: int, name: str) -> None:
    for path, tensor in flat.items():
        if tensor.ndim <= dim or tensor.size(dim) != entries:
            raise DataError(
                f"{_label(path)} has shape {tuple(tensor.shape)}, but {name} is of {entries} entries, which are its "
                f"dim {dim}; give tensors of as many entries there, and name no other ones in of=[...]"
            )


def _column_of(tensor: Tensor, column: int | None, name: str) -> Tensor:
    """The whole numbers that say to which example an entry belongs, on the CPU."""
    fits = tensor.ndim == 1 if column is None else tensor.ndim == 2 and -tensor.size(1) <= column < tensor.size(1)
    if not fits:
        expected = "[entries]" if column is None else f"[entries, columns] with a column {column}"
        raise DataError(f"{name} has shape {tuple(tensor.shape)}, expected {expected}")
    # A column of a tensor of boxes is a float, as all of it is.
    return (tensor if column is None else tensor[:, column]).detach().cpu().long()


def _path(name: Name) -> tuple[str | int, ...]:
    path = name if isinstance(name, tuple) else (name,)
    if not path or not all(isinstance(key, (str, int)) for key in path):
        raise ConfigError(f"{name!r} names no tensor of a batch; give a key, a place in a tuple, or a tuple of these")
    return path


def _paths(what: str, names: Sequence[Name]) -> tuple[tuple[str | int, ...], ...]:
    if isinstance(names, str) or not names:
        raise ConfigError(f"{what}={names!r} was given, expected a list of names of tensors, such as {what}=['boxes']")
    return tuple(map(_path, names))


def _label(path: tuple[str | int, ...]) -> str:
    return "batch" + "".join(f"[{key!r}]" for key in path)


def _tensor_at(batch: Any, path: tuple[str | int, ...]) -> Tensor:
    node = batch
    for depth, key in enumerate(path):
        if children(node, "") is None:
            raise DataError(f"{_label(path[:depth])} is a {type(node).__name__}, in which there is no {_label(path)}")
        try:
            node = node[key]
        except (KeyError, IndexError, TypeError) as error:
            names = ", ".join(name for name, _ in children(node, _label(path[:depth])) or ())
            raise DataError(f"a batch has no {_label(path)}; it has {names}") from error
    try:
        tensor = torch.as_tensor(node)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{_label(path)} is a {type(node).__name__}, expected a tensor or an array") from error
    if not is_plain(tensor):
        raise DataError(f"{_label(path)} is a nested or sparse tensor, expected a dense one")
    return tensor


def _replaced(batch: Any, values: Mapping[tuple[str | int, ...], Any]) -> Any:
    """The batch with other values at these places."""

    def below(node: Any, path: tuple[str | int, ...]) -> Any:
        if path in values:
            return values[path]
        if not any(other[: len(path)] == path for other in values):
            return node
        return rebuilt(node, [below(child, (*path, key)) for key, child in _items(node)])

    return below(batch, ())


def _items(node: Any) -> Iterator[tuple[str | int, Any]]:
    parts = children(node, "") or ()
    keys = node.keys() if isinstance(node, Mapping) else range(len(parts))
    yield from zip(keys, (part for _, part in parts), strict=True)


def _paths_of_rows(node: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The places of all tensors with rows, and of arrays."""
    if children(node, "") is None:
        if getattr(node, "ndim", 0) and not isinstance(node, RaggedLeaf):
            yield path
        return
    for key, child in _items(node):
        yield from _paths_of_rows(child, (*path, key))
