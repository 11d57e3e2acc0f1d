"""One checkpoint on disk: what is in its folder, written whole, and read only if it is whole.

step-00000120/
  checkpoint.json           everything that is no tensor, and the size of every other file
  weights.safetensors       a module's state_dict, plain keys (weights-NAME.safetensors where there are several)
  state/                    all other tensors, as torch.distributed.checkpoint writes them: safetensors too
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lockstep.checkpoint.nested import flatten, unflatten
from lockstep.checkpoint.tensor_files import read_tensors, write_tensors
from lockstep.checkpoint.weights import own_storages, read_weights
from lockstep.checkpoint.whole_folder import RECORD, whole_folder
from lockstep.errors import CheckpointError
from lockstep.extras import require

FORMAT = "lockstep checkpoint"
VERSION = 1
_STATE = "state"


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a checkpoint says of itself.

    Args:
        step: of which step it is.
        run: which training it belongs to; resumed runs go on under the same.
        replicas: how many replicas each worker ran, in worker order.
        monitored: the number that says which is best, or None.
    """

    step: int
    run: str
    replicas: tuple[int, ...]
    monitored: float | None = None


@dataclass(frozen=True, kw_only=True)
class Contents:
    """A checkpoint's record and state.

    Args:
        record: what it says of itself.
        parts: name of a part -> its state, as ``nested.flatten`` takes it.
        weights: name of a module -> its state_dict's tensors.
    """

    record: Record
    parts: Mapping[str, Any]
    weights: Mapping[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)


def write_checkpoint(path: Path, contents: Contents) -> None:
    """Writes a checkpoint to the folder ``path``, which appears whole or not at all.

    Raises:
        CheckpointError: it cannot be written, or the state holds what no checkpoint can hold; nothing is left behind.
    """
    tree, tensors = flatten(dict(contents.parts))
    try:
        with whole_folder(path) as (partial, write_record):
            weights = {name: _weights_file(name, contents.weights) for name in contents.weights}
            for name, file in weights.items():
                save = require("safetensors.torch", "text").save_file
                save(own_storages(contents.weights[name]), str(partial / file), metadata={"format": "pt"})
            write_tensors(tensors, partial / _STATE)
            write_record(json.dumps(_document(contents.record, tree, weights, _sizes(partial))))
    except (OSError, require("safetensors", "text").SafetensorError) as error:
        raise CheckpointError(
            f"cannot write the checkpoint {path}: {error}; choose a folder that can be written to and has room"
        ) from error


def read_record(path: Path) -> Record:
    """What the checkpoint ``path`` says of itself.

    Raises:
        CheckpointError: it is no checkpoint, it is damaged, or a newer version wrote it.
    """
    return _record(_read_document(path))


def read_checkpoint(path: Path) -> Contents:
    """The checkpoint ``path``, all of it.

    Raises:
        CheckpointError: it is no checkpoint, it is damaged, or a newer version wrote it.
    """
    document = _read_document(path)
    try:
        tensors = read_tensors(path / _STATE) if (path / _STATE).is_dir() else {}
        weights = {name: read_weights(path / file) for name, file in document["weights"].items()}
        parts: dict[str, Any] = unflatten(document["state"], tensors)
    except (OSError, require("safetensors", "text").SafetensorError, ValueError, KeyError) as error:
        raise _damaged(path, str(error)) from error
    except CheckpointError as error:
        raise _damaged(path, str(error)) from error
    return Contents(record=_record(document), parts=parts, weights=weights)


def _weights_file(name: str, weights: Mapping[str, Any]) -> str:
    return "weights.safetensors" if len(weights) == 1 else f"weights-{name}.safetensors"


def _sizes(folder: Path) -> dict[str, int]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != RECORD)
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def _document(record: Record, tree: Any, weights: Mapping[str, str], files: Mapping[str, int]) -> dict[str, Any]:
    number, _ = flatten(record.monitored)
    return {
        "format": FORMAT,
        "version": VERSION,
        "torch": torch.__version__,
        "step": record.step,
        "run": record.run,
        "replicas": list(record.replicas),
        "monitored": number,
        "weights": dict(weights),
        "files": dict(files),
        "state": tree,
    }


def _record(document: Mapping[str, Any]) -> Record:
    return Record(
        step=document["step"],
        run=document["run"],
        replicas=tuple(document["replicas"]),
        monitored=unflatten(document["monitored"], {}),
    )


def _read_document(path: Path) -> dict[str, Any]:
    """The record, after a look at whether all files are there in full length."""
    try:
        document = json.loads((path / RECORD).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(
            f"{path} is no checkpoint: it has no {RECORD}; give a folder such as step-00000120, or the one it is in"
        ) from error
    except OSError as error:
        raise CheckpointError(f"cannot read the checkpoint {path}: {error}; make it readable") from error
    except ValueError as error:
        raise _damaged(path, f"{RECORD}: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CheckpointError(f"{path} is no checkpoint of lockstep: its {RECORD} is another program's; give another")
    if document.get("version") != VERSION:
        raise CheckpointError(
            f"the checkpoint {path} has version {document.get('version')!r}, this program reads {VERSION}; "
            "use the version of lockstep that wrote it, or load its weights alone"
        )
    missing = sorted({"step", "run", "replicas", "monitored", "weights", "files", "state"} - document.keys())
    if missing:
        raise _damaged(path, f"{RECORD} lacks {', '.join(missing)}")
    _check_files(path, document["files"])
    return document


def _check_files(path: Path, files: Mapping[str, int]) -> None:
    for name, size in files.items():
        try:
            found = (path / name).stat().st_size
        except OSError as error:
            raise _damaged(path, f"{name}: {error.strerror}") from error
        if found != size:
            raise _damaged(path, f"{name} has {found} bytes instead of {size}")


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"the checkpoint {path} is damaged ({why}); remove it and use the one before it")
