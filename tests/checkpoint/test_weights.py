from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from lockstep.checkpoint.weights import check_fit, read_weights, write_weights
from lockstep.errors import CheckpointError


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3)
        self.head = nn.Linear(3, 7)
        self.head.weight = self.embed.weight


def test_every_key_of_a_state_dict_is_in_the_file(tmp_path: Path):
    module = Tied()
    conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    whole = torch.arange(12.0)
    views = {"part": whole[2:6], "transposed": whole.view(3, 4).t(), "empty": whole[:0]}
    state = {**module.state_dict(), "conv": conv.weight, **views}
    path = tmp_path / "w.safetensors"

    write_weights(state, path)

    read = read_weights(path)
    assert set(read) == set(state)
    assert all(torch.equal(read[key], state[key].detach()) for key in state)


def test_a_file_in_place_of_the_folder_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match=r"cannot write the weights to .*/file/w: .*; choose a folder"):
        write_weights({"weight": torch.zeros(1)}, tmp_path / "file" / "w")


def test_folders_are_made_and_an_older_file_is_replaced(tmp_path: Path):
    path = tmp_path / "a" / "b" / "w.safetensors"
    write_weights({"x": torch.zeros(2)}, path)
    write_weights({"x": torch.ones(2)}, path)
    assert read_weights(path)["x"].tolist() == [1.0, 1.0]
    assert [file.name for file in path.parent.iterdir()] == ["w.safetensors"]


def test_a_reader_of_the_old_file_never_sees_a_torn_one(tmp_path: Path):
    path = tmp_path / "w.safetensors"
    write_weights({"x": torch.zeros(2)}, path)
    old = path.read_bytes()
    with path.open("rb") as reader:
        write_weights({"x": torch.ones(1000)}, path)
        assert reader.read() == old


def test_the_bytes_are_on_the_disk_before_the_name_and_then_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    events: list[str] = []
    sync, replace = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        events.append(f"sync {Path(f'/proc/self/fd/{descriptor}').readlink().suffix or 'folder'}")
        sync(descriptor)

    def renamed(source: Path, target: Path) -> Path:
        events.append("rename")
        return replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    write_weights({"x": torch.zeros(2)}, tmp_path / "w.safetensors")

    assert events == ["sync .partial", "rename", "sync folder"]


def test_a_write_that_fails_keeps_the_old_file_and_leaves_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "w.safetensors"
    write_weights({"x": torch.zeros(2)}, path)

    def torn(descriptor: int) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", torn)
    with pytest.raises(CheckpointError, match=r"cannot write the weights to .*No space left"):
        write_weights({"x": torch.ones(2)}, path)

    monkeypatch.undo()
    assert read_weights(path)["x"].tolist() == [0.0, 0.0]
    assert [file.name for file in tmp_path.iterdir()] == ["w.safetensors"]


def test_what_is_no_tensor_is_named(tmp_path: Path):
    with pytest.raises(CheckpointError, match="the state has 'extra', a dict"):
        write_weights({"x": torch.zeros(1), "extra": {}}, tmp_path / "w.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_file_is_one_line(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"there is no weights file .*none\.safetensors; give the path"):
        read_weights(tmp_path / "none.safetensors")


def test_a_file_that_is_no_safetensors_is_one_line(tmp_path: Path):
    path = tmp_path / "w.safetensors"
    path.write_bytes(b"no such thing")
    with pytest.raises(CheckpointError, match=r"cannot read the weights in .*give a safetensors file"):
        read_weights(path)


def test_a_truncated_file_is_refused(tmp_path: Path):
    path = tmp_path / "w.safetensors"
    write_weights({"x": torch.zeros(1000)}, path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="cannot read the weights"):
        read_weights(path)


def test_weights_that_do_not_fit_name_keys_and_shapes():
    state = {"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(3, 4)}
    weights = {"a": torch.zeros(2), "c": torch.zeros(4, 3), "d": torch.zeros(1)}

    with pytest.raises(CheckpointError) as raised:
        check_fit(weights, state, "w.safetensors")

    message = str(raised.value)
    assert "missing keys: b;" in message
    assert "unexpected keys: d;" in message
    assert "wrong shapes: c has shape (4, 3) instead of (3, 4);" in message
    assert "\n" not in message


def test_a_long_list_of_faults_is_cut():
    state = {f"layer{i}": torch.zeros(1) for i in range(10)}
    with pytest.raises(CheckpointError, match="layer0, layer1, layer2, layer3 and 6 more"):
        check_fit({}, state, "w.safetensors")


def test_weights_that_fit_pass():
    check_fit({"a": torch.zeros(2)}, {"a": torch.ones(2)}, "w.safetensors")


def test_an_interrupt_while_weights_are_read_stays_one(tmp_path: Path):
    write_weights({f"weight {number}": torch.ones(8, 8) for number in range(200)}, tmp_path / "weights.safetensors")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def read_for(seconds: float) -> bool:
        """Whether the interrupt arrived. Python drops one that comes in a finalizer, so the reading ends by itself."""
        end = time.process_time() + 0.5
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
            while time.process_time() < end:
                read_weights(tmp_path / "weights.safetensors")
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        except KeyboardInterrupt:
            return True
        return False

    before = signal.signal(signal.SIGVTALRM, interrupt)
    try:
        assert sum(read_for(0.002 + number / 10_000) for number in range(50)) > 10  # most are lost on a busy machine
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
