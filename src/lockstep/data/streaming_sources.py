"""Sources that stream: the part that each worker reads, and the state that brings back what comes next.

    datasets.IterableDataset, torchdata's StatefulDataLoader, any iterable with state_dict and load_state_dict
    a DataLoader without processes over one of these: the dataset has the state

Loading a state goes on at the very sample. Of other sources the batches that were used are read again and left out.
What is private to `datasets` is used here alone: the parts that an IterableDataset is made of.
"""

from __future__ import annotations

import copy
import sys
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lockstep.collectives.communicator import Communicator
from lockstep.data.random_state import all_generators
from lockstep.errors import CheckpointError, DataError

# The states of these do not bring back what comes next (datasets 5.2): the rows in a shuffle buffer are lost, and
# sources that are interleaved until all have ended are read without end.
_SHUFFLED = ("BufferShuffledExamplesIterable", "InterleavedShardsExamplesIterable")
_INTERLEAVED, _EXACT_STOPPING = "stopping_strategy", "first_exhausted"


class StatefulSource:
    """A source that tells its state after each batch: all that is needed to read what comes after it.

    A state is a dict: ``own`` is what the source's ``state_dict`` returned, ``shards`` the number of its shards if it
    has any, ``generators`` the states of the generators that it holds.
    """

    def __init__(self, source: Any, stateful: Any) -> None:
        self._source, self._stateful = source, stateful
        self._loaded = False

    @classmethod
    def of(cls, source: Any) -> StatefulSource | None:
        """Returns None for a source without a state, or with one that does not bring back exactly what comes next."""
        stateful = _stateful_of(source)
        return None if isinstance(stateful, str) else cls(source, stateful)

    @property
    def owner(self) -> Any:
        """The object that tells its state: the source itself, or the dataset that it loads."""
        return self._stateful

    def load(self, state: Mapping[str, Any]) -> None:
        """Makes the iteration that begins next go on after ``state``.

        Raises CheckpointError if the source has another number of shards or other parts than the one it was saved of.
        """
        shards, now = state["shards"], _shards(self._stateful)
        if shards != now:
            raise CheckpointError(
                f"the saved position is of data with {_counted(shards)}, but it has {_counted(now)} now; give the data "
                "that it was saved with"
            )
        if (saved := _parts(state["own"])) != (parts := _parts(self._stateful.state_dict())):
            raise CheckpointError(
                f"the saved position is of a dataset made of {', '.join(saved)}, but it is made of {', '.join(parts)} "
                "now; give the data that it was saved with"
            )
        self._stateful.load_state_dict(state["own"])
        self._loaded = True

    def rewind(self) -> None:
        """Makes the iteration that begins next begin at the first row."""
        if self._loaded and (dataset := _stream_of(self._stateful)) is not None:
            dataset.load_state_dict({})  # it would begin every iteration of the same epoch at the state
        self._loaded = False

    def restore_generators(self, state: Mapping[str, Any]) -> None:
        """Sets the generators that the source holds to what they were after ``state``, once an iteration has begun."""
        for generator, value in zip(all_generators(self._source), state["generators"], strict=False):
            generator.set_state(value)

    def noting(self, batches: Iterator[Any], states: deque[dict[str, Any]]) -> Iterator[Any]:
        """The batches; the state after each is added to ``states`` when it is read."""
        for batch in batches:
            states.append(self._state())
            yield batch
            del batch  # while the next one is made

    def _state(self) -> dict[str, Any]:
        generators: list[Tensor] = [generator.get_state() for generator in all_generators(self._source)]
        return {"own": self._stateful.state_dict(), "shards": _shards(self._stateful), "generators": generators}


def why_without_state(source: Any) -> str:
    """Says why a source does not go on at the very sample, for one of which ``StatefulSource.of`` is None."""
    return str(_stateful_of(source))


def part_of_worker(source: Any, workers: Communicator) -> Any:
    """Returns the part of a stream that this worker reads: some of its shards. Every worker must call it.

    ``source`` is a datasets.IterableDataset, or a DataLoader over one. Raises DataError if it is something else, has
    fewer shards than there are workers, or is shuffled differently on each worker.
    """
    dataset = _stream_of(source)
    if dataset is None:
        raise DataError(
            f'shard="file" divides the shards of a datasets.IterableDataset, alone or in a DataLoader, and got a '
            f'{type(source).__name__}; give one, or this worker\'s own part with shard="off"'
        )
    if dataset.num_shards < workers.size:
        raise DataError(
            f'shard="file" divides {_counted(dataset.num_shards)} among {workers.size} workers; make at least as many '
            'shards (more files, or dataset.reshard()), or read all of it on every worker with shard="batch"'
        )
    if workers.is_single:
        return source
    order = workers.all_gather_numbers("the shards of the data", (dataset.num_shards, _digest_of_shuffling(dataset)))
    for name, (shards, digest) in zip(workers.names, order, strict=True):
        if shards != order[0][0]:
            raise DataError(
                f"the workers' data differ: {name} has {_counted(int(shards))}, {workers.names[0]} has "
                f"{_counted(int(order[0][0]))}; give every worker the same dataset"
            )
        if digest != order[0][1]:
            raise DataError(
                f"the workers' data differ: {name} and {workers.names[0]} shuffle differently, so that some rows would "
                "be read twice and others never; give dataset.shuffle a seed"
            )
    from datasets.distributed import split_dataset_by_node

    part = split_dataset_by_node(dataset, rank=workers.index, world_size=workers.size, strategy="shards")
    if source is dataset:
        return part
    # A copy, as the program may go on to read its own loader as a whole.
    loader = copy.copy(source)
    vars(loader)["dataset"] = part  # torch refuses to set it, as a sampler may belong to it; a stream has none
    return loader


def _has_state(source: Any) -> bool:
    return all(callable(getattr(source, name, None)) for name in ("state_dict", "load_state_dict"))


def _stream_of(source: Any) -> Any:
    """The datasets.IterableDataset that a source is, or that a DataLoader loads; None if there is none."""
    datasets = sys.modules.get("datasets")
    dataset = source.dataset if isinstance(source, DataLoader) else source
    return dataset if datasets is not None and isinstance(dataset, datasets.IterableDataset) else None


def _shards(source: Any) -> int | None:
    dataset = _stream_of(source)
    return None if dataset is None else int(dataset.num_shards)


def _counted(shards: int | None) -> str:
    return "no shards" if shards is None else f"{shards} shard{'s' * (shards != 1)}"


def _stateful_of(source: Any) -> Any:
    """What has the state of a source: itself, or the dataset of a DataLoader. A str says why nothing has."""
    stateful, kind = source, type(source).__name__
    if isinstance(source, DataLoader) and not _has_state(source):
        if source.num_workers:
            return f"the processes of a {kind} do not tell their state (those of a StatefulDataLoader do)"
        if type(source).__iter__ is DataLoader.__iter__ and isinstance(source.dataset, IterableDataset):
            stateful, kind = source.dataset, type(source.dataset).__name__
    if not _has_state(stateful):
        return f"a {kind} does not tell its state: it has no state_dict and load_state_dict"
    dataset = _stream_of(stateful)
    if dataset is None:
        return stateful
    if isinstance(source, DataLoader) and source.persistent_workers:
        # The copies in its processes begin every iteration of the same epoch at the state.
        return f"the persistent processes of a {kind} do not go back to the beginning"
    for node in _nodes(dataset._ex_iterable):
        if type(node).__name__ in _SHUFFLED:
            return "the state of a shuffled stream is without the rows in its buffer"
        if getattr(node, _INTERLEAVED, _EXACT_STOPPING) != _EXACT_STOPPING:
            return "the state of streams that are interleaved until all have ended is not exact"
    return stateful


def _nodes(node: Any) -> Iterator[Any]:
    """The iterables that an IterableDataset is made of, from the last to the first."""
    yield node
    for below in (getattr(node, "ex_iterable", None), *getattr(node, "ex_iterables", ())):
        if below is not None:
            yield from _nodes(below)


def _digest_of_shuffling(dataset: Any) -> int:
    generators = (getattr(node, "generator", None) for node in _nodes(dataset._ex_iterable))
    states = [repr(generator.bit_generator.state) for generator in generators if generator is not None]
    return zlib.crc32("".join(states).encode())


def _parts(state: Any) -> list[str]:
    """The names of the parts that a state of an IterableDataset is of, from the last to the first."""
    names = []
    while isinstance(state, Mapping) and "examples_iterable" in state:
        state = state["examples_iterable"]
        names.append(str(state.get("type") if isinstance(state, Mapping) else state))
    return names
