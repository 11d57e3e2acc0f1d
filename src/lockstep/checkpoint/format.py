"""The format of one checkpoint: a folder that is written whole, and read only if it is whole.

step-00000120/
  checkpoint.json           the record: all that is not a tensor, and of every other file its size and a checksum
  weights.safetensors       a module's state_dict, plain keys (weights-NAME.safetensors where there are several)
  state/                    all other tensors, in safetensors files

Of a model that is divided among workers ``weights`` is a folder like ``state``, and each worker has written its own
files to both. In the record a nested state is JSON, and the tensors are taken out of it:

    {"lr": 0.1, "mean": tensor}  <->  {"lr": 0.1, "mean": {"#": "tensor", "key": "mean"}} and {"mean": tensor}

What JSON has no type for is an object with the key "#". Nothing here can run code when it is read. A checksum tells
whether the record is what was written: a changed value would fail later, with an error that names no checkpoint.
"""

from __future__ import annotations

import json
import math
import numbers
import stat
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from lockstep.atomic_files import atomic_folder
from lockstep.checkpoint.checksums import damage_of, metadata_with_sums, sum_of_header
from lockstep.checkpoint.sharded_io import write_shards
from lockstep.checkpoint.weights import contiguous_tensors
from lockstep.checks import shown
from lockstep.errors import CheckpointError
from lockstep.extras import require
from lockstep.parallel.tensor_files import TensorReader, TensorShard

FORMAT, VERSION = "lockstep checkpoint", 1
RECORD = "checkpoint.json"
STATE = "state"
SHARED = "shared"
"""The part of a thing's state that is equal on all workers; its tensors' keys begin with the thing's name and this."""
TAG = "#"
"""The key of an object in the record that stands for what JSON has no type for."""


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
    conditions: Mapping[str, str] = field(default_factory=dict)  # what the bits depend on, for people to read


@dataclass(frozen=True, kw_only=True)
class Contents:
    """A checkpoint's record, the states of things by name, as ``flatten`` takes them, and the tensors of each module.

    ``weight_paths`` has, for modules that are not in ``weights``, the file or folder in the checkpoint that has them.
    """

    record: CheckpointRecord
    states: Mapping[str, Any]
    weights: Mapping[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    weight_paths: Mapping[str, str] = field(default_factory=dict)


Fill = Callable[[Contents], None]  # writes contents to the folder of a checkpoint that has been begun


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


def _write_files(folder: Path, contents: Contents) -> str:
    """Writes all files but the record, which it returns."""
    tree, tensors = flatten(dict(contents.states))
    weights: dict[str, str] = {}
    for name, tensors_by_name in contents.weights.items():
        weights[name] = "weights.safetensors" if len(contents.weights) == 1 else f"weights-{name}.safetensors"
        save = require("safetensors.torch", "train").save_file
        contiguous = contiguous_tensors(tensors_by_name)
        save(contiguous, str(folder / weights[name]), metadata=metadata_with_sums(contiguous))
    write_shards({key: TensorShard(tensor) for key, tensor in tensors.items()}, folder / STATE)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != RECORD)
    document = {
        "format": FORMAT,
        "version": VERSION,
        "torch": torch.__version__,
        **flatten(asdict(contents.record))[0],
        "weights": {**weights, **contents.weight_paths},
        "files": {path.relative_to(folder).as_posix(): [path.stat().st_size, sum_of_header(path)] for path in files},
        "state": tree,
    }
    return json.dumps({**document, "checksum": _checksum(document)})


def _checksum(document: Mapping[str, Any]) -> int:
    """The CRC-32 of a record, which is equal before it is written and after it is read."""
    values = {key: value for key, value in document.items() if key != "checksum"}
    return zlib.crc32(json.dumps(values).encode())


def damaged(path: Path, why: str) -> CheckpointError:
    """Returns the error for a checkpoint that is not what was written."""
    return CheckpointError(f"the checkpoint {path} is damaged ({why}); remove it and use the one before it")


def read_record(path: Path) -> CheckpointRecord:
    """Returns a checkpoint's record. Raises CheckpointError if it is missing, damaged, or of a newer version."""
    return _read_document(path)[1]


def run_of(path: Path) -> str | None:
    """Returns the run that a checkpoint belongs to, even if files of it are damaged. None if it names no run."""
    try:
        document = _read_json(path)
    except (OSError, ValueError, RecursionError, CheckpointError):
        return None
    run = document.get("run") if isinstance(document, dict) and document.get("format") == FORMAT else None
    return run if isinstance(run, str) else None


def weights_of(path: Path) -> dict[str, str]:
    """Returns, by module, the files or folders in a checkpoint that have its weights. Raises as ``read_record``."""
    return dict(_read_document(path)[0]["weights"])


def read_checkpoint(path: Path, *, unread: Collection[str] = ()) -> Contents:
    """Reads the checkpoint ``path``, but not the shared tensors of the things named in ``unread``.

    Modules get no weights then; in the states of others a ``TensorRef`` stands for each tensor. Unless things are left
    unread, which workers read who look at them first, all files are compared with their checksums.
    """
    document, record = _read_document(path)
    files: dict[str, str] = document["weights"]
    if not unread and (damage := damage_in(path)):
        raise damaged(path, damage)
    try:
        state = TensorReader(path / STATE)
        unread_keys = [key for key in state.tensors if key.startswith(tuple(f"{name}.{SHARED}." for name in unread))]
        tensors = {**state.read_all(without=unread_keys), **{key: TensorRef(key) for key in unread_keys}}
        weights = {name: TensorReader(path / file).read_all() for name, file in files.items() if name not in unread}
        states: dict[str, Any] = unflatten(document["state"], tensors)
    except Exception as error:
        # The record itself says how it is decoded: with values other than the saved ones any error may be raised.
        read_errors = (OSError, require("safetensors", "train").SafetensorError, ValueError, CheckpointError)
        why = str(error) if isinstance(error, read_errors) else f"{RECORD}: {type(error).__name__}: {error}"
        raise damaged(path, why) from error
    paths = {name: file for name, file in files.items() if name in unread}
    return Contents(record=record, states=states, weights=weights, weight_paths=paths)


def damage_in(path: Path, *, worker: int = 0, workers: int = 1, below: str = "") -> str:
    """What the checksums of a checkpoint's files find, in one worker's part of the files; empty if nothing.

    Args:
        path: the checkpoint.
        worker: which part.
        workers: how many parts.
        below: only the file of this path in the checkpoint, or those in this folder.

    Raises:
        CheckpointError: as ``read_record``.
    """
    read_errors = (OSError, require("safetensors", "train").SafetensorError, ValueError, KeyError, TypeError)
    files = sorted(_read_document(path)[0]["files"].items())
    for file, (_, header_sum) in files[worker::workers]:
        if not below or file == below or file.startswith(f"{below}/"):
            try:
                damage = damage_of(path / file, header_sum)
            except read_errors as error:
                damage = f"{Path(file).name}: {error}"
            if damage:
                return (Path(file).parent / damage).as_posix()
    return ""


def _read_json(path: Path) -> Any:
    """What is in the record's file. Raises OSError, ValueError, RecursionError, or CheckpointError if it is no file."""
    if not stat.S_ISREG((path / RECORD).stat().st_mode):  # reading a pipe would wait for who writes to it
        raise damaged(path, f"{RECORD} is no regular file")
    return json.loads((path / RECORD).read_text(encoding="utf-8"))


def _read_document(path: Path) -> tuple[dict[str, Any], CheckpointRecord]:
    """What is in the record's file, after a check that all files are there in full length."""
    try:
        document = _read_json(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(
            f"{path} is not a checkpoint: it has no {RECORD}; give a folder such as step-00000120, or the one it is in"
        ) from error
    except OSError as error:
        raise CheckpointError(f"cannot read the checkpoint {path}: {error}; make it readable") from error
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"{RECORD}: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of lockstep: its {RECORD} is that of another program")
    if document.get("version") != VERSION:
        raise CheckpointError(
            f"the checkpoint {path} has version {shown(document.get('version'))}, this program reads version "
            f"{VERSION}; use the version of lockstep that wrote it, or load its weights alone"
        )
    names = [field.name for field in fields(CheckpointRecord)]
    if missing := sorted({*names, "weights", "files", "state", "checksum"} - document.keys()):
        raise damaged(path, f"{RECORD} lacks {', '.join(missing)}")
    if document["checksum"] != _checksum(document):
        raise damaged(path, f"the checksum of {RECORD} is not that of its content")
    return document, _checked_record(path, document, names)


def _checked_record(path: Path, document: dict[str, Any], names: list[str]) -> CheckpointRecord:
    try:
        record = CheckpointRecord(**{name: unflatten(document[name], {}) for name in names})
        texts = all(isinstance(text, str) for text in record.conditions.values())
        if outside := [
            path_in_record
            for path_in_record in (*document["files"], *document["weights"].values())
            if _is_outside(path_in_record)
        ]:
            raise damaged(path, f"{RECORD} names {outside[0]!r}, which is outside of the checkpoint")
        for file, (size, _) in document["files"].items():
            if (size_on_disk := (path / file).stat().st_size) != size:
                raise damaged(path, f"{file} has {size_on_disk} bytes instead of {size}")
    except OSError as error:
        raise damaged(path, f"{Path(str(error.filename)).relative_to(path)}: {error.strerror}") from error
    except (AttributeError, TypeError, KeyError, ValueError) as error:
        raise damaged(path, f"{RECORD}: {type(error).__name__}: {error}") from error
    if type(record.step) is not int or not isinstance(record.monitored, float | int | None) or not texts:
        values = f"step={record.step!r}, monitored={record.monitored!r}, conditions={record.conditions!r}"
        raise damaged(path, f"{RECORD}: {values}")
    return record


def _is_outside(file: str) -> bool:
    return Path(file).is_absolute() or ".." in Path(file).parts


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

    The state has None, numbers, strings, tensors and ``TensorRef``s, in lists, tuples, dicts and Counters; a
    CheckpointError names the place of anything else. Returns what ``json.dumps`` can write, and the tensors by key,
    without those that are ``TensorRef``s.
    """
    tensors: dict[str, torch.Tensor] = {}
    return _encoded(state, name, tensors), tensors


def _encoded(state: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if state is None or isinstance(state, (bool, str)):
        return state
    if isinstance(state, torch.Tensor):
        if state.layout is not torch.strided or state.is_meta or state.is_quantized:
            raise CheckpointError(
                f"{path} is not a dense tensor ({state.layout}, {state.device}); make it dense to save it"
            )
        key = path if path not in tensors else f"{path}#{len(tensors)}"  # keys 1 and "1" of one dict have one path
        tensors[key] = state.detach()
        return {TAG: "tensor", "key": key}
    if isinstance(state, TensorRef):
        return {TAG: "tensor", "key": state.key}
    if isinstance(state, numbers.Integral):
        return int(state)
    if isinstance(state, numbers.Real):
        number = float(state)
        return number if math.isfinite(number) else {TAG: "float", "value": str(number)}
    below = f"{path}." if path else ""
    if isinstance(state, Mapping):
        values = {key: _encoded(value, f"{below}{key}", tensors) for key, value in state.items()}
        if not isinstance(state, Counter) and TAG not in values and all(isinstance(key, str) for key in values):
            return values
        items = [[_encoded(key, f"{path}: a key", {}), value] for key, value in values.items()]
        return {TAG: "counter" if isinstance(state, Counter) else "dict", "items": items}
    if isinstance(state, (list, tuple)):
        items = [_encoded(item, f"{below}{place}", tensors) for place, item in enumerate(state)]
        return items if isinstance(state, list) else {TAG: "tuple", "items": items}
    raise CheckpointError(
        f"{path} is a {type(state).__name__}; a checkpoint holds numbers, texts and tensors, in lists, tuples and "
        "dicts: turn it into one of these in state_dict()"
    )


def unflatten(tree: Any, tensors: Mapping[str, Any]) -> Any:
    """Returns the state that ``flatten`` was given. Raises CheckpointError if a tensor is missing or a type unknown."""
    if isinstance(tree, list):
        return [unflatten(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    kind = tree.get(TAG)
    if kind is None:
        return {key: unflatten(value, tensors) for key, value in tree.items()}
    if kind == "tensor":
        try:
            return tensors[tree["key"]]
        except KeyError:
            raise CheckpointError(f"the checkpoint lacks the tensor {tree['key']!r}; use another one") from None
    if kind == "float":
        return float(tree["value"])
    if kind == "tuple":
        return tuple(unflatten(tree["items"], tensors))
    if kind in ("dict", "counter"):
        items = {unflatten(key, tensors): unflatten(value, tensors) for key, value in tree["items"]}
        return Counter(items) if kind == "counter" else items
    raise CheckpointError(f"the checkpoint holds a {kind!r}, which this version does not know; use a newer one")
