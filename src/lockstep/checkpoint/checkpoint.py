"""Checkpoint: named things whose state is saved and restored together, on all workers.

things -> parts -> each gives its state -> gathered at the chief -> one folder
one folder, read by the chief -> all workers -> each part looks whether it fits -> each part takes its state

What workers hold parts of is not gathered: each writes files of its own to the folder, and reads what it wants from it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lockstep._torch_compat import tree_map
from lockstep.checkpoint.folder import CheckpointFolder
from lockstep.checkpoint.format import (
    RECORD,
    SHARED,
    STATE,
    CheckpointRecord,
    Contents,
    DamagedStateError,
    TensorsOrRefs,
    check_kind,
    damaged,
    flatten,
    read_checkpoint,
    unflatten,
)
from lockstep.checkpoint.state_adapters import AdapterState, RngAdapter, SavedState, StateAdapter, adapter_for
from lockstep.collectives.communicator import Communicator, all_gather_object, run_on_chief
from lockstep.errors import CallbackError, CheckpointError, ConfigError, LockstepError, UsageError
from lockstep.mirroring.module.module import MirroredModule
from lockstep.mirroring.optim.optimizer import MirroredOptimizer
from lockstep.mirroring.variable import MirroredVariable
from lockstep.strategies.base import Strategy, get_strategy

if TYPE_CHECKING:
    from lockstep.checkpoint.sharded_io import TensorShard


def spread(workers: Communicator, name: str, state: Any) -> Any:
    """The chief's state, on every worker. Every worker must call it.

    Args:
        workers: all of them.
        name: what this call is for.
        state: the chief's, as ``nested.flatten`` takes it; the others' is not looked at.
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


Found = tuple[Path, Contents]
Read = Callable[[Path], Contents]
Held = Mapping[str, Mapping[str, "TensorShard"]]
"""Of each folder in a checkpoint's own, what a worker holds of the tensors in it."""
_RANDOM = "random"
_SAVED_PART = {SHARED: Any, "replicas": list, "workers": list}


class Checkpoint:
    """Things whose state is saved and restored together, with the random numbers of all replicas and processes.

    A folder of checkpoints is kept by a ``CheckpointManager``. Make it, and call its methods, on every worker.

    Args:
        things: by name: mirrored modules and optimizers, schedulers, ``strategy.variable``s, a ``torch.Generator``, a
            dict of plain values such as ``{"epoch": 0}``, and whatever has ``state_dict`` and ``load_state_dict``.

    Raises:
        ConfigError: nothing given, or a thing that cannot be restored in place, such as a plain number.
        UsageError: things of two strategies.

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
                f"and none called {_RANDOM!r}: that is always in it"
            )
        self._strategy = _strategy_of(things)
        modules = {name: thing for name, thing in things.items() if isinstance(thing, MirroredModule)}
        self._parts: dict[str, StateAdapter] = {
            name: adapter_for(name, thing, modules, self._strategy.workers) for name, thing in things.items()
        }
        self._parts[_RANDOM] = RngAdapter(self._strategy.generators)
        self.divided = any(module.is_part for module in modules.values())
        mirrored = (MirroredModule, MirroredOptimizer)
        self._apart = {name for name, thing in things.items() if self.divided and isinstance(thing, mirrored)}

    @property
    def workers(self) -> Communicator:
        """The workers that save and restore together."""
        return self._strategy.workers

    def restore(self, path: str | os.PathLike[str]) -> Path:
        """Restores one checkpoint, or the newest in a folder of them. Every worker must call it; the chief reads.

        Nothing is loaded unless everything fits. Where a part finds out only while it loads that its state is damaged,
        the next older checkpoint of the folder is loaded over it. What the checkpoint holds besides is not looked at.

        Returns:
            The checkpoint's folder.

        Raises:
            CheckpointError: there is none, it is damaged, or it does not fit; the same on every worker.
        """
        restored = self.restore_found(lambda read: _find(Path(path), read))
        if restored is None:
            raise CheckpointError(f"there is no checkpoint in {os.fspath(path)}; give a folder that has one")
        return restored[0]

    def restore_found(self, find: Callable[[Read], Found | None]) -> tuple[Path, CheckpointRecord] | None:
        """Restores what ``find`` gives on the chief, who alone calls it. Every worker must call this.

        Args:
            find: is given what reads a checkpoint, but for what workers read for themselves.

        Returns:
            Where it was and what it says of itself; None if ``find`` gave nothing.

        Raises:
            CheckpointError: of what ``find`` gave last, which is damaged, or does not fit.
        """
        damages: dict[Path, str] = {}

        def read(path: Path) -> Contents:
            if path in damages:
                raise damaged(path, damages[path])
            contents = read_checkpoint(path, apart=self._apart)
            try:
                for name in contents.parts.keys() & self._parts.keys():
                    check_kind(contents.parts[name], _SAVED_PART, name)
            except DamagedStateError as error:
                raise damaged(path, str(error)) from error
            return contents

        while True:  # each time round one more checkpoint is known to be damaged
            found = run_on_chief(self.workers, "checkpoint read", lambda: find(read))
            sent = spread(self.workers.processes, "checkpoint restored", None if found is None else _as_state(*found))
            if sent is None:
                return None
            record = CheckpointRecord(**{**sent["record"], "replicas": tuple(sent["record"]["replicas"])})
            damage = self._damage_of({name: self._saved(name, sent, record) for name in self._parts})
            if not damage:
                return Path(sent["path"]), record
            damages[Path(sent["path"])] = damage

    def _damage_of(self, saved: Mapping[str, SavedState]) -> str:
        """Loads a checkpoint that was read, if every part finds it fit. Every worker must call it.

        Returns:
            What is damaged in it, on any worker; empty where all has been loaded.

        Raises:
            CheckpointError: it is whole and does not fit.
        """
        workers = self.workers.processes
        acts = {
            "checkpoint looked at": [partial(part.check, saved[name]) for name, part in self._parts.items()],
            "checkpoint loaded": [partial(part.load, saved[name]) for name, part in self._parts.items()],
        }
        for doing, calls in acts.items():
            faults = [fault for fault in map(_fault_of, self._parts, calls) if fault is not None]
            faults.sort(key=lambda fault: isinstance(fault, DamagedStateError))  # where it does not fit, none may
            own = (isinstance(faults[0], DamagedStateError), str(faults[0])) if faults else None
            for worker, theirs in enumerate(all_gather_object(workers, doing, own)):
                if theirs is None:
                    continue
                damage, text = theirs
                if damage:
                    return text if workers.is_single else f"{workers.names[worker]}: {text}"
                raise faults[0] if own == theirs else CheckpointError(f"{workers.names[worker]}: {text}")
        return ""

    def contents(self, step: int, *, run: str, monitored: float | None = None, copied: bool = False) -> Contents:
        """All state now, complete on the chief but for what workers hold parts of. Every worker must call it.

        Args:
            step: which step it is.
            run: which training it belongs to.
            monitored: the number that says which is best.
            copied: tensors are copied, so that training can go on while they are written.
        """
        return self.contents_and_held(step, run=run, monitored=monitored, copied=copied)[0]

    def contents_and_held(
        self, step: int, *, run: str, monitored: float | None = None, copied: bool = False
    ) -> tuple[Contents, Held]:
        """``contents``, and what this worker is to write of the tensors that workers hold parts of."""
        states = {name: part.state() for name, part in self._parts.items()}
        own = {name: {"replicas": list(state.replicas), "worker": state.worker} for name, state in states.items()}
        everyones = all_gather_object(self.workers.processes, "checkpoint saved", own)
        leaders = self.workers.leaders
        parts: Any = {name: _joined(name, state, everyones, leaders) for name, state in states.items()}
        weights: Any = {name: dict(state.weights) for name, state in states.items() if state.weights is not None}
        if copied and self.workers.is_chief:
            parts, weights = tree_map(_copied, parts), tree_map(_copied, weights)
        apart, held = self._held(states) if self.divided else ({}, {})
        if copied:
            held = {folder: {key: each.copied() for key, each in own.items()} for folder, own in held.items()}
        workers = self.workers
        record = CheckpointRecord(
            step=step, run=run, replicas=workers.replicas, monitored=monitored, layout=workers.layout
        )
        return Contents(record=record, parts=parts, weights=weights, apart=apart), held

    def _held(self, states: Mapping[str, AdapterState]) -> tuple[dict[str, str], Held]:
        """The folders of the modules, and of every folder what this worker is to write to it."""
        from lockstep.checkpoint.sharded_io import balance_writes

        modules = [name for name, state in states.items() if state.weight_shards is not None]
        apart = {name: "weights" if len(modules) == 1 else f"weights-{name}" for name in modules}
        held: dict[str, Mapping[str, TensorShard]] = {apart[name]: states[name].weight_shards or {} for name in modules}
        held[STATE] = {key: each for state in states.values() for key, each in state.held.items()}
        return apart, balance_writes(self.workers.processes, held)

    def _saved(self, name: str, sent: dict[str, Any], record: CheckpointRecord) -> SavedState:
        if name not in sent["parts"]:
            there = ", ".join(sorted(sent["parts"].keys() - {_RANDOM}))
            raise CheckpointError(
                f"{sent['path']} has nothing called {name!r}; it has: {there}. Give the things the names they were "
                "saved under"
            )
        workers = self.workers
        return SavedState(
            name=name,
            source=sent["path"],
            **sent["parts"][name],
            weights=sent["weights"].get(name, {}),
            weights_in=sent["apart"].get(name),
            same_layout=(record.replicas, record.layout) == (workers.replicas, workers.layout),
            first_replica=workers.first_replica,
            local_replicas=workers.replicas[workers.index],
            worker_index=workers.processes.index,
            step=record.step,
        )


def _find(path: Path, read: Read) -> Found | None:
    """The checkpoint at ``path``, or the newest one in it."""
    if (path / RECORD).exists():
        return path, read(path)
    if not path.is_dir():
        raise CheckpointError(
            f"there is no checkpoint {path}; give a folder such as step-00000120, or the one it is in"
        )
    return CheckpointFolder(path).read_newest(read)


def _as_state(path: Path, contents: Contents) -> dict[str, Any]:
    record = asdict(contents.record)
    weights, apart = dict(contents.weights), dict(contents.apart)
    return {"path": str(path), "record": record, "parts": dict(contents.parts), "weights": weights, "apart": apart}


def _fault_of(name: str, act: Callable[[], None]) -> CheckpointError | None:
    """What a part says of what was saved for it; whatever it raises unforeseen is damage."""
    try:
        act()
    except DamagedStateError as error:
        return DamagedStateError(f"{name}: {error}")
    except CheckpointError as error:
        return error
    except CallbackError as error:
        return DamagedStateError(f"{name}: {error}")
    except LockstepError:
        raise
    except Exception as error:  # noqa: BLE001  any object may take a state, and fail in its own way at another's
        return DamagedStateError(f"{name}: {type(error).__name__}: {error}")
    return None


def _joined(name: str, state: AdapterState, everyones: list[Any], leaders: Sequence[int]) -> dict[str, Any]:
    return {
        SHARED: state.shared,
        "replicas": [own for speaker in leaders for own in everyones[speaker][name]["replicas"]],
        "workers": [worker[name]["worker"] for worker in everyones],
    }


def _copied(leaf: Any) -> Any:
    return leaf.detach().to("cpu", copy=True) if isinstance(leaf, torch.Tensor) else leaf


def _strategy_of(things: dict[str, Any]) -> Strategy:
    mirrored = (MirroredModule, MirroredOptimizer, MirroredVariable)
    owners = {id(thing._owner): thing._owner for thing in things.values() if isinstance(thing, mirrored)}
    if len(owners) > 1:
        raise UsageError("Checkpoint got things of two strategies; make one Checkpoint for each strategy")
    for owner in owners.values():
        if isinstance(owner, Strategy):
            return owner
    return get_strategy()
