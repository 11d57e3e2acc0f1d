"""What is known of a source: its length, whether it may be read ahead, and its persistent processes."""

from __future__ import annotations

import sys
from collections.abc import Sized
from typing import Any, TypeGuard

import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    default_convert,
)

# Samplers that draw at their first index, if at all, and not between batches.
_DRAW_AT_FIRST = (SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)


def batches_in(dataset: object) -> int | None:
    """Returns the length of a source, or None if it does not say."""
    try:
        return len(dataset) if isinstance(dataset, Sized) else None
    except TypeError:  # a DataLoader over an IterableDataset has __len__, which raises
        return None


def loads_by_index(dataset: Any) -> TypeGuard[DataLoader[Any]]:
    """Whether this is a DataLoader that makes batches of a map-style dataset in torch's own way."""
    return (
        isinstance(dataset, DataLoader)
        and not isinstance(dataset.dataset, IterableDataset)
        and dataset.batch_sampler is not None
        # A class with an iteration of its own may give other batches than its sampler says.
        and type(dataset).__iter__ is DataLoader.__iter__
        and type(dataset)._get_iterator is DataLoader._get_iterator
    )


def may_read_ahead(dataset: Any) -> bool:
    """Whether reading a source ahead changes nothing: it draws no numbers and looks at nothing that the loop changes.

    This is known of lists and of datasets of torch and Hugging Face in memory, of a DataLoader with torch's samplers
    over those, or with processes, which have copies of the dataset and of the generators, and of what says so itself by
    a class attribute ``may_be_read_ahead``, as batches of the recipes do.
    """
    if not isinstance(dataset, DataLoader):
        return getattr(type(dataset), "may_be_read_ahead", False) is True or _draws_nothing(dataset)
    batches, rows = dataset.batch_sampler, dataset.sampler
    if type(dataset).__iter__ is not DataLoader.__iter__ or type(batches) not in (BatchSampler, type(None)):
        return False
    # With replacement RandomSampler draws 32 indices at a time, between the batches (torch 2.13). That matters where
    # the generator is the program's; its own generator is seeded once, at the first index.
    is_random = type(rows) is RandomSampler and not (rows.replacement and rows.generator)
    if not (isinstance(dataset.dataset, IterableDataset) or is_random or type(rows) in _DRAW_AT_FIRST):
        return False
    collates = dataset.collate_fn in (default_collate, default_convert)
    return has_processes(dataset) or (collates and _draws_nothing(dataset.dataset))


def has_processes(dataset: Any) -> TypeGuard[DataLoader[Any]]:
    """Whether this is a DataLoader whose rows are loaded by processes of its own."""
    return isinstance(dataset, DataLoader) and dataset.num_workers > 0


def _draws_nothing(dataset: Any) -> bool:
    if isinstance(dataset, Subset):
        return _draws_nothing(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(_draws_nothing(part) for part in dataset.datasets)
    if type(dataset) in (TensorDataset, range, list, tuple):
        return True
    datasets = sys.modules.get("datasets")
    return datasets is not None and type(dataset) is datasets.Dataset and dataset.format["type"] != "custom"


def persists(dataset: Any) -> TypeGuard[DataLoader[Any]]:
    """Whether this is a DataLoader whose processes live on from one iteration to the next."""
    return has_processes(dataset) and dataset.persistent_workers


def started(dataset: Any) -> bool:
    """Whether persistent processes run: then an iteration draws no seed for them."""
    return persists(dataset) and dataset._iterator is not None


def drawn_seed(generator: torch.Generator | None) -> int:
    """Returns a seed for what loading draws. Every iteration over a DataLoader draws one, be it used or not."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
