"""How transformers and accelerate see a strategy: one process, with one device that is as wide as all replicas.

``n_gpu`` is the number of all replicas, so that ``train_batch_size``, which is per device times ``n_gpu``, is the
global batch, and steps and epochs follow. ``process_index`` is the worker's, so that the chief alone logs and saves.
Nothing is distributed for accelerate: else it would shard, pad and gather by itself, and wrap the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate.state import AcceleratorState, PartialState  # type: ignore[import-untyped]
from accelerate.utils import DistributedType  # type: ignore[import-untyped]
from transformers import TrainingArguments

from lockstep.strategies.base import Strategy


def as_one_process(args: TrainingArguments, strategy: Strategy) -> None:
    """Gives ``args``, and accelerate's state of this process, what they are to know of the strategy.

    Idempotent. Making another ``TrainingArguments`` undoes it: that asks the environment once more.
    """
    device = strategy.devices[0].torch_device
    args.n_gpu  # noqa: B018  the first look at it sets everything up, which must not come later
    args._n_gpu = strategy.num_replicas_in_sync
    args.__dict__["_setup_devices"] = device
    args.distributed_state = _detached(_state(device, index=strategy.workers.index))
    if not _is_one_process(device):
        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState._shared_state.update(_state(device, index=0))


@contextmanager
def seen_as_one_device(args: TrainingArguments) -> Iterator[None]:
    """Inside, ``n_gpu`` is 1: for code of transformers that is about one replica, or about the whole batch."""
    replicas, args._n_gpu = args._n_gpu, 1
    try:
        yield
    finally:
        args._n_gpu = replicas


@contextmanager
def seen_as_chief(args: TrainingArguments) -> Iterator[None]:
    """Inside, ``process_index`` is 0: for what every worker must do with the same random numbers."""
    state = args.distributed_state
    index, state.process_index = state.process_index, 0
    try:
        yield
    finally:
        state.process_index = index


def _state(device: Any, *, index: int) -> dict[str, Any]:
    return {
        "_cpu": device.type == "cpu",
        "_mixed_precision": None,
        "backend": None,
        "debug": False,
        "device": device,
        "distributed_type": DistributedType.NO,
        "fork_launched": False,
        "local_process_index": index,
        "num_processes": 1,
        "process_index": index,
    }


def _detached(values: dict[str, Any]) -> PartialState:
    """A state that is not the one that all of accelerate shares."""
    state = object.__new__(PartialState)
    state.__dict__ = values
    return state


def _is_one_process(device: Any) -> bool:
    known = PartialState._shared_state
    return known.get("distributed_type") is DistributedType.NO and known.get("device") == device
