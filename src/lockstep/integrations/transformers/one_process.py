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


class OneProcess:
    """What ``args``, and all of accelerate in this process, are to know of a strategy.

    Args:
        args: of one Trainer, which owns them.
        strategy: whose replicas are one device.
    """

    def __init__(self, args: TrainingArguments, strategy: Strategy) -> None:
        self._args = args
        self._replicas = strategy.num_replicas_in_sync
        self._index = strategy.workers.index
        self._device = strategy.devices[0].torch_device
        self._accelerator: dict[str, Any] = {}
        args.n_gpu  # noqa: B018  the first look at it sets everything up, which must not come later
        self.establish()

    def establish(self) -> None:
        """Tells them, or tells them again: making other arguments asks the environment anew, and forgets it all."""
        self._args._n_gpu = self._replicas
        self._args.__dict__["_setup_devices"] = self._device
        self._args.distributed_state = _detached(_state(self._device, index=self._index))
        if not self._is_known():
            AcceleratorState._reset_state(reset_partial_state=True)
            PartialState._shared_state.update(_state(self._device, index=0))
            AcceleratorState._shared_state.update(self._accelerator)

    def keep(self) -> None:
        """Keeps what accelerate knows now that there is an Accelerator."""
        self._accelerator = dict(AcceleratorState._shared_state)

    def _is_known(self) -> bool:
        known, accelerator = PartialState._shared_state, AcceleratorState._shared_state
        alone = known.get("distributed_type") is DistributedType.NO and known.get("device") == self._device
        return alone and (not self._accelerator or accelerator.keys() == self._accelerator.keys())


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
