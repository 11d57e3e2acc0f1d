"""The format of one checkpoint: a folder that is written whole, and read only if it is whole.

step-00000120/
  checkpoint.json           the record: everything that is not a tensor, and the size of every other file
  weights.safetensors       a module's state_dict, plain keys (weights-NAME.safetensors where there are several)
  state/                    all other tensors, in safetensors files

Of a model that is divided among workers ``weights`` is a folder like ``state``, and each worker has written its own
files to both.

In the record a nested state is JSON, and the tensors are taken out of it:

    {"lr": 0.1, "mean": tensor}  <->  {"lr": 0.1, "mean": {"#": "tensor", "key": "mean"}} and {"mean": tensor}

What JSON has no type for is an object with the key "#". Nothing here can run code when it is read. A checksum tells
whether the record is what was written: a changed value would fail later, with an error that names no checkpoint.
"""

from __future__ import annotations

import json
import math
import numbers
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from lockstep.atomic_files import atomic_folder
from lockstep.checkpoint.sharded_io import TensorReader, TensorShard, write_shards
from lockstep.checkpoint.weights import contiguous_tensors
from lockstep.errors import CheckpointError
from lockstep.extras import require

FORMAT = "lockstep checkpoint"
RECORD = "checkpoint.json"
VERSION, SHARDED_VERSION = 1, 2
STATE = "state"
SHARED = "shared"
"""The part of a thing's state that is equal on all workers; its tensors' keys begin with the thing's name and this."""
_TAG = "#"
_KEYS = ("step", "run", "replicas", "layout", "monitored", "weights", "files", "state", "checksum")
"""The keys that a record must have."""


class DamagedStateError(CheckpointError):
    """A state holds something else than what was saved there. Another checkpoint should be used."""


@dataclass(frozen=True, kw_only=True)
class CheckpointRecord:
    """What a checkpoint says of itself."""

    step: int  # the number of the step
    run: str  # the id of the training run; a resumed run keeps it
    replicas: tuple[int, ...]  # the number of replicas of each worker, in worker order
    monitored: float | None = None  # the number that says which checkpoint is best, or None
    layout: str = ""  # how the workers of each replica divide the model, if they do


@dataclass(frozen=True, kw_only=True)
class Contents:
    """A checkpoint's record, the states of things by name, as ``flatten`` takes them, and the tensors of each module.

    ``weight_paths`` has, for modules that are not in ``weights``, the file or folder in the checkpoint that has them.
    """

    record: CheckpointRecord
    states: Mapping[str, Any]
    weights: Mapping[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    weight_paths: Mapping[str, str] = field(default_factory=dict)


Fill = Callable[[Contents], None]
"""Writes contents to the folder of a checkpoint that has been begun."""


@contextmanager
def new_checkpoint(path: Path) -> Iterator[tuple[Path, Fill]]:
    """Yields the folder in which a checkpoint's files gather, and a function that writes all but ``weight_paths``.

    The folder becomes ``path`` when the block ends, whole or not at all. Raises CheckpointError if it cannot be
    written, or the state holds what no checkpoint can hold; nothing is left behind.
    """
    try:
        with atomic_folder(path, record=RECORD) as (partial, write_record):
            yield partial, lambda contents: write_record(_write_files(partial, contents))
    except (OSError, require("safetensors", "train").SafetensorError) as error:
        raise CheckpointError(
            f"cannot write the checkpoint {path}: {error}; choose a folder that can be written to and has room"
        ) from error


def read_record(path: Path) -> CheckpointRecord:
    """Returns the record of the checkpoint ``path``.

    Raises CheckpointError if it is not a checkpoint, it is damaged, or a newer version wrote it.
    """
    return _record(_read_document(path))


def run_of(path: Path) -> str | None:
    """Returns the run that a checkpoint belongs to, even if files of it are damaged. None if it names no run."""
    try:
        document = json.loads((path / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    run = document.get("run") if isinstance(document, dict) and document.get("format") == FORMAT else None
    return run if isinstance(run, str) else None


def weights_of(path: Path) -> dict[str, str]:
    """Returns, by module, the files or folders inside the checkpoint ``path`` that have its weights.

    Raises CheckpointError if it is not a checkpoint, it is damaged, or a newer version wrote it.
    """
    return dict(_read_document(path)["weights"])


def read_checkpoint(path: Path, *, unread: Collection[str] = ()) -> Contents:
    """Reads the checkpoint ``path``, but not the shared tensors of the things named in ``unread``.

    Of these, modules get no weights, and in the states of others a ``TensorRef`` stands for each tensor. Raises
    CheckpointError if it is not a checkpoint, it is damaged, or a newer version wrote it.
    """
    document = _read_document(path)
    files: dict[str, str] = document["weights"]
    try:
        tensors = _read_state(path / STATE, tuple(f"{name}.{SHARED}." for name in unread))
        weights = {name: TensorReader(path / file).read_all() for name, file in files.items() if name not in unread}
        states: dict[str, Any] = unflatten(document["state"], tensors)
    except (OSError, require("safetensors", "train").SafetensorError, ValueError, CheckpointError) as error:
        raise damaged(path, str(error)) from error
    except Exception as error:
        # The record itself says how it is decoded: with values other than the saved ones any error may be raised.
        raise damaged(path, f"{RECORD}: {type(error).__name__}: {error}") from error
    paths = {name: file for name, file in files.items() if name in unread}
    return Contents(record=_record(document), states=states, weights=weights, weight_paths=paths)


def damaged(path: Path, why: str) -> CheckpointError:
    """Returns the error for a checkpoint that is not what was written."""
    return CheckpointError(f"the checkpoint {path} is damaged ({why}); remove it and use the one before it")


def _write_files(folder: Path, contents: Contents) -> str:
    """Writes all files but the record, which it returns."""
    tree, tensors = flatten(dict(contents.states))
    weights: dict[str, str] = {}
    for name, own in contents.weights.items():
        weights[name] = "weights.safetensors" if len(contents.weights) == 1 else f"weights-{name}.safetensors"
        save = require("safetensors.torch", "train").save_file
        save(contiguous_tensors(own), str(folder / weights[name]), metadata={"format": "pt"})
    write_shards({key: TensorShard(tensor) for key, tensor in tensors.items()}, folder / STATE)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != RECORD)
    record = contents.record
    document = {
        "format": FORMAT,
        "version": SHARDED_VERSION if record.layout else VERSION,
        "torch": torch.__version__,
        **asdict(record),
        "monitored": flatten(record.monitored)[0],
        "weights": {**weights, **contents.weight_paths},
        "files": {path.relative_to(folder).as_posix(): path.stat().st_size for path in files},
        "state": tree,
    }
    return json.dumps({**document, "checksum": _checksum(document)})


def _checksum(document: Mapping[str, Any]) -> int:
    """The CRC-32 of a record, which is equal before it is written and after it is read."""
    values = {key: value for key, value in document.items() if key != "checksum"}
    return zlib.crc32(json.dumps(values).encode())


def _read_state(folder: Path, unread: tuple[str, ...]) -> dict[str, Any]:
    """The tensors in a folder, and references to those whose keys begin with one of ``unread``."""
    if not folder.is_dir():
        return {}
    reader = TensorReader(folder)
    left = [key for key in reader.tensors if key.startswith(unread)]
    return {**reader.read_all(without=left), **{key: TensorRef(key) for key in left}}


def _record(document: Mapping[str, Any]) -> CheckpointRecord:
    values = {each.name: document[each.name] for each in fields(CheckpointRecord)}
    return CheckpointRecord(**{**values, "replicas": tuple(values["replicas"])})


def _read_document(path: Path) -> dict[str, Any]:
    """The record as it is in the file, after a check that all files are there in full length."""
    try:
        document = json.loads((path / RECORD).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(
            f"{path} is not a checkpoint: it has no {RECORD}; give a folder such as step-00000120, or the one it is in"
        ) from error
    except OSError as error:
        raise CheckpointError(f"cannot read the checkpoint {path}: {error}; make it readable") from error
    except ValueError as error:
        raise damaged(path, f"{RECORD}: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of lockstep: its {RECORD} is that of another program")
    if document.get("version") not in (VERSION, SHARDED_VERSION):
        raise CheckpointError(
            f"the checkpoint {path} has version {document.get('version')!r}, this program reads up to "
            f"{SHARDED_VERSION}; use the version of lockstep that wrote it, or load its weights alone"
        )
    if missing := sorted(set(_KEYS) - document.keys()):
        raise damaged(path, f"{RECORD} lacks {', '.join(missing)}")
    if document["checksum"] != _checksum(document):
        raise damaged(path, f"the checksum of {RECORD} is not that of its content")
    document["monitored"] = unflatten(document["monitored"], {})
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


# ---- nested state <-> JSON and a flat dict of tensors


@dataclass(frozen=True)
class TensorRef:
    """Stands for a tensor that is, or will be, in a file under a key."""

    key: str


class TensorsOrRefs(dict[str, Any]):
    """Tensors by key, and a ``TensorRef`` for every other key."""

    def __missing__(self, key: str) -> TensorRef:
        return TensorRef(key)


def flatten(state: Any, name: str = "") -> tuple[Any, dict[str, torch.Tensor]]:
    """Takes the tensors out of ``state``, to keys that begin with ``name``, if given.

    The state has None, numbers, strings, tensors and ``TensorRef``s, in lists, tuples, dicts and Counters. Returns what
    ``json.dumps`` can write, and the tensors by key, without those that are ``TensorRef``s.

    Raises CheckpointError if the state holds something else, which is named with its place.
    """
    tensors: dict[str, torch.Tensor] = {}
    return _encoded(state, name, tensors), tensors


def unflatten(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Returns the state that ``flatten`` was given, its tensors contiguous.

    Raises CheckpointError if a tensor is missing, or an object is of an unknown type.
    """
    if isinstance(tree, list):
        return [unflatten(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    kind = tree.get(_TAG)
    if kind is None:
        return {key: unflatten(value, tensors) for key, value in tree.items()}
    if kind not in _DECODERS:
        raise CheckpointError(f"the checkpoint holds a {kind!r}, which this version does not know; use a newer one")
    return _DECODERS[kind](tree, tensors)


def _encoded(state: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if state is None or isinstance(state, (bool, str)):
        return state
    if isinstance(state, torch.Tensor):
        return _encoded_tensor(state, path, tensors)
    if isinstance(state, TensorRef):
        return {_TAG: "tensor", "key": state.key}
    if isinstance(state, numbers.Integral):
        return int(state)
    if isinstance(state, numbers.Real):
        number = float(state)
        return number if math.isfinite(number) else {_TAG: "float", "value": str(number)}
    if isinstance(state, Mapping):
        return _encoded_mapping(state, path, tensors)
    if isinstance(state, (list, tuple)):
        items = [_encoded(item, _below(path, place), tensors) for place, item in enumerate(state)]
        return items if isinstance(state, list) else {_TAG: "tuple", "items": items}
    raise CheckpointError(
        f"{path} is a {type(state).__name__}; a checkpoint holds numbers, texts and tensors, in lists, tuples and "
        "dicts: turn it into one of these in state_dict()"
    )


def _encoded_mapping(state: Mapping[Any, Any], path: str, tensors: dict[str, torch.Tensor]) -> Any:
    values = {key: _encoded(value, _below(path, key), tensors) for key, value in state.items()}
    if isinstance(state, Counter) or _TAG in values or not all(isinstance(key, str) for key in values):
        kind = "counter" if isinstance(state, Counter) else "dict"
        return {_TAG: kind, "items": [[_encoded(key, f"{path}: a key", {}), value] for key, value in values.items()]}
    return values


def _below(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _encoded_tensor(state: torch.Tensor, path: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    if state.layout is not torch.strided or state.is_meta or state.is_quantized:
        raise CheckpointError(
            f"{path} is not a dense tensor ({state.layout}, {state.device}); make it dense to save it"
        )
    key = path if path not in tensors else f"{path}#{len(tensors)}"  # keys 1 and "1" of one dict have one path
    tensors[key] = state.detach()
    return {_TAG: "tensor", "key": key}


def _decoded_tensor(tree: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | TensorRef:
    try:
        return tensors[tree["key"]]
    except KeyError:
        raise CheckpointError(
            f"the checkpoint lacks the tensor {tree['key']!r}; it is damaged: use another one"
        ) from None


def _decoded_dict(tree: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[Any, Any]:
    return {unflatten(key, tensors): unflatten(value, tensors) for key, value in tree["items"]}


_DECODERS: dict[str, Callable[[dict[str, Any], Mapping[str, torch.Tensor]], Any]] = {
    "tensor": _decoded_tensor,
    "float": lambda tree, tensors: float(tree["value"]),
    "tuple": lambda tree, tensors: tuple(unflatten(tree["items"], tensors)),
    "dict": _decoded_dict,
    "counter": lambda tree, tensors: Counter(_decoded_dict(tree, tensors)),
}
