"""The weights of a model in one file, as arrays, or copied to the CPU: what ``save_weights`` and its like do."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.checkpoint.weights import check_fit, read_weights, write_weights
from lockstep.checks import check_path
from lockstep.collectives.communicator import Communicator, refuse_to_save, run_on_chief
from lockstep.errors import ConfigError
from lockstep.mirroring.module.module import MirroredModule
from lockstep.train.torch_weights import is_of_torch, read_torch_weights, write_torch_weights
from lockstep.weights_formats import weights_format

if TYPE_CHECKING:
    from lockstep.parallel.sharded_module import ShardedModule


def save_weights(module: MirroredModule, workers: Communicator, path: str | os.PathLike[str]) -> None:
    """Writes the module's state_dict, in the format of the file's suffix. Every worker must call it; the chief writes.

    The chief gathers a model that is divided among workers in its host memory, one tensor after another.
    """
    refuse_to_save(workers, "save_weights")
    target = Path(check_path(path, "the path of the weights"))
    write = write_torch_weights if weights_format(target, "the path of the weights") == "torch" else write_weights
    module.exchange_buffers()
    part = part_of(module)
    state: dict[str, Tensor] = module.state_dict() if part is None else {}
    if part is not None:
        averages = dict(module.named_buffers())
        for name, tensor in part.stream():
            if workers.is_chief:
                state[name] = averages.get(name, tensor).cpu()
    run_on_chief(workers, "save the weights", lambda: write(state, target))


def host_state(module: MirroredModule) -> dict[str, Tensor]:
    """Returns a copy of the module's state_dict on the CPU, made one tensor after another.

    Every worker must call it; each of them gets the whole of a model that is divided among them.
    """
    module.exchange_buffers(always=False)
    part = part_of(module)
    state = module.state_dict().items() if part is None else part.stream()
    averages = {} if part is None else dict(module.named_buffers())
    return {name: averages.get(name, tensor).detach().to("cpu", copy=True) for name, tensor in state}


def load_arrays(module: MirroredModule, arrays: Sequence[Any]) -> None:
    """Loads arrays in the order of the module's state_dict into all copies. Every worker must call it."""
    part = part_of(module)
    state: dict[str, Tensor] = module.module.state_dict() if part is None else part.described()
    if len(arrays) != len(state):
        raise ConfigError(
            f"set_weights got {len(arrays)} arrays for the {len(state)} tensors of the state_dict; give as many, in "
            "its order, as get_weights returns them"
        )
    tensors = {name: torch.as_tensor(array) for name, array in zip(state, arrays, strict=True)}
    for name, tensor in tensors.items():
        if tensor.shape != state[name].shape:
            raise ConfigError(
                f"set_weights got an array of shape {tuple(tensor.shape)} for {name!r} of shape "
                f"{tuple(state[name].shape)}; give arrays in the order of the state_dict, as get_weights returns them"
            )
    module.load_state_dict(tensors)


def load_weights(module: MirroredModule, workers: Communicator, path: str | os.PathLike[str]) -> None:
    """Loads a file of weights into all copies if everything fits. Every worker must call it; the chief reads."""
    source = Path(check_path(path, "the path of the weights"))
    part = part_of(module)
    state: dict[str, Tensor] = module.module.state_dict() if part is None else part.described()

    def read() -> dict[str, Tensor]:
        weights = read_torch_weights(source) if is_of_torch(source) else read_weights(source)
        check_fit(weights, state, source)
        return weights

    weights = run_on_chief(workers, "load the weights", read)
    if part is None:  # loading gives the chief's weights to the other workers, which pass their own
        module.load_state_dict(weights or state)
        return
    # One tensor after another, so that no worker but the chief holds the whole model beside its own part.
    for name, like in state.items():
        tensor = torch.empty_like(like, device="cpu")
        if weights is not None:
            tensor.copy_(weights[name])
        workers.broadcast("loaded weights", [tensor])
        part.take(name, tensor)


def part_of(module: MirroredModule) -> ShardedModule | None:
    """This worker's part of a divided model; None for a whole one."""
    if not module.is_part:
        return None
    from lockstep.checkpoint.sharded_state import sharded_module_of  # late: torch's part of it takes over a second

    return sharded_module_of(module)
