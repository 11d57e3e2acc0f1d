from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import lockstep as ls
from lockstep.checkpoint.folder import CheckpointFolder
from lockstep.checkpoint.format import CheckpointRecord, Contents
from lockstep.checkpoint.weights import stream_weights
from lockstep.errors import CheckpointError

WEIGHTS = {
    "bias": torch.tensor(0.5, dtype=torch.bfloat16),
    "mask": torch.tensor([True, False, True]),
    "weight": torch.randn(3, 5),
    "empty": torch.empty(0, 4),
    "numbers": torch.arange(4),
}


def written(folder: Path, step: int, **modules: dict[str, torch.Tensor]) -> Path:
    record = CheckpointRecord(step=step, run="a", replicas=(1,))
    return CheckpointFolder(folder).write(Contents(record=record, states={}, weights=modules))


def test_a_file_written_in_any_order_is_what_safetensors_reads(tmp_path: Path):
    path = tmp_path / "deep" / "model.safetensors"
    blank = {name: torch.empty_like(value, device="meta") for name, value in WEIGHTS.items()}

    stream_weights(path, blank, reversed(WEIGHTS.items()))

    found = load_file(path)
    assert {name: value.dtype for name, value in found.items()} == {name: each.dtype for name, each in WEIGHTS.items()}
    assert all(torch.equal(found[name], value) for name, value in WEIGHTS.items())
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert [each.name for each in path.parent.iterdir()] == ["model.safetensors"]


def test_a_stream_that_fails_leaves_the_file_of_before(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"before")

    def broken() -> object:
        yield "a", torch.ones(2)
        raise CheckpointError("broken")

    with pytest.raises(CheckpointError, match="broken"):
        stream_weights(path, {"a": torch.empty(2, device="meta")}, broken())  # type: ignore[arg-type]
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_type_without_a_word_is_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"a is torch\.complex128, which safetensors does not have"):
        stream_weights(tmp_path / "f", {"a": torch.empty(2, dtype=torch.complex128, device="meta")}, [])


def test_the_newest_checkpoint_is_exported(tmp_path: Path):
    written(tmp_path, 1, model={"weight": torch.zeros(2)})
    newest = written(tmp_path, 2, model=WEIGHTS)

    assert ls.export_weights(tmp_path, tmp_path / "out" / "model.safetensors") == newest
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["weight"], WEIGHTS["weight"])


def test_of_several_modules_one_is_named(tmp_path: Path):
    path = written(tmp_path, 1, generator={"a": torch.zeros(2)}, critic={"a": torch.ones(2)})

    with pytest.raises(CheckpointError, match="no weights of module=None; it has: 'critic', 'generator'"):
        ls.export_weights(path, tmp_path / "f")
    ls.export_weights(path, tmp_path / "f", module="critic")
    assert load_file(tmp_path / "f")["a"].tolist() == [1, 1]


def test_no_checkpoint_is_told(tmp_path: Path):
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        ls.export_weights(tmp_path, tmp_path / "f")


def test_damaged_weights_are_named_and_those_of_the_older_checkpoint_are_exported(tmp_path: Path):
    older = written(tmp_path, 1, model=WEIGHTS)
    newest = written(tmp_path, 2, model={"weight": torch.zeros(2)})
    flip_the_last_bit(newest / "weights.safetensors")

    with pytest.warns(UserWarning, match=r"step-00000002 is damaged \(weights.safetensors: the checksum of 'weight'"):
        assert ls.export_weights(tmp_path, tmp_path / "f") == older
    assert load_file(tmp_path / "f").keys() == WEIGHTS.keys()

    with pytest.raises(CheckpointError, match=r"step-00000002 is damaged \(weights.safetensors: the checksum of"):
        ls.export_weights(newest, tmp_path / "f")
    flip_the_last_bit(older / "weights.safetensors")
    with (
        pytest.warns(UserWarning, match="step-00000002 is damaged"),
        pytest.raises(CheckpointError, match="step-00000001 is damaged"),
    ):
        ls.export_weights(tmp_path, tmp_path / "f")


def flip_the_last_bit(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
