"""A weights file has the format that its suffix names, or the suffix is refused; load_weights reads both formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import lockstep as ls
from lockstep.errors import CheckpointError, ConfigError
from lockstep.train.callbacks import ModelCheckpoint
from lockstep.train.model import Model


def make_model() -> Model:
    return Model(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))


@pytest.fixture
def model() -> Model:
    return make_model()


def values_of(state: dict[str, Any]) -> dict[str, list[Any]]:
    return {name: tensor.tolist() for name, tensor in state.items()}


@pytest.mark.parametrize("name", ["w.pt", "w.pth", "W.PT", "pytorch_model.bin"])
def test_torch_reads_what_is_saved_under_its_suffixes(name: str, model: Model, tmp_path: Path):
    model.save_weights(tmp_path / name)
    assert values_of(torch.load(tmp_path / name, weights_only=True)) == values_of(model.module.state_dict())
    other = make_model()
    other.load_weights(tmp_path / name)
    assert values_of(other.state_dict()) == values_of(model.state_dict())


@pytest.mark.parametrize("name", ["w.safetensors", "w", "w-0.123", "w.st", "w.weights"])
def test_other_names_are_safetensors(name: str, model: Model, tmp_path: Path):
    model.save_weights(tmp_path / name)
    assert values_of(load_file(tmp_path / name)) == values_of(model.module.state_dict())
    make_model().load_weights(tmp_path / name)


@pytest.mark.parametrize("name", ["w.h5", "w.weights.h5", "w.keras", "W.H5", "w.ckpt", "w.npz", "w.onnx", "w.pkl"])
def test_suffixes_of_other_formats_are_refused_before_anything_is_trained(name: str, model: Model, tmp_path: Path):
    for refused in (lambda: model.save_weights(tmp_path / name), lambda: ModelCheckpoint(tmp_path / name)):
        with pytest.raises(ConfigError, match=r"call the file [wW]\.safetensors, or [wW]\.pt"):
            refused()
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_folder_may_be_called_as_it_likes_but_for_names_of_keras(tmp_path: Path):
    ModelCheckpoint(tmp_path / "run.ckpt", save_weights_only=False)
    with pytest.raises(ConfigError, match=r"best\.safetensors"):
        ModelCheckpoint(tmp_path / "best.keras", save_weights_only=False)


def test_the_best_weights_of_a_training_are_in_the_format_of_their_name(tmp_path: Path):
    model = Model(nn.Linear(3, 1))
    model.compile(torch.optim.SGD(model.module.parameters(), 0.1), "mse")
    model.fit(torch.ones(4, 3), torch.ones(4, 1), callbacks=[ModelCheckpoint(tmp_path / "w-{epoch}.pt")], verbose=0)
    assert values_of(torch.load(tmp_path / "w-1.pt", weights_only=True)) == values_of(model.module.state_dict())


def test_weights_of_another_program_are_read_whatever_their_name(model: Model, tmp_path: Path):
    state = model.module.state_dict()
    torch.save(state, tmp_path / "saved.safetensors")
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    model.save_weights(tmp_path / "w.safetensors")
    (tmp_path / "w.safetensors").rename(tmp_path / "former.pt")  # as earlier versions wrote it

    for name in ("saved.safetensors", "old.pt", "former.pt"):
        other = make_model()
        other.load_weights(tmp_path / name)
        assert values_of(other.state_dict()) == values_of(model.state_dict())


def test_a_view_is_saved_without_what_it_is_a_view_of(tmp_path: Path):
    model = make_model()
    with torch.no_grad():
        model.module[0].weight = nn.Parameter(torch.zeros(1000, 3)[:2])
    model.save_weights(tmp_path / "w.pt")
    assert (tmp_path / "w.pt").stat().st_size < 8000


class Code:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("run",))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (
            {"model": {"a": torch.ones(1)}, "epoch": 3},
            "has the keys model, epoch, expected the tensors of a state_dict",
        ),
        ([torch.ones(1)], "has a list, expected the tensors of a state_dict"),
        (Code(), "cannot read the weights in"),
    ],
)
def test_what_is_no_state_dict_is_refused(content: Any, told: str, model: Model, tmp_path: Path, capsys):
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=told):
        model.load_weights(tmp_path / "w.pt")
    assert capsys.readouterr().out == ""


def test_a_damaged_file_is_refused(model: Model, tmp_path: Path):
    model.save_weights(tmp_path / "w.pt")
    whole = (tmp_path / "w.pt").read_bytes()
    (tmp_path / "w.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="cannot read the weights in"):
        model.load_weights(tmp_path / "w.pt")


def test_checkpoints_are_exported_as_safetensors_alone(tmp_path: Path):
    trained = Model(nn.Linear(3, 1))
    trained.compile(torch.optim.SGD(trained.module.parameters(), 0.1), "mse")
    keep = ModelCheckpoint(tmp_path / "kept", save_weights_only=False)
    trained.fit(torch.ones(4, 3), torch.ones(4, 1), callbacks=[keep], verbose=0)

    ls.export_weights(tmp_path / "kept", tmp_path / "out.safetensors")
    with pytest.raises(ConfigError, match=r"call the file out\.safetensors"):
        ls.export_weights(tmp_path / "kept", tmp_path / "out.pt")
    with pytest.raises(ConfigError, match=r"call the file out\.safetensors"):
        ls.export_weights(tmp_path / "kept", tmp_path / "out.h5")
