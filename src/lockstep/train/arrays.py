"""Arrays as data: what fit, evaluate and predict make of ``x`` and ``y`` that hold all rows.

    x, y, sample_weight: tensors, NumPy arrays or objects of pandas, also in dicts and tuples
        -> Arrays: tensors, cut for validation, weighted by class
        -> a DataLoader of them -> DistributedDataset: the way of every other data set

So the order of rows, its exactness on several workers and the position in a checkpoint are those of
``DataLoader(TensorDataset(x, y), batch_size, shuffle=True)``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lockstep._torch_compat import tree_map
from lockstep.checks import check_kind, shown
from lockstep.data.dataset import DistributedDataset
from lockstep.data.prefetch import DEFAULT_DEPTH
from lockstep.data.resumable_iteration import DistributedIterable
from lockstep.data.sharding import as_tensor
from lockstep.data.structure import map_leaves, named_leaves
from lockstep.errors import ConfigError, DataError
from lockstep.strategies.base import Strategy

Data = Iterable[Any] | DistributedIterable
DEFAULT_BATCH_SIZE = 32
"""Rows of a global batch, as in Keras."""


@dataclass(frozen=True, kw_only=True)
class ArrayOptions:
    """The arguments of fit, evaluate and predict that only arrays have; ``Model.fit`` describes them."""

    batch_size: int | None = None
    shuffle: bool | None = None
    validation_split: float = 0.0
    validation_batch_size: int | None = None
    class_weight: Mapping[int, float] | None = None
    sample_weight: Any = None

    def __post_init__(self) -> None:
        for name in ("batch_size", "validation_batch_size"):
            size = getattr(self, name)
            if size is not None and (type(size) is not int or not 1 <= size <= sys.maxsize):
                raise ConfigError(f"{name}={shown(size)}; give the number of rows of a global batch")
        split = self.validation_split
        if self.shuffle not in (None, True, False):
            raise ConfigError(f"shuffle={self.shuffle!r}; give True or False")
        if isinstance(split, bool) or not isinstance(split, (int, float)) or not (split == 0 or 0 < split < 1):
            raise ConfigError(
                f"validation_split={shown(split)}; give the part of the rows, between 0 and 1, such as 0.1"
            )

    def refuse_beside_batches(self, x: Any, y: Any) -> None:
        """Raises a ConfigError if something was given that says how to read arrays: ``x`` gives batches."""
        values = {"y": y, **vars(self), "validation_split": self.validation_split or None}
        names = [name for name, value in values.items() if value is not None and name != "validation_batch_size"]
        if names:
            raise ConfigError(
                f"{' and '.join(names)} came with a {type(x).__name__} as x, which gives whole batches, such as (x, y) "
                "or (x, y, sample_weight), and decides their size and order; leave it out, or give x and y as tensors "
                "or NumPy arrays. Batches to validate with are validation_data=..."
            )


class Arrays(Dataset[Any]):
    """Rows in memory: ``(x,)``, ``(x, y)`` or ``(x, y, sample_weight)`` of tensors with equally many rows."""

    def __init__(self, columns: tuple[Any, ...]) -> None:
        self.columns = columns
        self.rows: int = next(leaf.shape[0] for _, leaf in named_leaves(columns))

    @classmethod
    def of(cls, x: Any, y: Any = None, sample_weight: Any = None, *, floats: torch.dtype) -> Arrays:
        """Tensors of the given arrays, which share their memory where they can.

        NumPy's float64 becomes ``floats``. Raises a DataError that names what has no rows, or another number of them.
        """
        arrays = [("x", x), ("y", y), ("sample_weight", sample_weight)]
        columns = {name: _as_tensors(name, value, floats) for name, value in arrays if value is not None}
        if not check_equal_rows(**columns):
            raise DataError(f"x of type {type(x).__name__} has no rows; give at least one")
        if sample_weight is not None and y is None:
            raise DataError("sample_weight came without y; give y, the targets")
        return cls(tuple(columns.values()))

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> Any:
        return self.__getitems__([row])

    def __getitems__(self, rows: list[int]) -> Any:
        # One index for all columns and a gather for each, in place of a tensor for each row and a collation.
        index = torch.tensor(rows)
        return map_leaves(lambda _, leaf: leaf.index_select(0, index.to(leaf.device)), self.columns)

    def split(self, fraction: float) -> tuple[Arrays, Arrays]:
        """The first rows, and the last ones: this fraction of all. Raises a ConfigError if one of them has no row."""
        first = math.floor(self.rows * (1 - fraction))
        if not 0 < first < self.rows:
            raise ConfigError(
                f"validation_split={fraction} of {self.rows} rows leaves {first} to train with and "
                f"{self.rows - first} to validate with; give a fraction that leaves at least one of each"
            )
        begin = map_leaves(lambda _, leaf: leaf[:first], self.columns)
        end = map_leaves(lambda _, leaf: leaf[first:], self.columns)
        return Arrays(begin), Arrays(end)

    def weighted(self, class_weight: Mapping[int, float]) -> Arrays:
        """The same with the sample weights multiplied by the weight of each row's class, 1 for a class without one."""
        classes = _classes(self.columns[1])
        check_kind("class_weight", class_weight, Mapping, "a dict of class number to weight")
        factors: list[tuple[Any, Any]] = list(class_weight.items())
        weights = torch.ones(self.rows, device=classes.device)
        for key, weight in factors:
            if isinstance(key, bool) or not isinstance(key, Integral) or not isinstance(weight, Real):
                raise ConfigError(f"class_weight has {key!r}: {weight!r}; give a dict of class number to weight")
            weights[classes == int(key)] = float(weight)
        if len(self.columns) > 2:
            sample_weight = self.columns[2]
            weights = sample_weight * weights.to(sample_weight.device).reshape(-1, *[1] * (sample_weight.dim() - 1))
        return Arrays((*self.columns[:2], weights))

    def distributed(self, strategy: Strategy, batch_size: int | None, *, shuffle: bool) -> DistributedDataset:
        """Global batches of ``batch_size`` rows, the last one with those left. Every worker must call it."""
        # Without shuffling, nothing is drawn from the caller's generator: validating leaves the training order alone.
        generator = None if shuffle else torch.Generator()
        size = batch_size or DEFAULT_BATCH_SIZE
        # The rows that the loader asks for come as one batch, so that nothing is left to collate.
        loader = DataLoader(self, size, shuffle=shuffle, generator=generator, collate_fn=lambda batch: batch)
        return DistributedDataset(
            loader, strategy.devices, workers=strategy.workers, prefetch=DEFAULT_DEPTH, lists="columns", items=True
        )

    def one_batch(self, strategy: Strategy) -> DistributedDataset:
        """All rows as one global batch. Every worker must call it."""
        return DistributedDataset(
            [self.columns], strategy.devices, workers=strategy.workers, prefetch=0, lists="columns", items=True
        )


def is_arrays(x: Any, *, with_y: bool) -> bool:
    """Whether ``x`` holds all rows, instead of giving batches.

    A tensor, an array and a dict do. A list or tuple of arrays could be several inputs, or give batches: ``with_y``
    says that targets or a batch size came with it, so that it is several inputs.
    """
    if _is_array(x) or (isinstance(x, Mapping) and not isinstance(x, DistributedIterable)):
        return True
    return with_y and isinstance(x, (tuple, list)) and bool(x) and all(map(_is_array, x))


def check_equal_rows(**columns: Any) -> int:
    """The number of rows of arrays, given by their names; 0 without arrays. Raises a DataError if it differs."""
    leaves = [leaf for name, column in columns.items() for leaf in named_leaves(column, name=name)]
    lengths = {name: leaf.shape[0] for name, leaf in leaves if _is_array(leaf) and leaf.shape}
    if len(set(lengths.values())) > 1:
        sizes = ", ".join(f"{name} has {rows}" for name, rows in lengths.items())
        raise DataError(f"the arrays have different numbers of rows: {sizes}; give one row of each per example")
    return max(lengths.values(), default=0)


def training_data(
    strategy: Strategy, module: nn.Module, x: Any, y: Any, validation_data: Any, options: ArrayOptions
) -> tuple[Data, Data | None]:
    """What fit trains and validates with. Every worker must call it."""
    if options.validation_split and validation_data is not None:
        raise ConfigError("both validation_split and validation_data were given; give one of them")
    rows = _labelled_rows("fit", module, x, y, options)
    held_out: Arrays | None = None
    if rows is not None and options.validation_split:
        rows, held_out = rows.split(options.validation_split)
    else:
        held_out = _validation_rows(module, validation_data, beside_arrays=rows is not None)
    validation_size = options.validation_batch_size or options.batch_size
    if held_out is not None:
        validation_data = held_out.distributed(strategy, validation_size, shuffle=False)
    elif options.validation_batch_size is not None:
        what = "no validation data" if validation_data is None else "validation data that gives whole batches"
        raise ConfigError(
            f"validation_batch_size came with {what}; give validation_data=(x, y) of arrays, or leave it out"
        )
    if rows is None:
        return x, validation_data
    if options.class_weight is not None:
        rows = rows.weighted(options.class_weight)
    return rows.distributed(strategy, options.batch_size, shuffle=options.shuffle is not False), validation_data


def evaluation_data(strategy: Strategy, module: nn.Module, x: Any, y: Any, options: ArrayOptions) -> Data:
    """What evaluate reads. Every worker must call it."""
    rows = _labelled_rows("evaluate", module, x, y, options)
    return x if rows is None else rows.distributed(strategy, options.batch_size, shuffle=False)


def prediction_data(strategy: Strategy, module: nn.Module, x: Any, options: ArrayOptions) -> Data:
    """What predict reads. Every worker must call it."""
    if not is_arrays(x, with_y=isinstance(x, tuple) and options.batch_size is not None):
        options.refuse_beside_batches(x, None)
        return x  # type: ignore[no-any-return]  # checked by DistributedDataset
    return Arrays.of(x, floats=floats_of(module)).distributed(strategy, options.batch_size, shuffle=False)


def _labelled_rows(caller: str, module: nn.Module, x: Any, y: Any, options: ArrayOptions) -> Arrays | None:
    """The rows of ``x`` and ``y``; None if ``x`` gives batches."""
    if not is_arrays(x, with_y=is_arrays(y, with_y=True)):
        options.refuse_beside_batches(x, y)
        return None
    if y is None:
        raise DataError(f"{caller} got a {type(x).__name__} as x and no y; give y, the targets, or batches (x, y)")
    return Arrays.of(x, y, options.sample_weight, floats=floats_of(module))


def _validation_rows(module: nn.Module, data: Any, *, beside_arrays: bool) -> Arrays | None:
    """The rows of a tuple (x, y) or (x, y, sample_weight) of arrays; None if ``data`` gives batches.

    Beside arrays a tuple may hold several inputs or targets, as in ((x1, x2), (y1, y2)). Beside batches this is two
    batches, and so is a list.
    """
    if is_arrays(data, with_y=False):
        raise ConfigError(
            f"validation_data is a {type(data).__name__}; give a tuple (x, y) of arrays, or an iterable of batches"
        )
    if isinstance(data, list) and all(isinstance(batch, Mapping) and "labels" in batch for batch in data):
        return None  # batches whose loss the module computes
    nested = beside_arrays and isinstance(data, tuple)
    if not isinstance(data, (tuple, list)) or not any(is_arrays(part, with_y=nested) for part in data):
        return None
    if len(data) not in (2, 3):
        raise ConfigError(
            f"validation_data is a {type(data).__name__} of {len(data)}; give (x, y) or (x, y, sample_weight) of "
            "arrays, or a list of batches"
        )
    return Arrays.of(*data, floats=floats_of(module))


def floats_of(module: nn.Module) -> torch.dtype:
    """The dtype that NumPy's float64 becomes: float64 for a module that computes with it, else torch's default."""
    if any(parameter.dtype is torch.float64 for parameter in module.parameters()):
        return torch.float64
    return torch.get_default_dtype()


def on_device(arguments: Any, device: torch.device, floats: torch.dtype) -> Any:
    """Arguments of a module with arrays as tensors, and all tensors on the device."""

    def moved(leaf: Any) -> Any:
        tensor = _as_tensors("an argument", leaf, floats) if _is_array(leaf) and not isinstance(leaf, Tensor) else leaf
        return tensor.to(device) if isinstance(tensor, Tensor) else tensor

    return tree_map(moved, arguments)


def _is_array(value: Any) -> bool:
    """Whether it is a tensor, a NumPy array, or a DataFrame or Series of pandas, which are read as arrays."""
    # There is no such object where its library has not been imported, and this package needs neither.
    numpy, pandas = sys.modules.get("numpy"), sys.modules.get("pandas")
    return (
        isinstance(value, Tensor)
        or (numpy is not None and isinstance(value, numpy.ndarray))
        or (pandas is not None and isinstance(value, (pandas.DataFrame, pandas.Series)))
    )


def _as_tensors(name: str, value: Any, floats: torch.dtype) -> Any:
    def converted(path: str, leaf: Any) -> Tensor:
        if not _is_array(leaf):
            raise DataError(f"{path} is a {type(leaf).__name__}; give tensors or NumPy arrays, also in dicts or tuples")
        tensor: Tensor = as_tensor(path, _numpy_of(path, leaf))
        if not tensor.dim():
            raise DataError(f"{path} has no dimension; its first one is the rows")
        return tensor if isinstance(leaf, Tensor) or tensor.dtype is not torch.float64 else tensor.to(floats)

    return map_leaves(converted, value, name=name)


def _numpy_of(name: str, table: Any) -> Any:
    """The numbers of a DataFrame or Series of pandas; a NumPy array as it is."""
    pandas = sys.modules.get("pandas")
    if pandas is None or not isinstance(table, (pandas.DataFrame, pandas.Series)):
        return table
    columns = table.to_frame() if isinstance(table, pandas.Series) else table
    is_number = pandas.api.types.is_numeric_dtype
    texts = [str(column) for column, dtype in columns.dtypes.items() if not is_number(dtype)]
    if texts:
        raise DataError(f"{name} has columns that are no numbers: {', '.join(texts)}; encode them, or leave them out")
    array = table.to_numpy()
    return array if array.dtype != object else table.to_numpy(dtype="float64")  # columns of numbers and of booleans


def _classes(y: Any) -> Tensor:
    """The class of each row: a number, or the place of the 1 in a one-hot row."""
    if not isinstance(y, Tensor):
        raise ConfigError(f"class_weight came with y as a {type(y).__name__}; give sample_weight instead")
    labels = y.detach()
    if labels.numel() == labels.shape[0]:
        return labels.reshape(-1)
    # Waits for the device, once before the training.
    one_hot = labels.dim() == 2 and bool(((labels == 0) | (labels == 1)).all() and (labels.sum(1) == 1).all())
    if not one_hot:
        raise ConfigError(
            f"class_weight came with y of shape {tuple(y.shape)}; give one class number per row, or one-hot rows"
        )
    return labels.argmax(1)
