from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from lockstep.checkpoint import sharded_io
from lockstep.checkpoint.sharded_io import write_shards
from lockstep.parallel.tensor_files import TensorReader, TensorShard

WHOLE = torch.arange(12.0)
TENSORS = {
    "float32": torch.randn(3, 4),
    "float64": torch.randn(2).double(),
    "float16": torch.randn(3).half(),
    "bfloat16": torch.randn(3).bfloat16(),
    "float8": torch.randn(4).to(torch.float8_e4m3fn),
    "complex": torch.randn(2, dtype=torch.complex64),
    "bool": torch.tensor([True, False]),
    "uint8": torch.arange(5, dtype=torch.uint8),
    "uint32": torch.tensor([1, 2**32 - 1], dtype=torch.uint32),
    "int64": torch.tensor([2**62]),
    "scalar": torch.tensor(1.5),
    "whole scalar": torch.tensor(3),
    "empty": torch.zeros(0, 3),
    "channels_last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "transposed": WHOLE.view(3, 4).t(),
    "view": WHOLE[2:6],
    "parameter/with.any #name": nn.Parameter(torch.randn(3)),
    "tied": WHOLE,
    "tied too": WHOLE,
}


def write(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    write_shards({key: TensorShard(each) for key, each in tensors.items()}, folder)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.detach().contiguous().view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))


def test_every_kind_of_tensor_comes_back_bit_for_bit(tmp_path: Path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write(TENSORS, tmp_path / "state")
        back = TensorReader(tmp_path / "state").read_all()
    assert back.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert (back[name].dtype, back[name].shape) == (tensor.dtype, tensor.shape), name
        assert same(tensor, back[name]), name


def test_the_files_are_plain_safetensors(tmp_path: Path):
    write({"a": torch.ones(2)}, tmp_path)
    assert [path.suffix for path in tmp_path.iterdir()] == [".safetensors"]
    assert safetensors.torch.load_file(tmp_path / "model-00001.safetensors")["a"].tolist() == [1.0, 1.0]


def test_a_large_state_is_cut_into_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sharded_io, "FILE_BYTES", 100)
    write(TENSORS, tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert TensorReader(tmp_path).read_all().keys() == TENSORS.keys()


def test_no_tensors_make_an_empty_folder(tmp_path: Path):
    write({}, tmp_path / "state")
    assert TensorReader(tmp_path / "state").read_all() == {}
