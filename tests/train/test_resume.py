"""A fit that fails in its middle, and one that goes on from its backup: bit-equal to one that never failed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.conftest import MakeStrategy
from tests.train.programs.resumable import Noisy, Tell, train
from torch import nn

import lockstep as ls
from lockstep.errors import CallbackError, CheckpointError, UsageError
from lockstep.strategies.mirrored import MirroredStrategy
from lockstep.train.model import Model


class Failure(Exception):
    pass


def failing_at(place: tuple[int, int]) -> Tell:
    def hear(now: tuple[int, int]) -> None:
        if now == place:
            raise Failure

    return Tell(hear)


def interrupted(strategy: MirroredStrategy | None, folder: Path, place: tuple[int, int], freq: Any, **kw: Any) -> None:
    with pytest.raises(CallbackError, match="Failure"):
        train(strategy, [ls.BackupAndRestore(folder, save_freq=freq), failing_at(place)], **kw)


def state(model: Model) -> dict[str, torch.Tensor]:
    buffers = {
        f"{number} {name}": value
        for number, own in enumerate(model.strategy.mirrored_modules[-1].copies)
        for name, value in own.named_buffers()
    }
    return {name: value.clone() for name, value in {**model.state_dict(), **buffers}.items()}


def far(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max((one[name].double() - other[name].double()).abs().max().item() for name in one)


@pytest.mark.parametrize(
    ("freq", "place", "settings"),
    [
        ("epoch", (1, 3), {}),
        (1, (0, 2), {}),
        (2, (2, 0), {}),
        (5, (1, 1), {}),  # the last batch of an epoch: what is left of it is its validation
        (1, (1, 3), {"accumulate": 2}),  # saves wait for the update
        (3, (1, 3), {"accumulate": 3}),
        (1, (1, 2), {"steps_per_epoch": 4}),  # epochs that begin in the middle of an iteration
        ("epoch", (2, 1), {"steps_per_epoch": 7}),
    ],
)
@pytest.mark.parametrize("replicas", [0, 2])
def test_going_on_is_bit_equal_to_never_having_stopped(
    make_strategy: MakeStrategy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    replicas: int,
    freq: Any,
    place: tuple[int, int],
    settings: Any,
):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)  # a session, in which the backup goes when fit ends
    make = (lambda: make_strategy(replicas, seed=1)) if replicas else (lambda: None)
    model, history = train(make(), [], **settings)
    expected, drawn = state(model), torch.rand(3)

    interrupted(make(), tmp_path / "backup", place, freq, **settings)
    torch.rand(7)
    resumed, record = train(make(), [ls.BackupAndRestore(tmp_path / "backup", save_freq=freq)], **settings)

    assert far(state(resumed), expected) == 0
    assert record.history == history.history
    assert record.epoch == history.epoch
    assert torch.equal(torch.rand(3), drawn)
    assert not (tmp_path / "backup").exists()


def test_times_of_a_resumed_epoch_are_those_of_its_steps_after_that(tmp_path: Path):
    interrupted(None, tmp_path, (1, 3), 1)  # of 5 batches, the last of 2 rows

    _, record = train(None, [ls.BackupAndRestore(tmp_path, save_freq=1)])

    assert [(timing.steps, timing.examples) for timing in record.timing] == [(5, 22), (2, 7), (5, 22)]


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 1)])
def test_on_other_replicas_the_numbers_are_those_of_one_device(
    make_strategy: MakeStrategy, tmp_path: Path, before: int, after: int
):
    model, history = train(make_strategy(1, seed=1), [], exact=True)
    interrupted(make_strategy(before, seed=1), tmp_path, (1, 2), 1, exact=True)
    resumed, record = train(make_strategy(after, seed=1), [ls.BackupAndRestore(tmp_path, save_freq=1)], exact=True)
    assert far(state(resumed), state(model)) < 1e-12
    for name, values in history.history.items():
        assert record.history[name] == pytest.approx(values, rel=1e-12), name


def test_the_resumed_run_is_that_of_a_plain_loop(make_strategy: MakeStrategy, tmp_path: Path):
    interrupted(make_strategy(2, seed=1), tmp_path, (1, 2), 2, exact=True)
    resumed, _ = train(make_strategy(2, seed=1), [ls.BackupAndRestore(tmp_path, save_freq=2)], exact=True)

    torch.manual_seed(3)
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Identity(), nn.Flatten(), nn.Linear(16, 3)).double()
    optimizer = torch.optim.AdamW(network.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=60)
    data = torch.utils.data.DataLoader(Noisy(0.0), 5, shuffle=True)
    validation = torch.utils.data.DataLoader(Noisy(0.0), 22)
    losses, best = [], {}
    for _ in range(3):
        for x, y in data:
            F.cross_entropy(network(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        with torch.no_grad():
            losses += [F.cross_entropy(network(x), y).item() for x, y in validation]
        if losses[-1] == min(losses):
            best = {name: value.clone() for name, value in network.state_dict().items()}

    assert far(resumed.state_dict(), best) < 1e-12


def test_a_training_that_was_stopped_early_stays_stopped(make_strategy: MakeStrategy, tmp_path: Path):
    class Stop(ls.Callback):
        def on_epoch_end(self, epoch: int, logs: Any) -> None:
            self.model.stop_training = True

    backup = ls.BackupAndRestore(tmp_path, delete_checkpoint=False)
    train(make_strategy(2, seed=1), [Stop(), backup])
    model, history = train(make_strategy(2, seed=1), [ls.BackupAndRestore(tmp_path, delete_checkpoint=False)])

    assert history.epoch == [0]
    assert model.training_state.position.step == 5


def test_callbacks_go_on_with_what_they_had_seen(make_strategy: MakeStrategy, tmp_path: Path):
    def stopping() -> ls.EarlyStopping:
        return ls.EarlyStopping("val_loss", mode="max", patience=1)  # it falls, so the second epoch is the last

    interrupted(make_strategy(2, seed=1), tmp_path, (1, 2), 1, stopping=stopping())
    _, history = train(make_strategy(2, seed=1), [ls.BackupAndRestore(tmp_path, 1)], stopping=stopping())

    assert history.epoch == [0, 1]


def test_a_finished_training_goes_on_when_more_epochs_are_asked_for(make_strategy: MakeStrategy, tmp_path: Path):
    whole, history = train(make_strategy(2, seed=1), [], epochs=3)
    expected = state(whole)
    train(make_strategy(2, seed=1), [ls.BackupAndRestore(tmp_path, delete_checkpoint=False)], epochs=2)
    assert len(list(tmp_path.iterdir())) == 1
    resumed, record = train(make_strategy(2, seed=1), [ls.BackupAndRestore(tmp_path)], epochs=3)
    # The best weights were loaded at the end of the first two epochs; they are not in the backup of the last one.
    assert record.history == history.history
    assert far(state(resumed), expected) == 0


def test_a_damaged_backup_is_named_and_training_does_not_begin_anew(make_strategy: MakeStrategy, tmp_path: Path):
    interrupted(make_strategy(2, seed=1), tmp_path, (1, 2), 1)
    (path,) = tmp_path.iterdir()
    (path / "checkpoint.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"step-\d+ is damaged \(checkpoint\.json: "):
        train(make_strategy(2, seed=1), [ls.BackupAndRestore(tmp_path)])


OTHER_TYPES: list[tuple[str, Any]] = [
    ("step", "7"),
    ("replicas", 2),
    ("monitored", {"#": []}),
    ("files", []),
    ("state", None),
    ("state.model", "text"),
    ("state.model.replicas.0", []),
    ("state.optimizer.shared.state.state", 7),
    ("state.optimizer.shared.state.state.items.0", [1, "text"]),
    ("state.optimizer.shared.state.state.items.0.1.step", "text"),
    ("state.optimizer.shared.state.state.items.0.1.exp_avg.key", {}),
    ("state.optimizer.shared.state.param_groups.0.lr", "text"),
    ("state.optimizer.shared.state.param_groups.0.betas.items", []),
    ("state.optimizer.shared.state.param_groups.0.params", []),
    ("state.scheduler.shared.state.last_epoch", None),
    ("state.scheduler.shared.state._schedule_phases.0.end_step", {}),
    ("state.training.shared.position.epoch", "text"),
    ("state.training.shared.history.history.loss", 7),
    ("state.training.shared.history.timing.0.seconds", None),
    ("state.training.shared.loss.1", []),
    ("state.training.shared.callbacks.EarlyStopping", "text"),
    ("state.training.shared.callbacks.EarlyStopping.best", {}),
    ("state.training.shared.callbacks.ModelCheckpoint.best", "text"),
    ("state.training.shared.callbacks.Count.count", "text"),
    ("state.training.replicas.1.accuracy.0.states.tp", []),
    ("state.training.replicas.1.accuracy.0.updates", "text"),
    ("state.training.workers.0.epoch", None),
    ("state.training.workers.0.random.python", 7),
    ("state.random.workers", None),
    ("state.random.workers.0.replicas", []),
    ("state.random.workers.0.process.torch", "text"),
]


class Count(ls.Callback):
    """A user's own callback, whose state is a number."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Any) -> None:
        self.count = int(state["count"])


def with_another_type(record: Path, place: str, value: Any) -> None:
    """Writes ``value`` where a record has something else."""
    document = json.loads(record.read_text())
    *way, last = place.split(".")
    at = document
    for key in way:
        at = at[int(key) if isinstance(at, list) else key]
    at[int(last) if isinstance(at, list) else last] = value
    record.write_text(json.dumps(document))


@pytest.fixture
def two_backups(make_strategy: MakeStrategy, tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder with the backups after batches 11 and 12, and the state of a training that was not interrupted."""
    model, _ = train(make_strategy(2, seed=1), [])
    expected = state(model)
    with pytest.raises(CallbackError, match="Failure"):
        train(make_strategy(2, seed=1), [*with_states(tmp_path / "backup"), failing_at((2, 1))])
    return tmp_path / "backup", expected


def with_states(folder: Path) -> list[ls.Callback]:
    backup = ls.BackupAndRestore(folder, save_freq=1, double_checkpoint=True)
    return [ls.ModelCheckpoint(f"{folder}-weights", save_weights_only=True), Count(), backup]


@pytest.mark.slow
@pytest.mark.parametrize(("place", "value"), OTHER_TYPES)
def test_a_record_with_values_of_another_type_is_passed_over_by_name(
    place: str, value: Any, two_backups: tuple[Path, dict[str, torch.Tensor]], make_strategy: MakeStrategy
):
    folder, expected = two_backups
    _, newest = sorted(folder.iterdir())
    with_another_type(newest / "checkpoint.json", place, value)
    with pytest.warns(UserWarning, match=newest.name):
        resumed, _ = train(make_strategy(2, seed=1), with_states(folder))
    assert far(state(resumed), expected) == 0


def test_where_every_record_has_values_of_another_type_the_error_names_one(
    two_backups: tuple[Path, dict[str, torch.Tensor]], make_strategy: MakeStrategy
):
    folder, _ = two_backups
    older, newest = sorted(folder.iterdir())
    for path in (older, newest):
        with_another_type(path / "checkpoint.json", "state.training.shared.position.epoch", "text")

    with (
        pytest.warns(UserWarning, match=newest.name),
        pytest.raises(CheckpointError, match=rf"{older.name} is damaged.*checksum"),
    ):
        train(make_strategy(2, seed=1), with_states(folder))


def test_two_backups_are_kept_on_request(make_strategy: MakeStrategy, tmp_path: Path):
    backup = ls.BackupAndRestore(tmp_path, save_freq=1, double_checkpoint=True)
    with pytest.raises(CallbackError, match="Failure"):
        train(make_strategy(2, seed=1), [backup, failing_at((1, 2))])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000006", "step-00000007"]


def test_a_save_inside_an_accumulation_cycle_is_refused(make_strategy: MakeStrategy, tmp_path: Path):
    model = None

    class Save(ls.Callback):
        def on_train_batch_end(self, batch: int, logs: Any) -> None:
            ls.CheckpointManager(self.model.checkpoint(), tmp_path).save(batch)

    with pytest.raises(CallbackError, match="cannot hold the gradients of an accumulation cycle"):
        train(make_strategy(2, seed=1), [Save()], accumulate=2)
    assert model is None
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_an_optimizer_has_no_checkpoint(make_strategy: MakeStrategy):
    with make_strategy(1).scope():
        model = Model(nn.Linear(1, 1))
    with pytest.raises(UsageError, match=r"checkpoint.*model\.compile\(optimizer"):
        model.load_checkpoint("folder")
