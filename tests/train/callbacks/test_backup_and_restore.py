from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.checkpoint.manager import CheckpointManager
from lockstep.errors import CallbackError, CheckpointError, ConfigError
from lockstep.train.callbacks import (
    BackupAndRestore,
    CSVLogger,
    EarlyStopping,
    LambdaCallback,
    ModelCheckpoint,
    TensorBoard,
)
from lockstep.train.callbacks.base import Callback, CallbackList
from lockstep.train.callbacks.checkpoints import SAVED_AND_STOPPED
from lockstep.train.model import Model

Batches = list[tuple[Tensor, Tensor]]


@pytest.fixture
def received() -> Iterator[list[int]]:
    """The signals that a handler of the caller's own receives."""
    signals: list[int] = []
    former = signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    yield signals
    signal.signal(signal.SIGTERM, former)


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interactive session, in which backups are removed at the end of fit."""
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def terminate(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_the_code_can_be_one_that_another_scheduler_takes_for_transient(model: Model, batches: Batches, tmp_path: Path):
    backup = BackupAndRestore(tmp_path, exit_code=138)
    with pytest.raises(SystemExit) as ended:
        model.fit(batches, callbacks=[LambdaCallback(on_train_batch_begin=terminate), backup], verbose=0)
    assert ended.value.code == 138


def test_sigterm_saves_after_the_next_batch_and_ends_with_the_stated_code(
    model: Model, batches: Batches, tmp_path: Path, received: list[int], capsys: pytest.CaptureFixture[str]
):
    mine = signal.getsignal(signal.SIGTERM)
    callbacks = [
        LambdaCallback(on_train_batch_begin=lambda batch, logs: terminate() if batch == 1 else None),
        BackupAndRestore(tmp_path),
    ]

    with pytest.raises(SystemExit) as ended:
        model.fit(batches, epochs=2, callbacks=callbacks, verbose=0)

    assert ended.value.code == SAVED_AND_STOPPED == 75
    assert names(tmp_path) == ["step-00000002"]
    said = f"SIGTERM: saved epoch 1, 2 batches done to {tmp_path / 'step-00000002'}; start again to go on\n"
    assert capsys.readouterr().out == said
    assert signal.getsignal(signal.SIGTERM) is mine
    assert received == []

    model.fit(batches, epochs=2, callbacks=[BackupAndRestore(tmp_path)], verbose=2)

    assert f"going on from {tmp_path / 'step-00000002'}: epoch 1, 2 batches done\n" in capsys.readouterr().out
    assert model.training_state.position.step == 6


def test_sigterm_during_the_validation_saves_at_the_end_of_the_epoch(
    model: Model, batches: Batches, tmp_path: Path, received: list[int]
):
    class Terminate(LambdaCallback):
        def on_test_begin(self, logs: Any) -> None:
            terminate()

    with pytest.raises(SystemExit):
        model.fit(
            batches,
            validation_data=batches,
            epochs=2,
            callbacks=[Terminate(), BackupAndRestore(tmp_path, False)],
            verbose=0,
        )

    assert names(tmp_path) == ["step-00000003"]
    assert received == []


class Settings(Callback):
    """Goes on from a run with its own settings alone."""

    def __init__(self, value: int) -> None:
        super().__init__()
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        if state != self.state_dict():
            raise CheckpointError(f"the backup has {state}")


def test_a_callback_refuses_a_backup_before_weights_are_compared_or_loaded(
    model: Model, batches: Batches, tmp_path: Path
):
    backup = BackupAndRestore(tmp_path, delete_checkpoint=False)
    model.fit(batches, callbacks=[backup, Settings(1)], verbose=0)
    model.fit(batches, verbose=0)
    before, other = model.module.weight.tolist(), Model(nn.Linear(3, 2))
    other.compile(lambda parameters: torch.optim.SGD(parameters, 0.1), "mse")

    for refused in (other, model):  # whose weights have other shapes, and whose weights fit
        with pytest.raises(CheckpointError, match=r"the backup has \{'value': 1\}"):
            refused.fit(batches, callbacks=[backup, Settings(2)], verbose=0)
    assert model.module.weight.tolist() == before


def test_sigterm_when_training_has_ended_goes_to_whom_it_belonged(
    model: Model, batches: Batches, tmp_path: Path, received: list[int]
):
    callbacks = [LambdaCallback(on_train_end=terminate), BackupAndRestore(tmp_path / "backup")]
    model.fit(batches, callbacks=callbacks, verbose=0)
    assert received == [signal.SIGTERM]
    model.fit(batches, callbacks=[BackupAndRestore(tmp_path / "backup")], verbose=0)  # nobody asks this one to end


def test_the_former_handler_is_back_after_an_error(model: Model, batches: Batches, tmp_path: Path, received: list[int]):
    mine = signal.getsignal(signal.SIGTERM)

    def fail(epoch: int, logs: Any) -> None:
        assert signal.getsignal(signal.SIGTERM) is not mine
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.fit(batches, callbacks=[LambdaCallback(on_epoch_end=fail), BackupAndRestore(tmp_path / "b")], verbose=0)

    assert signal.getsignal(signal.SIGTERM) is mine


def test_another_thread_than_the_main_one_trains_without_listening(model: Model, batches: Batches, tmp_path: Path):
    mine = signal.getsignal(signal.SIGTERM)
    seen: list[Any] = []
    look = LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(
        target=lambda: model.fit(batches, callbacks=[look, BackupAndRestore(tmp_path / "b")], verbose=0)
    )
    thread.start()
    thread.join()

    assert seen == [mine]


@pytest.mark.parametrize(
    ("freq", "steps"), [("epoch", [3, 6]), (1, [1, 2, 3, 4, 5, 6]), (2, [2, 4, 6]), (4, [4]), (False, [])]
)
def test_it_saves_as_often_as_told(
    model: Model, batches: Batches, tmp_path: Path, freq: Any, steps: list[int], monkeypatch: pytest.MonkeyPatch
):
    saved: list[int] = []
    save: Callable[..., Path] = CheckpointManager.save
    monkeypatch.setattr(CheckpointManager, "save", lambda self, step: (saved.append(step), save(self, step))[1])
    model.fit(batches, epochs=2, callbacks=[BackupAndRestore(tmp_path / "b", freq, delete_checkpoint=False)], verbose=0)
    assert saved == steps
    assert not (tmp_path / "b").exists() or names(tmp_path / "b") == [f"step-{steps[-1]:08d}"]


def test_it_comes_after_the_others_wherever_it_stands(model: Model, tmp_path: Path):
    backup, stopping = BackupAndRestore(tmp_path / "b"), EarlyStopping()
    order: list[str] = []
    backup.on_epoch_end = lambda epoch, logs: order.append("BackupAndRestore")  # type: ignore[method-assign]
    stopping.on_epoch_end = lambda epoch, logs: order.append("EarlyStopping")  # type: ignore[method-assign]
    CallbackList([backup, stopping], model=model, params={}).call("on_epoch_end", 0)
    assert order == ["EarlyStopping", "BackupAndRestore"]


def test_states_go_back_to_callbacks_of_their_kind(model: Model):
    first = CallbackList([EarlyStopping(), EarlyStopping(patience=3)], model=model, params={})
    named = first.state_dict()
    assert named.keys() == {"EarlyStopping", "EarlyStopping 2"}
    second = [EarlyStopping(), LambdaCallback()]
    CallbackList(second, model=model, params={}).load_state_dict(
        {**named, "EarlyStopping": {**named["EarlyStopping"], "wait": 2, "best": 0.5}}
    )
    assert (second[0].wait, second[0].best) == (2, 0.5)  # type: ignore[attr-defined]


@pytest.mark.parametrize("freq", [0, -1, True, 1.5, "batch", None])
def test_an_unknown_frequency_is_refused(freq: Any):
    with pytest.raises(ConfigError, match=r"BackupAndRestore\(save_freq=.*\); give 'epoch', a number of batches, or"):
        BackupAndRestore("backup", save_freq=freq)


@pytest.mark.parametrize("make", [BackupAndRestore, ModelCheckpoint, CSVLogger, TensorBoard])
@pytest.mark.parametrize("path", ["", "  ", b"", None])
def test_an_empty_path_is_refused_not_taken_for_the_working_directory(make: Callable[[Any], Any], path: Any):
    with pytest.raises(ConfigError, match=make.__name__):
        make(path)


@pytest.mark.usefixtures("session")
def test_at_the_end_it_removes_its_own_folders_alone(model: Model, batches: Batches, tmp_path: Path):
    CheckpointManager(model.checkpoint(), tmp_path).save(1)
    (tmp_path / "step-00000002").mkdir()
    (tmp_path / "step-00000002" / "notes").write_text("of an experiment")
    with pytest.warns(UserWarning, match="step-00000002 is not a checkpoint"):
        model.fit(batches, epochs=3, callbacks=[BackupAndRestore(tmp_path, save_freq=4)], verbose=0)
    assert model.training_state.position.step > 4
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    assert (tmp_path / "step-00000002" / "notes").read_text() == "of an experiment"


@pytest.mark.usefixtures("session")
def test_the_checkpoints_of_another_callback_stay(model: Model, batches: Batches, tmp_path: Path):
    kept = ModelCheckpoint(tmp_path, save_weights_only=False, save_freq=2, monitor="loss")
    model.fit(batches, epochs=2, callbacks=[kept, BackupAndRestore(tmp_path, save_freq=5)], verbose=0)
    assert names(tmp_path) == ["step-00000002", "step-00000004", "step-00000006"]


@pytest.mark.parametrize("theirs", ["a checkpoint", "anything else"])
def test_what_it_did_not_make_is_not_replaced(model: Model, batches: Batches, tmp_path: Path, theirs: str):
    def put(batch: int, logs: Any) -> None:
        if batch == 1 and theirs == "a checkpoint":
            CheckpointManager(model.checkpoint(), tmp_path).save(3)
        elif batch == 1:
            (tmp_path / "step-00000003").mkdir()
            (tmp_path / "step-00000003" / "notes").touch()

    callbacks = [LambdaCallback(on_train_batch_end=put), BackupAndRestore(tmp_path)]
    with pytest.raises(CheckpointError, match="step-00000003"):
        model.fit(batches, callbacks=callbacks, verbose=0)

    assert names(tmp_path / "step-00000003") != []


@pytest.mark.parametrize("made", [True, False])
@pytest.mark.usefixtures("session")
def test_a_folder_that_was_there_before_stays(model: Model, batches: Batches, tmp_path: Path, made: bool):
    folder = tmp_path / "backup"
    if not made:
        folder.mkdir()

    def fail(epoch: int, logs: Any) -> None:
        assert names(folder) == ["step-00000003"]
        raise KeyError

    with pytest.raises(CallbackError):
        model.fit(
            batches,
            epochs=2,
            callbacks=[
                BackupAndRestore(folder),
                LambdaCallback(on_epoch_begin=lambda e, logs: fail(e, logs) if e else None),
            ],
            verbose=0,
        )
    model.fit(batches, epochs=2, callbacks=[BackupAndRestore(folder)], verbose=0)

    assert folder.exists() is not made
    assert made or names(folder) == []


@pytest.mark.usefixtures("session")
def test_the_working_directory_may_be_meant(
    model: Model, batches: Batches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    model.fit(batches, callbacks=[BackupAndRestore(".", save_freq=1)], verbose=0)
    assert names(tmp_path) == []


def fitted(folder: Path, batches: Batches, **settings: Any) -> Model:
    torch.manual_seed(0)
    model = Model(nn.Linear(3, 1))
    model.compile(optimizer=torch.optim.SGD(model.module.parameters(), 0.1), loss=nn.functional.mse_loss)
    model.fit(batches, callbacks=[BackupAndRestore(folder, **settings)], verbose=0)
    return model


def test_the_backup_stays_as_long_as_the_result_may_be_unsaved(batches: Batches, tmp_path: Path):
    module = fitted(tmp_path / "b", batches).module
    gc.collect()
    assert names(tmp_path / "b") == ["step-00000003"]
    del module
    gc.collect()
    assert not (tmp_path / "b").exists()


def test_the_next_fit_does_not_take_an_ended_one_for_interrupted(batches: Batches, tmp_path: Path):
    first = fitted(tmp_path / "b", batches)
    second = fitted(tmp_path / "b", batches, save_freq=2)
    assert names(tmp_path / "b") == ["step-00000002"]
    assert second.training_state.run != first.training_state.run


ENDING = """
import os, signal, sys
import torch, lockstep as ls
steps = []
with ls.MirroredStrategy(["cpu:0"]).scope():
    module = torch.nn.Linear(2, 1)
    model = ls.Model(module)
    model.compile(torch.optim.SGD(module.parameters(), 0.1), torch.nn.functional.mse_loss)
count = ls.LambdaCallback(on_train_batch_end=lambda batch, logs: steps.append(batch))
model.fit([(torch.ones(2, 2), torch.ones(2, 1))] * 3, callbacks=[count, ls.BackupAndRestore("backup")], verbose=0)
os.chdir("/")
print(len(steps), flush=True)
exec(sys.argv[1])
"""


@pytest.mark.slow
def test_what_a_program_had_trained_when_it_failed_before_it_saved_is_not_lost(tmp_path: Path):
    def run(ending: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", ENDING, ending],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        return done.stdout.strip()

    assert run("os.kill(os.getpid(), signal.SIGKILL)") == "3"
    assert run("raise RuntimeError") == "0"
    assert names(tmp_path / "backup") == ["step-00000003"]
    assert run("") == "0"
    assert names(tmp_path) == []


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "read only"
    folder.mkdir()
    if os.geteuid() != 0:
        folder.chmod(0o500)
        yield folder
        return
    mount = ["mount", "-t", "tmpfs", "-o", "ro", "none", folder]  # permissions do not hold root back
    if (mounted := subprocess.run(mount, capture_output=True, text=True, check=False)).returncode:
        pytest.skip(f"mounting is not permitted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: BackupAndRestore(folder),
        lambda folder: BackupAndRestore(folder / "deeper" / "backup"),
        lambda folder: ModelCheckpoint(folder / "{epoch}.safetensors"),
        lambda folder: ModelCheckpoint(folder / "kept", save_weights_only=False),
    ],
)
def test_a_folder_that_cannot_be_written_to_is_told_before_anything_is_trained(
    model: Model, batches: Batches, read_only: Path, make: Callable[[Path], Any]
):
    trained: list[int] = []
    look = LambdaCallback(on_train_batch_begin=lambda batch, logs: trained.append(batch))
    with pytest.raises(CheckpointError, match=r"read only.* cannot be written to"):
        model.fit(batches, callbacks=[look, make(read_only)], verbose=0)
    assert trained == []


def test_looking_whether_a_folder_can_be_written_to_leaves_nothing(model: Model, batches: Batches, tmp_path: Path):
    seen: list[list[str]] = []
    look = LambdaCallback(on_train_batch_begin=lambda batch, logs: seen.append(names(tmp_path)))
    model.fit(batches[:1], callbacks=[BackupAndRestore(tmp_path / "a" / "b", save_freq=False), look], verbose=0)
    assert seen == [[]]
