"""Tensors in a folder, through torch.distributed.checkpoint in its safetensors form: no pickle, written or read.

The writer's and reader's own steps (plan, write, finish) are called here one after another, instead of
``torch.distributed.checkpoint.save``: that one warns at every call outside a process group, and wraps an OSError such
as a full disk into a page of traceback. Tensors that workers hold parts of, ``held_tensors`` puts beside these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import torch

from lockstep.checkpoint.weights import own_storages
from lockstep.extras import require

FILE_BYTES = 2**30
"""A file is begun anew at this size: the writer holds a second copy of the whole file in memory."""


def write_tensors(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Writes tensors into ``folder``, which is made. Not synced, not atomic: that is the caller's business.

    Args:
        tensors: on any device, of any dtype that safetensors has; shared and non-contiguous ones are written in full.
        folder: where to.

    Raises:
        OSError: it cannot be written, for lack of room or permission.
    """
    # Imported here: it takes 0.7 s, which a program that saves nothing need not wait.
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    require("safetensors", "train")
    own = own_storages(tensors)
    if not own:
        folder.mkdir(parents=True, exist_ok=True)
        return
    writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=divide_into_files(own))
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    writer.set_up_storage_writer(True)
    planner.set_up_planner(own, writer.storage_meta(), True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    writer.finish(metadata, [writer.write_data(plan, planner).wait()])


def _all_of_them(key: str) -> bool:
    return True


def read_tensors(folder: Path, wanted: Callable[[str], bool] = _all_of_them) -> dict[str, torch.Tensor]:
    """The tensors in ``folder``, contiguous, on the CPU; also those of which several files hold parts.

    Args:
        folder: where they are.
        wanted: whether to read the one with a key.

    Raises:
        OSError: a file cannot be read.
        SafetensorError: a file is damaged.
    """
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    require("safetensors", "train")
    reader = HuggingFaceStorageReader(str(folder))
    metadata = reader.read_metadata()
    tensors = {
        key: torch.empty(item.size, dtype=item.properties.dtype)
        for key, item in metadata.state_dict_metadata.items()
        if isinstance(item, TensorStorageMetadata) and wanted(key)
    }
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), metadata, True)
    reader.set_up_storage_reader(metadata, True)
    plans = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    reader.read_data(planner.finish_plan(reader.prepare_global_plan(plans)[0]), planner).wait()
    return tensors


class HasBytes(Protocol):
    """What takes up room in a file."""

    @property
    def nbytes(self) -> int: ...


def divide_into_files(tensors: Mapping[str, HasBytes]) -> dict[str, int]:
    """The number, from 1, of the file that each tensor goes to."""
    files: dict[str, int] = {}
    number, filled = 1, 0
    for key, tensor in tensors.items():
        if filled and filled + tensor.nbytes > FILE_BYTES:
            number, filled = number + 1, 0
        files[key] = number
        filled += tensor.nbytes
    return files
