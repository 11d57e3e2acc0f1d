"""Values that hold examples of different sizes in one object, and say so by their type. Each example is a row.

    PackedSequence            sequences of torch.nn.utils.rnn
    nested tensor             of torch.nested, in both of its layouts
    Batch                     graphs of torch_geometric, which is never imported here
    RaggedLeaf                what ``divide`` makes of tensors that a program says how to divide

A part has some of the examples, in their order, as the same library would have made it of these alone.
"""

from __future__ import annotations

import copy
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from lockstep.errors import DataError

_PARTS = "_lockstep_parts"
"""The attribute of a jagged tensor's offsets with those of its parts: tensors that share offsets go on sharing them."""


class RaggedLeaf(ABC):
    """A leaf of a batch that holds examples of different sizes, until the batch has been divided."""

    @property
    @abstractmethod
    def rows(self) -> int:
        """The number of examples."""

    @abstractmethod
    def part(self, start: int, size: int) -> RaggedLeaf:
        """``size`` examples, from example ``start`` on."""

    @property
    @abstractmethod
    def value(self) -> Any:
        """What the step gets."""


def rows_of_ragged(leaf: Any) -> int | None:
    """The number of examples of a ragged value; None for anything else. A nested tensor is left to the caller."""
    kind = type(leaf)
    if issubclass(kind, RaggedLeaf):
        return leaf.rows  # type: ignore[no-any-return]
    if issubclass(kind, PackedSequence):
        return int(leaf.batch_sizes[0]) if len(leaf.batch_sizes) else 0
    return int(leaf.num_graphs) if is_graph_batch(leaf) else None


def part_of_ragged(leaf: Any, start: int, size: int) -> Any:
    """``size`` examples of a ragged value, from example ``start`` on.

    Raises DataError for one that cannot be divided.
    """
    if isinstance(leaf, RaggedLeaf):
        return leaf.part(start, size)
    if isinstance(leaf, PackedSequence):
        return _packed_part(leaf, start, size)
    return _graph_part(leaf, start, size) if is_graph_batch(leaf) else nested_part(leaf, start, size)


def ragged_to(leaf: Any, device: torch.device) -> Any:
    """A packed sequence or a batch of graphs on a device; the leaf itself is not changed."""
    # The batch of torch_geometric moves itself in place.
    return (copy.copy(leaf) if is_graph_batch(leaf) else leaf).to(device)


def is_foreign(leaf: Any) -> bool:
    """Whether a leaf is a packed sequence or a batch of graphs: an object with tensors."""
    return isinstance(leaf, PackedSequence) or is_graph_batch(leaf)


def tensors_of(leaf: Any) -> list[Tensor]:
    """The tensors in a packed sequence, a nested tensor, a graph or a batch of graphs; none for anything else."""
    if isinstance(leaf, PackedSequence):
        return [leaf.data, leaf.batch_sizes]
    if isinstance(leaf, Tensor) and leaf.is_nested:
        return [part.detach() for part in leaf.unbind()]
    return [tensor for store in leaf.stores for tensor in _tensors(dict(store))] if is_graph(leaf) else []


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(part)


def is_graph_batch(leaf: Any) -> bool:
    """Whether a leaf is a Batch of torch_geometric."""
    module = sys.modules.get("torch_geometric.data.batch")  # there is no batch of it without
    return module is not None and issubclass(type(leaf), module.Batch)


def is_graph(leaf: Any) -> bool:
    """Whether a leaf is a Data or HeteroData of torch_geometric, or a Batch of them."""
    module = sys.modules.get("torch_geometric.data.data")
    return module is not None and issubclass(type(leaf), module.BaseData)


def _packed_part(packed: PackedSequence, start: int, size: int) -> PackedSequence:
    if not size:
        order = None if packed.sorted_indices is None else packed.sorted_indices[:0]
        return PackedSequence(packed.data[:0], packed.batch_sizes[:0], order, order)
    # In the order in which they were packed: some of a sorted list are sorted too.
    sequences = unpack_sequence(packed)[start : start + size]
    return pack_sequence(sequences, enforce_sorted=packed.sorted_indices is None)


def nested_part(nested: Any, start: int, size: int) -> Tensor:
    """``size`` tensors of a nested one, from tensor ``start`` on."""
    if nested.layout is not torch.jagged:
        parts = nested.unbind()[start : start + size]
        if not parts:  # 1 tensor without elements would be a row
            return torch.nested.nested_tensor([], dtype=nested.dtype, device=nested.device)
        return torch.nested.as_nested_tensor(list(parts), layout=torch.strided)
    if type(nested.shape[1]) is int or nested.lengths() is not None:
        raise DataError(
            f"a jagged tensor of shape {tuple(nested.shape)} is transposed, or has holes between its rows, and cannot "
            "be divided; give it with its rows one after another along dim 1, as torch.nested.nested_tensor makes it"
        )
    offsets = nested.offsets()
    parts_of_offsets: dict[tuple[int, int], Tensor] = getattr(offsets, _PARTS, {})
    if not parts_of_offsets:
        setattr(offsets, _PARTS, parts_of_offsets)
    if (start, size) not in parts_of_offsets:
        parts_of_offsets[start, size] = offsets[start : start + size + 1] - offsets[start]
    begin, end = int(offsets[start]), int(offsets[start + size])
    return torch.nested.nested_tensor_from_jagged(nested.values()[begin:end], parts_of_offsets[start, size])


def _graph_part(batch: Any, start: int, size: int) -> Any:
    slices = _slices_of(batch)
    _check_graphs(batch, slices)
    # The library's functions, which also undo and redo what it adds to indices of nodes.
    kind: Any = sys.modules["torch_geometric.data.batch"].Batch
    follows = [name for names in slices.values() for name in names if _is_followed(batch, name)]
    # Of no graphs the library makes no batch: it is made of one, whose nodes are then left out.
    graphs = [batch.get_example(number) for number in range(start, start + size)] or [batch.get_example(0)]
    part = kind.from_data_list(graphs, follow_batch=list(dict.fromkeys(follows)))
    return part if size else _without_graphs(part)


def _slices_of(batch: Any) -> dict[Any, Mapping[str, Any]]:
    """By the key of each store of a batch, where each graph's part of each attribute begins."""
    slices = getattr(batch, "_slice_dict", None)
    if slices is None or getattr(batch, "_inc_dict", None) is None:
        raise DataError(
            "a Batch of torch_geometric was not made by Batch.from_data_list, so its graphs cannot be told apart; make "
            "it with torch_geometric.loader.DataLoader or Batch.from_data_list, and transform the graphs before that"
        )
    return {store._key: slices if store._key is None else slices.get(store._key, {}) for store in batch.stores}


def _is_followed(batch: Any, name: str) -> bool:
    return any(f"{name}_batch" in store and f"{name}_ptr" in store for store in batch.stores)


def _check_graphs(batch: Any, slices: Mapping[Any, Mapping[str, Any]]) -> None:
    """Refuses attributes that were set on a batch, or have become longer, after it was made of graphs."""
    for store in batch.stores:
        names = slices[store._key]
        derived = {"batch", "ptr", "num_nodes", *(f"{name}_{end}" for name in names for end in ("batch", "ptr"))}
        changed = [name for name in store if name not in names and name not in derived]
        changed += [name for name in names if name in store and not _has_length(batch, store, name, names[name])]
        if changed:
            raise DataError(
                f"{', '.join(map(repr, changed))} of a Batch of torch_geometric was set after the graphs were batched, "
                "so it is not known which part belongs to which graph; set it on each graph (a transform of the "
                "dataset), or compute it in the step"
            )


def _has_length(batch: Any, store: Any, name: str, starts: Any) -> bool:
    value = store[name]
    if not isinstance(value, Tensor) or not isinstance(starts, Tensor) or starts.ndim != 1:
        return True
    return bool(value.size(batch.__cat_dim__(name, value, store) or 0) == int(starts[-1]))


def _without_graphs(batch: Any) -> Any:
    """A batch of no graphs, whose attributes have the shapes of this one's, and no nodes and edges."""

    def none_of(name: str, value: Any, store: Any) -> Any:
        if isinstance(value, Tensor):
            # A batch of no graphs has one boundary: 0.
            if name == "ptr" or name.endswith("_ptr"):
                return value[:1]
            dim = batch.__cat_dim__(name, value, store)
            return value.narrow(dim if isinstance(dim, int) else 0, 0, 0)
        if isinstance(value, Mapping):
            return {key: none_of(key, part, store) for key, part in value.items()}
        return [] if isinstance(value, (list, tuple)) else value

    for store in batch.stores:
        for name, value in list(store.items()):
            store[name] = 0 if name == "num_nodes" else none_of(name, value, store)
        if "_num_nodes" in vars(store):
            store._num_nodes = []
    batch._num_graphs = 0
    return batch
