"""Weights in one safetensors file: every key of a module's state_dict, and nothing but tensors.

The file is written aside and renamed, so a reader sees the old file or the new one, whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.atomic_files import atomic_file
from lockstep.checks import check_path
from lockstep.errors import CheckpointError
from lockstep.extras import require
from lockstep.mirroring.module.wrappers import inner_tensors
from lockstep.parallel.tensor_files import TensorReader

_SHOWN = 4
_ALIGNMENT = _LENGTH = 8
_METADATA = "__metadata__"
_DTYPES = {  # their names in the safetensors format
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


def write_weights(state: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Writes the tensors of a state_dict, on any device, to the safetensors file ``path``; its folder is made.

    Raises CheckpointError if an entry is not a tensor, or the file cannot be written.
    """
    check_tensors(state)
    stream_weights(path, state, state.items())


def check_tensors(state: Mapping[str, Any]) -> None:
    """Raises CheckpointError if an entry is not a tensor."""
    for key, value in state.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"the state has {key!r}, a {type(value).__name__}; weights files hold tensors only")
        check_memory(key, value)


def stream_weights(
    path: str | os.PathLike[str], described: Mapping[str, Tensor], stream: Iterable[tuple[str, Tensor]]
) -> None:
    """Writes tensors as ``write_weights`` does, holding a copy of one of them at a time.

    ``described`` has all of them, also on the meta device; ``stream`` gives keys and tensors, in any order, each once.
    """
    target = Path(check_path(path, "the path of the weights"))
    write_file(target, FileHeader.of(described, target), stream)


def write_file(target: Path, header: FileHeader, stream: Iterable[tuple[str, Tensor]]) -> None:
    """Writes the safetensors file of a header. ``stream`` gives keys and tensors, in any order, each once."""
    try:
        with atomic_file(target) as partial, partial.open("wb") as file:
            file.write(header.text)
            for key, tensor in stream:
                # Each tensor is written to its place, so they can come in any order, one at a time
                # (test_a_file_written_in_any_order_is_what_safetensors_reads).
                file.seek(header.begins[key])
                file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    except OSError as error:
        raise CheckpointError(
            f"cannot write the weights to {target}: {error}; choose a folder that can be written to and has room"
        ) from error


@dataclass(frozen=True)
class FileHeader:
    """The beginning of a safetensors file, which says where each tensor is.

    Args:
        text: the beginning itself, with its length.
        begins: by key where in the file each tensor begins, in bytes.
        described: by key a tensor of the same shape and dtype on the meta device.
    """

    text: bytes
    begins: Mapping[str, int]
    described: Mapping[str, Tensor]

    @classmethod
    def of(cls, described: Mapping[str, Tensor], target: Path) -> FileHeader:
        """The header of a new file. Raises CheckpointError for a dtype that safetensors does not have."""
        unknown = [f"{key} is {tensor.dtype}" for key, tensor in described.items() if tensor.dtype not in _DTYPES]
        if unknown:
            reason = f"{unknown[0]}, which safetensors does not have"
            raise CheckpointError(f"cannot write the weights to {target}: {reason}")
        keys = sorted(described, key=lambda key: -described[key].element_size())  # so that each is aligned
        ends = [0]
        for key in keys:
            ends.append(ends[-1] + described[key].numel() * described[key].element_size())
        spans = dict(zip(keys, pairwise(ends), strict=True))
        entries = {
            key: {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": list(spans[key])}
            for key, tensor in described.items()
        }
        text = json.dumps({_METADATA: {"format": "pt"}, **entries}).encode()
        # Spaces, as safetensors itself pads a header, so that the tensors behind it are aligned.
        text += b" " * (-len(text) % _ALIGNMENT)
        begin = _LENGTH + len(text)
        begins = {key: begin + start for key, (start, _) in spans.items()}
        return cls(len(text).to_bytes(_LENGTH, "little") + text, begins, described)

    @classmethod
    def read(cls, file: Path) -> FileHeader:
        """The header of a file. Raises CheckpointError if it cannot be read or has a dtype that torch does not."""
        try:
            with file.open("rb") as opened:
                size = opened.read(_LENGTH)
                text = opened.read(min(int.from_bytes(size, "little"), file.stat().st_size))
            entries = json.loads(text)
            entries.pop(_METADATA, None)
            dtypes = {name: dtype for dtype, name in _DTYPES.items()}
            described = {
                key: torch.empty(entry["shape"], dtype=dtypes[entry["dtype"]], device="meta")
                for key, entry in entries.items()
            }
            begins = {key: _LENGTH + len(text) + entry["data_offsets"][0] for key, entry in entries.items()}
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise CheckpointError(f"cannot read the header of {file}: {error!r}; copy or save it anew") from error
        return cls(size + text, begins, described)


def read_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Returns the tensors in a safetensors file, on the CPU. Raises CheckpointError if there is no such file."""
    source = Path(check_path(path, "the path of the weights"))
    if not source.is_file():
        raise CheckpointError(f"there is no weights file {source}; give the path of a file written by save_weights")
    try:
        return TensorReader(source).read_all()
    except (OSError, require("safetensors", "train").SafetensorError) as error:
        raise CheckpointError(
            f"cannot read the weights in {source}: {error}; give a safetensors file written by save_weights"
        ) from error


def check_fit(weights: Mapping[str, Any], state: Mapping[str, Any], source: str | os.PathLike[str]) -> None:
    """Raises a CheckpointError unless the weights of ``source`` have the keys and shapes of a module's state_dict."""
    faults = {
        "missing keys": [key for key in state if key not in weights],
        "unexpected keys": [key for key in weights if key not in state],
        "wrong shapes": [
            f"{key} has shape {tuple(weights[key].shape)} instead of {tuple(state[key].shape)}"
            for key in state
            if key in weights and weights[key].shape != state[key].shape
        ],
    }
    texts = []
    for title, items in faults.items():
        more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
        texts += [f"{title}: {', '.join(items[:_SHOWN])}{more}"] if items else []
    if texts:
        raise CheckpointError(
            f"the weights in {os.fspath(source)} do not fit the module: {'; '.join(texts)}; "
            "load them into a module built with the settings of the one that was saved"
        )


def check_memory(key: str, tensor: Tensor) -> None:
    """Raises CheckpointError for a tensor that has no memory of its own, but others in it, as quantised weights do."""
    if inner := inner_tensors(tensor):
        raise CheckpointError(
            f"{key!r} is a {type(tensor).__name__}, which is made of {', '.join(inner)} and no tensor that safetensors "
            "can hold; save state_dict() with torch.save, or what is trained alone, such as an adapter's weights"
        )


def contiguous_tensors(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns each tensor contiguous and alone in its storage, as safetensors wants it. Copies only where needed."""
    storages: set[int] = set()
    tensors: dict[str, Tensor] = {}
    for key, value in state.items():
        check_memory(key, value)
        tensor = value.detach().cpu().contiguous()
        storage = tensor.untyped_storage()
        # safetensors refuses tensors that share memory, and would write all of the memory of a view.
        alone = storage.nbytes() == tensor.numel() * tensor.element_size() and storage.data_ptr() not in storages
        tensor = tensor if alone else tensor.clone(memory_format=torch.contiguous_format)
        storages.add(tensor.untyped_storage().data_ptr())
        tensors[key] = tensor
    return tensors
