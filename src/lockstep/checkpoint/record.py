"""One checkpoint on disk: what is in its folder, written whole, and read only if it is whole.

step-00000120/
  checkpoint.json           everything that is no tensor, and the size of every other file
  weights.safetensors       a module's state_dict, plain keys (weights-NAME.safetensors where there are several)
  state/                    all other tensors, as torch.distributed.checkpoint writes them: safetensors too

Of a model that is divided among workers ``weights`` is a folder like ``state``, and each worker has written files of
its own to both.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lockstep.checkpoint.kinds import check_kind
from lockstep.checkpoint.nested import Stored, flatten, unflatten
from lockstep.checkpoint.part import SHARED
from lockstep.checkpoint.tensor_files import read_tensors, write_tensors
from lockstep.checkpoint.weights import own_storages, read_weights
from lockstep.checkpoint.whole_folder import RECORD, whole_folder
from lockstep.errors import CheckpointError
from lockstep.extras import require

FORMAT = "lockstep checkpoint"
VERSION, DIVIDED_VERSION = 1, 2
STATE = "state"
_DOCUMENT_KIND = {
    "step": int,
    "run": str,
    "replicas": list[int],
    "monitored": float | None,
    "weights": dict[str, str],
    "files": dict[str, int],
    "state": dict[str, Any],
}
"""What a record must have, and of which kinds."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a checkpoint says of itself.

    Args:
        step: of which step it is.
        run: which training it belongs to; resumed runs go on under the same.
        replicas: how many replicas each worker ran, in worker order.
        monitored: the number that says which is best, or None.
        layout: how the workers of each replica divide the model, if they do.
    """

    step: int
    run: str
    replicas: tuple[int, ...]
    monitored: float | None = None
    layout: str = ""


@dataclass(frozen=True, kw_only=True)
class Contents:
    """A checkpoint's record and state.

    Args:
        record: what it says of itself.
        parts: name of a part -> its state, as ``nested.flatten`` takes it.
        weights: name of a module -> its state_dict's tensors.
        apart: name of a module -> the file or folder, in the checkpoint's own, that has them; not in ``weights``.
    """

    record: Record
    parts: Mapping[str, Any]
    weights: Mapping[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    apart: Mapping[str, str] = field(default_factory=dict)


Fill = Callable[[Contents], None]
"""Writes contents to the folder of a checkpoint that has been begun."""


def write_checkpoint(path: Path, contents: Contents) -> None:
    """Writes a checkpoint to the folder ``path``, which appears whole or not at all.

    Raises:
        CheckpointError: it cannot be written, or the state holds what no checkpoint can hold; nothing is left behind.
    """
    with new_checkpoint(path) as (_, fill):
        fill(contents)


@contextmanager
def new_checkpoint(path: Path) -> Iterator[tuple[Path, Fill]]:
    """A checkpoint that is being written: the folder in which its files gather, and what writes all but ``apart``.

    The folder becomes ``path`` when the block ends.

    Raises:
        CheckpointError: as ``write_checkpoint``.
    """
    try:
        with whole_folder(path) as (partial, write_record):
            yield partial, lambda contents: write_record(_filled(partial, contents))
    except (OSError, require("safetensors", "train").SafetensorError) as error:
        raise CheckpointError(
            f"cannot write the checkpoint {path}: {error}; choose a folder that can be written to and has room"
        ) from error


def read_record(path: Path) -> Record:
    """What the checkpoint ``path`` says of itself.

    Raises:
        CheckpointError: it is no checkpoint, it is damaged, or a newer version wrote it.
    """
    return _record(_read_document(path))


def run_of(path: Path) -> str | None:
    """The run that the folder ``path`` names as its own, also where files of it are damaged; None where none is named.

    It tells a run's own checkpoints from all else that may have such a name.
    """
    try:
        document = json.loads((path / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    run = document.get("run") if isinstance(document, dict) and document.get("format") == FORMAT else None
    return run if isinstance(run, str) else None


def weights_of(path: Path) -> dict[str, str]:
    """By name the files or folders, in the checkpoint ``path``, that have modules' weights.

    Raises:
        CheckpointError: it is no checkpoint, it is damaged, or a newer version wrote it.
    """
    return dict(_read_document(path)["weights"])


def read_checkpoint(path: Path, *, apart: Collection[str] = ()) -> Contents:
    """The checkpoint ``path``, all of it, or all but what stays in its files.

    Args:
        path: its folder.
        apart: names of parts whose shared tensors are not read: modules get no weights, and in the states of others
            ``nested.Stored`` stands for them.

    Raises:
        CheckpointError: it is no checkpoint, it is damaged, or a newer version wrote it.
    """
    document = _read_document(path)
    left = {name: file for name, file in document["weights"].items() if name in apart}
    try:
        tensors = _read_state(path / STATE, tuple(f"{name}.{SHARED}." for name in apart))
        weights = {name: _read_module(path / file) for name, file in document["weights"].items() if name not in left}
        parts: dict[str, Any] = unflatten(document["state"], tensors)
    except (OSError, require("safetensors", "train").SafetensorError, ValueError, CheckpointError) as error:
        raise damaged(path, str(error)) from error
    except Exception as error:
        # The state is nested, and decoded as it says itself: with other values than were saved anything may be raised.
        raise damaged(path, f"{RECORD}: {type(error).__name__}: {error}") from error
    return Contents(record=_record(document), parts=parts, weights=weights, apart=left)


def _filled(folder: Path, contents: Contents) -> str:
    """Writes all files but the record, which it returns."""
    tree, tensors = flatten(dict(contents.parts))
    weights = {name: _weights_file(name, contents.weights) for name in contents.weights}
    for name, file in weights.items():
        save = require("safetensors.torch", "train").save_file
        save(own_storages(contents.weights[name]), str(folder / file), metadata={"format": "pt"})
    write_tensors(tensors, folder / STATE)
    return json.dumps(_document(contents.record, tree, {**weights, **contents.apart}, _sizes(folder)))


def _read_state(folder: Path, left: tuple[str, ...]) -> dict[str, Any]:
    """The tensors in a folder; for those whose keys begin with one of ``left`` what stands for them."""
    if not folder.is_dir():
        return {}
    stay: list[str] = []

    def wanted(key: str) -> bool:
        if key.startswith(left):
            stay.append(key)
        return not key.startswith(left)

    return {**read_tensors(folder, wanted), **{key: Stored(key) for key in stay}}


def _read_module(path: Path) -> dict[str, torch.Tensor]:
    return read_tensors(path) if path.is_dir() else read_weights(path)


def _weights_file(name: str, weights: Mapping[str, Any]) -> str:
    return "weights.safetensors" if len(weights) == 1 else f"weights-{name}.safetensors"


def _sizes(folder: Path) -> dict[str, int]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != RECORD)
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def _document(record: Record, tree: Any, weights: Mapping[str, str], files: Mapping[str, int]) -> dict[str, Any]:
    number, _ = flatten(record.monitored)
    return {
        "format": FORMAT,
        "version": DIVIDED_VERSION if record.layout else VERSION,
        "torch": torch.__version__,
        "step": record.step,
        "run": record.run,
        "replicas": list(record.replicas),
        "layout": record.layout,
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
        monitored=document["monitored"],
        layout=document.get("layout", ""),
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
        raise damaged(path, f"{RECORD}: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CheckpointError(f"{path} is no checkpoint of lockstep: its {RECORD} is another program's; give another")
    if document.get("version") not in (VERSION, DIVIDED_VERSION):
        raise CheckpointError(
            f"the checkpoint {path} has version {document.get('version')!r}, this program reads up to "
            f"{DIVIDED_VERSION}; use the version of lockstep that wrote it, or load its weights alone"
        )
    missing = sorted(_DOCUMENT_KIND.keys() - document.keys())
    if missing:
        raise damaged(path, f"{RECORD} lacks {', '.join(missing)}")
    try:
        document["monitored"] = unflatten(document["monitored"], {})
        check_kind(document, _DOCUMENT_KIND, RECORD)
        check_kind(document.get("layout", ""), str, f"{RECORD}.layout")
    except (CheckpointError, ValueError, KeyError, TypeError) as error:
        raise damaged(path, str(error)) from error
    _check_files(path, document["files"])
    return document


def _check_files(path: Path, files: Mapping[str, int]) -> None:
    for name, size in files.items():
        try:
            found = (path / name).stat().st_size
        except OSError as error:
            raise damaged(path, f"{name}: {error.strerror}") from error
        if found != size:
            raise damaged(path, f"{name} has {found} bytes instead of {size}")


def damaged(path: Path, why: str) -> CheckpointError:
    """The error for a checkpoint that is not what was written."""
    return CheckpointError(f"the checkpoint {path} is damaged ({why}); remove it and use the one before it")
