"""Checkpoint: named things whose state is saved and restored together, on all workers.

    save:     things -> state adapters -> each gives its state -> gathered at the chief -> one folder
    restore:  one folder, read by the chief -> broadcast -> each adapter checks its state -> each adapter loads it

The tensors of a model that workers hold parts of are not gathered: each worker writes its own files, and reads from
the folder what it holds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lockstep._torch_compat import tree_map
from lockstep.checkpoint.adapter_choice import adapter_for
from lockstep.checkpoint.conditions import all_conditions, warn_of_changes
from lockstep.checkpoint.folder import CheckpointFolder
from lockstep.checkpoint.format import (
    RECORD,
    SHARED,
    STATE,
    CheckpointRecord,
    Contents,
    DamagedStateError,
    TensorsOrRefs,
    damage_in,
    damaged,
    flatten,
    read_checkpoint,
    unflatten,
)
from lockstep.checkpoint.sharded_io import balance_writes
from lockstep.checkpoint.state_adapters import AdapterState, RngAdapter, SavedState, StateAdapter
from lockstep.checks import check_path
from lockstep.collectives.communicator import Communicator, all_gather_object, run_on_chief
from lockstep.errors import CallbackError, CheckpointError, ConfigError, LockstepError, UsageError
from lockstep.mirroring.module.module import MirroredModule
from lockstep.mirroring.optim.optimizer import MirroredOptimizer
from lockstep.mirroring.variable import MirroredVariable
from lockstep.parallel.tensor_files import TensorShard
from lockstep.strategies.base import Strategy, get_strategy

PathAndContents = tuple[Path, Contents]
Read = Callable[[Path], Contents]
Shards = Mapping[str, Mapping[str, TensorShard]]  # by folder in the checkpoint and key, what this worker writes
_RANDOM = "random"


class Checkpoint:
    """Things whose state is saved and restored together, with the random numbers of all replicas and processes.

    Make this object, and call its methods, on every worker. ``CheckpointManager`` keeps a folder of checkpoints.

    Args:
        things: by name: mirrored modules and optimizers, schedulers, variables of a strategy, a ``torch.Generator``, a
            dict of plain values such as ``{"epoch": 0}``, and any object with ``state_dict`` and ``load_state_dict``.

    Attributes:
        settings: what the bits depend on beside devices and libraries, by name, such as ``{"precision": "bf16"}``. It
            is saved too. A warning says what of all this has changed when a checkpoint is restored.

    Raises:
        ConfigError: nothing was given, or a thing that cannot be restored in place, such as a plain number.
        UsageError: the things belong to two strategies.

    Example:
        >>> import torch, lockstep as ls
        >>> strategy = ls.MirroredStrategy(["cpu:0"])
        >>> progress = {"step": 0}
        >>> checkpoint = ls.Checkpoint(model=strategy.mirror(torch.nn.Linear(2, 1)), progress=progress)
    """

    def __init__(self, **things: Any) -> None:
        if not things or _RANDOM in things:
            raise ConfigError(
                f"Checkpoint got {', '.join(things) or 'nothing'}; give things by name: Checkpoint(model=model), "
                f"and none called {_RANDOM!r}: the random numbers are always saved"
            )
        self._strategy = strategy_of(things)
        modules = {name: thing for name, thing in things.items() if isinstance(thing, MirroredModule)}
        self._adapters: dict[str, StateAdapter] = {
            name: adapter_for(name, thing, modules, self._strategy.workers) for name, thing in things.items()
        }
        self._adapters[_RANDOM] = RngAdapter(self._strategy.generators)
        self.settings: dict[str, str] = {}
        self.is_sharded = any(module.is_part for module in modules.values())
        types = (MirroredModule, MirroredOptimizer)
        self._sharded_names = {name for name, thing in things.items() if self.is_sharded and isinstance(thing, types)}

    @property
    def workers(self) -> Communicator:
        """The workers that save and restore together."""
        return self._strategy.workers

    def restore(self, path: str | os.PathLike[str]) -> Path:
        """Restores one checkpoint, or the newest in a folder of them. Every worker must call it; the chief reads.

        Nothing is loaded unless everything fits. If a state turns out to be damaged only while it is loaded, the next
        older checkpoint of the folder is loaded over it. Things in the checkpoint that this object lacks are ignored.
        Returns the checkpoint's folder.

        Raises:
            CheckpointError: there is no checkpoint, it is damaged, or it does not fit; the same on every worker.
        """
        place = Path(check_path(path, "the path of the checkpoint"))
        checkpoint = self.restore_found(lambda read: _find(place, read))
        if checkpoint is None:
            raise CheckpointError(f"there is no checkpoint in {os.fspath(path)}; give a folder that has one")
        return checkpoint[0]

    def restore_found(self, find: Callable[[Read], PathAndContents | None]) -> tuple[Path, CheckpointRecord] | None:
        """Restores the checkpoint that ``find`` returns, and returns its folder and record. Every worker must call it.

        ``find`` is called on the chief alone, with a function that reads a checkpoint; None restores nothing. Raises
        CheckpointError if the checkpoint that it returned last is damaged, or does not fit.
        """
        damages: dict[Path, str] = {}

        def read(path: Path) -> Contents:
            if path in damages:
                raise damaged(path, damages[path])
            return read_checkpoint(path, unread=self._sharded_names)

        while True:  # each round finds one more checkpoint to be damaged
            candidate = run_on_chief(self.workers, "checkpoint read", lambda: find(read))
            payload = None
            if candidate is not None:
                payload = {"path": str(candidate[0]), **vars(candidate[1]), "record": asdict(candidate[1].record)}
            payload = broadcast_state(self.workers.processes, "checkpoint restored", payload)
            if payload is None:
                return None
            path, record = Path(payload["path"]), CheckpointRecord(**payload["record"])
            try:
                states = {name: self._saved(name, payload, record) for name in self._adapters}
            except (TypeError, AttributeError) as error:  # on all workers: the record has values that were not saved
                damages[path] = f"{RECORD}: {error}"
                continue
            # The chief has compared the files of a whole checkpoint with their checksums as it read them.
            damages[path] = (self._damage_in_files(path) if self.is_sharded else "") or self._load(states)
            if not damages[path]:
                now = all_conditions(self._strategy, self.settings)
                if self.workers.processes.leads:
                    warn_of_changes(path, record.conditions, now)
                return path, record

    @contextmanager
    def saving(self) -> Iterator[None]:
        """A block in which everything has the state that is saved. Every worker must enter it."""
        with ExitStack() as stack:
            for adapter in self._adapters.values():
                stack.enter_context(adapter.saving())
            yield

    def collect(
        self, step: int, *, run: str, monitored: float | None = None, copied: bool = False
    ) -> tuple[Contents, Shards]:
        """Collects all state: complete on the chief, without the tensors that workers hold parts of; and those.

        Every worker must call it. ``copied`` tensors do not change if training goes on while they are written.
        """
        workers = self.workers
        states = {name: adapter.state() for name, adapter in self._adapters.items()}
        items = {name: {"replicas": list(state.replicas), "worker": state.worker} for name, state in states.items()}
        worker_items = all_gather_object(workers.processes, "checkpoint saved", items)
        complete_states: Any = {
            name: {
                SHARED: state.shared,
                "replicas": [item for leader in workers.leaders for item in worker_items[leader][name]["replicas"]],
                "workers": [worker[name]["worker"] for worker in worker_items],
            }
            for name, state in states.items()
        }
        weights: Any = {name: dict(state.weights) for name, state in states.items() if state.weights is not None}
        # The next steps change these tensors in place while the thread writes
        # (test_the_state_is_that_of_the_call_though_it_is_written_later).
        if copied and workers.is_chief:
            complete_states, weights = tree_map(_copied, complete_states), tree_map(_copied, weights)
        folders, shards = self._shards(states) if self.is_sharded else ({}, {})
        if copied:
            shards = {folder: {key: shard.copied() for key, shard in group.items()} for folder, group in shards.items()}
        record = CheckpointRecord(
            step=step,
            run=run,
            replicas=workers.replicas,
            monitored=monitored,
            layout=workers.layout,
            conditions=all_conditions(self._strategy, self.settings),
        )
        return Contents(record=record, states=complete_states, weights=weights, weight_paths=folders), shards

    def _shards(self, states: Mapping[str, AdapterState]) -> tuple[dict[str, str], Shards]:
        """The folder of each sharded module's weights, and what this worker writes to each folder."""
        modules = [name for name, state in states.items() if state.weight_shards is not None]
        folders = {name: "weights" if len(modules) == 1 else f"weights-{name}" for name in modules}
        shards: dict[str, Mapping[str, TensorShard]] = {
            folders[name]: states[name].weight_shards or {} for name in modules
        }
        shards[STATE] = {key: shard for state in states.values() for key, shard in state.shards.items()}
        return folders, balance_writes(self.workers.processes, shards)

    def _load(self, states: Mapping[str, SavedState]) -> str:
        """Loads a checkpoint if every adapter finds that it fits. Every worker must call it.

        Returns what is damaged in it, on any worker; empty if everything has been loaded. Raises CheckpointError if it
        is undamaged and does not fit.
        """
        workers = self.workers.processes
        phases = {
            "checkpoint checked": [partial(adapter.check, states[name]) for name, adapter in self._adapters.items()],
            "checkpoint loaded": [partial(adapter.load, states[name]) for name, adapter in self._adapters.items()],
        }
        # Everything is checked on all workers before anything is loaded anywhere. Otherwise a state that does not fit
        # would leave a mixture of two (test_what_does_not_fit_is_named_and_nothing_is_loaded).
        for phase, calls in phases.items():
            errors = [error for error in map(_error_of, self._adapters, calls) if error is not None]
            # What does not fit comes first: then nothing may be loaded from any checkpoint.
            errors.sort(key=lambda error: isinstance(error, DamagedStateError))
            outcome = (isinstance(errors[0], DamagedStateError), str(errors[0])) if errors else None
            for worker, worker_outcome in enumerate(all_gather_object(workers, phase, outcome)):
                if worker_outcome is None:
                    continue
                is_damage, text = worker_outcome
                if is_damage:
                    return text if workers.is_single else f"{workers.names[worker]}: {text}"
                raise errors[0] if outcome == worker_outcome else CheckpointError(f"{workers.names[worker]}: {text}")
        return ""

    def _damage_in_files(self, path: Path) -> str:
        """What the checksums find in a checkpoint's files, of which each worker looks at a part. All must call it."""
        workers = self.workers.processes
        try:
            damage = damage_in(path, worker=workers.index, workers=len(workers.names))
        except CheckpointError as error:
            damage = str(error)
        return next(filter(None, all_gather_object(workers, "checkpoint files checked", damage)), "")

    def _saved(self, name: str, payload: dict[str, Any], record: CheckpointRecord) -> SavedState:
        if name not in payload["states"]:
            names = ", ".join(sorted(payload["states"].keys() - {_RANDOM}))
            raise CheckpointError(
                f"{payload['path']} has nothing called {name!r}; it has: {names}. Give the things the names they were "
                "saved under"
            )
        workers = self.workers
        return SavedState(
            name=name,
            source=payload["path"],
            **payload["states"][name],
            weights=payload["weights"].get(name, {}),
            weights_in=payload["weight_paths"].get(name),
            same_replicas=(sum(record.replicas), record.layout) == (workers.num_replicas, workers.layout),
            same_layout=(record.replicas, record.layout) == (workers.replicas, workers.layout),
            first_replica=workers.first_replica,
            local_replicas=workers.replicas[workers.index],
            worker_index=workers.processes.index,
            step=record.step,
        )


def broadcast_state(workers: Communicator, name: str, state: Any) -> Any:
    """Returns the chief's state, which ``flatten`` must take, on every worker. Every worker must call it.

    Names and shapes are sent first, then the tensors, so that no worker holds more than one copy.
    """
    if workers.is_single:
        return state
    tree, tensors = flatten(state) if workers.is_chief else (None, {})
    shapes = {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()}
    tree, shapes = all_gather_object(workers, name, (tree, shapes))[0]
    if not workers.is_chief:
        tensors = {key: torch.empty(shape, dtype=dtype) for key, (dtype, shape) in shapes.items()}
    workers.broadcast(name, list(tensors.values()))
    return state if workers.is_chief else unflatten(tree, TensorsOrRefs(tensors))


def _find(path: Path, read: Read) -> PathAndContents | None:
    """The checkpoint at ``path``, or the newest one in it."""
    if (path / RECORD).exists():
        return path, read(path)
    if not path.is_dir():
        raise CheckpointError(
            f"there is no checkpoint {path}; give a folder such as step-00000120, or the one it is in"
        )
    return CheckpointFolder(path).read_newest(read)


def _error_of(name: str, call: Callable[[], None]) -> CheckpointError | None:
    """Calls, and returns the error. One that an adapter does not raise on purpose means a damaged state."""
    try:
        call()
    except (DamagedStateError, CallbackError) as error:
        return DamagedStateError(f"{name}: {error}")
    except CheckpointError as error:
        return error
    except LockstepError:
        raise
    except Exception as error:  # noqa: BLE001  a user's object may fail in its own way at a state of another object
        return DamagedStateError(f"{name}: {type(error).__name__}: {error}")
    return None


def _copied(leaf: Any) -> Any:
    return leaf.detach().to("cpu", copy=True) if isinstance(leaf, torch.Tensor) else leaf


def strategy_of(things: Mapping[str, Any]) -> Strategy:
    """The strategy of mirrored things; else the one in scope. Raises UsageError for things of two."""
    types = (MirroredModule, MirroredOptimizer, MirroredVariable)
    owners = {id(thing._owner): thing._owner for thing in things.values() if isinstance(thing, types)}
    if len(owners) > 1:
        raise UsageError("got things of two strategies; give those of one strategy at a time")
    for owner in owners.values():
        if isinstance(owner, Strategy):
            return owner
    return get_strategy()
