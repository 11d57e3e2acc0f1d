"""``fit`` among two workers, real processes over gloo: one of them may end it for all, and the chief alone writes.

One job runs everything; each worker is given a folder of its own, so that what it has written can be told apart.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.oracle import assert_close, train
from torch import Tensor, nn

import lockstep as ls
from lockstep.collectives.communicator import all_gather_object
from lockstep.errors import CheckpointError, ClusterError, NonFiniteLossError

pytestmark = pytest.mark.workers

WORKERS, STEPS, EPOCHS = 2, 3, 3
Hook = tuple[str, int]
STOPS: dict[str, tuple[int, Hook, int]] = {  # who stops, where, and with how many batches per update
    "in an epoch, the chief": (0, ("batch", 0), 1),
    "in an epoch, worker 1": (1, ("batch", 0), 1),
    "between updates, worker 1": (1, ("batch", 0), 3),
    "after the last batch, worker 1": (1, ("batch", STEPS - 1), 1),
    "during validation, worker 1": (1, ("test", 0), 1),
    "at the end of an epoch, the chief": (0, ("epoch", 0), 1),
    "at the end of an epoch, worker 1": (1, ("epoch", 0), 1),
    "at the beginning, worker 1": (1, ("train", 0), 1),
}
Batch = tuple[Tensor, Tensor]


class Stop(ls.Callback):
    """Stops the training at one place, on the one worker that has it; notes what every worker knows at an epoch's end.

    The hooks count from 0; "batch" is a batch of any epoch.
    """

    def __init__(self, place: Hook | None) -> None:
        super().__init__()
        self.place = place
        self.known: list[bool] = []

    def on_train_begin(self, logs: Any) -> None:
        self._at("train", 0)

    def on_train_batch_end(self, batch: int, logs: Any) -> None:
        self._at("batch", batch)

    def on_test_end(self, logs: Any) -> None:
        self._at("test", 0)

    def on_epoch_end(self, epoch: int, logs: Any) -> None:
        self.known.append(self.model.stop_training)
        self._at("epoch", epoch)

    def _at(self, hook: str, number: int) -> None:
        if (hook, number) == self.place:
            self.model.stop_training = True


class ChiefStop(Stop):
    chief_only = True


def batches() -> list[Batch]:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(STEPS * 4, 4, generator=random)
    return list(zip(x.split(4), x.sum(1, keepdim=True).split(4), strict=True))


def compiled(strategy: ls.Strategy, accumulate: int = 1, rate: float = 0.05) -> ls.Model:
    torch.manual_seed(1)
    module = nn.Linear(4, 1)
    with strategy.scope():
        model = ls.Model(module)
    model.compile(torch.optim.SGD(module.parameters(), rate), nn.functional.mse_loss, accumulate=accumulate)
    return model


def job(folder: str) -> dict[str, Any]:
    """What every worker has seen of every scene, by scene, in worker order."""
    torch.set_num_threads(1)
    strategy = ls.MultiWorkerMirroredStrategy(["cpu:0"], seed=1, communication=ls.CommunicationOptions(lost_after_s=60))
    workers = strategy.workers
    own = Path(folder, str(workers.index))
    scenes: dict[str, Callable[[], dict[str, Any]]] = {
        **{name: lambda name=name: stopped(strategy, *STOPS[name]) for name in STOPS},  # type: ignore[misc]
        "early": lambda: early(strategy),
        "time of the chief": lambda: limited(strategy, 0),
        "time of worker 1": lambda: limited(strategy, 1),
        "fit again": lambda: fit_again(strategy),
        "after NaN": lambda: after_nan(strategy),
        "callbacks": lambda: callbacks(strategy, own),
        "weights": lambda: weights(strategy, own),
        "labels": lambda: labels(strategy),
        "arrays": lambda: arrays(strategy),
    }
    found = {name: all_gather_object(workers, f"what came of {name}", scene()) for name, scene in scenes.items()}
    strategy.close()
    return found


def record(model: ls.Model, history: ls.History) -> dict[str, Any]:
    return {
        "history": history.history,
        "steps": [timing.steps for timing in history.timing],
        "weights": {name: value.clone() for name, value in model.state_dict().items()},
    }


def stopped(strategy: ls.Strategy, who: int, place: Hook, accumulate: int) -> dict[str, Any]:
    model = compiled(strategy, accumulate)
    here = place if strategy.workers.index == who else None
    seen, chiefs = (Stop(None), [ChiefStop(place)]) if who == 0 else (Stop(here), [])
    history = model.fit(batches(), validation_data=batches()[:1], epochs=EPOCHS, callbacks=[*chiefs, seen], verbose=0)
    return {**record(model, history), "known": seen.known, "stopped": model.stop_training}


def early(strategy: ls.Strategy) -> dict[str, Any]:
    model = compiled(strategy, rate=10.0)  # it gets worse, until it overflows
    stop = ls.EarlyStopping("val_loss", patience=1, restore_best_weights=True)
    history = model.fit(batches(), validation_data=batches()[:1], epochs=EPOCHS + 2, callbacks=[stop], verbose=0)
    validated = model.evaluate(batches()[:1], verbose=0)["loss"]
    return {**record(model, history), "best": stop.best, "stopped epoch": stop.stopped_epoch, "validated": validated}


def limited(strategy: ls.Strategy, who: int) -> dict[str, Any]:
    """The time of one worker is over at its first batch."""
    model = compiled(strategy)
    limit = ls.MaxTime(1e-9 if strategy.workers.index == who else 3600)
    history = model.fit(batches(), validation_data=batches()[:1], epochs=EPOCHS, callbacks=[limit], verbose=0)
    return {**record(model, history), "step": model.training_state.position.step}


def fit_again(strategy: ls.Strategy) -> dict[str, Any]:
    """A fit after one that worker 1 has stopped goes on to its own end."""
    model = compiled(strategy)
    here = ("batch", 1) if strategy.workers.index == 1 else None
    model.fit(batches(), epochs=EPOCHS, callbacks=[Stop(here)], verbose=0)
    return record(model, model.fit(batches(), epochs=EPOCHS, verbose=0))


def after_nan(strategy: ls.Strategy) -> dict[str, Any]:
    """A fit after one that failed before all could hear that worker 1 wished to stop."""
    model = compiled(strategy)
    x, y = batches()[1]
    here = ("batch", 0) if strategy.workers.index == 1 else None
    with contextlib.suppress(NonFiniteLossError):
        model.fit([batches()[0], (x * float("nan"), y)], epochs=EPOCHS, callbacks=[Stop(here)], verbose=0)
    return record(model, model.fit(batches(), epochs=EPOCHS, verbose=0))


def callbacks(strategy: ls.Strategy, own: Path) -> dict[str, Any]:
    model = compiled(strategy)
    printed = io.StringIO()
    writing = [
        ls.CSVLogger(own / "log.csv"),
        ls.TensorBoard(own / "board"),
        ls.ModelCheckpoint(own / "epoch-{epoch}.safetensors", verbose=1),
        ls.ModelCheckpoint(own / "whole", save_weights_only=False, keep=1),
    ]
    with contextlib.redirect_stdout(printed):
        model.fit(batches(), validation_data=batches()[:1], epochs=2, callbacks=writing, verbose=2)
    files = sorted(str(path.relative_to(own)) for path in own.rglob("*") if path.is_file())
    return {"printed": printed.getvalue(), "files": files}


def weights(strategy: ls.Strategy, own: Path) -> dict[str, Any]:
    model = compiled(strategy)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    path = own / "weights.safetensors"
    model.save_weights(path)
    model.fit(batches(), verbose=0)
    trained = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_weights(path)
    try:
        model.load_weights(own / "absent.safetensors")
    except (CheckpointError, ClusterError) as error:
        refused = f"{type(error).__name__}: {error}"
    after = {name: value.clone() for name, value in model.state_dict().items()}
    return {"before": before, "trained": trained, "after": after, "exists": path.exists(), "refused": refused}


def labelled_batches() -> list[Batch]:
    """Rows of which few count: none of worker 0's in the second batch."""
    random = torch.Generator().manual_seed(2)
    y = torch.randint(3, (8,), generator=random)
    y[[0, 4, 5, 7]] = -100
    return list(zip(torch.randn(8, 4, generator=random).split(4), y.split(4), strict=True))


def classifier() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(1)
    return nn.Linear(4, 3), nn.CrossEntropyLoss(torch.tensor([0.2, 3.0, 1.0]))


def labels(strategy: ls.Strategy) -> dict[str, Any]:
    module, criterion = classifier()
    with strategy.scope():
        model = ls.Model(module)
    model.compile(torch.optim.SGD(module.parameters(), 0.5), criterion)
    history = model.fit(labelled_batches(), epochs=2, verbose=0)
    return {**record(model, history), "evaluated": model.evaluate(labelled_batches()[1:], verbose=0)["loss"]}


def arrays(strategy: ls.Strategy) -> dict[str, Any]:
    """Rows in memory in an order that the chief draws, single batches, and an end at NaN."""
    model = compiled(strategy)
    x, y = (torch.cat(column) for column in zip(*batches(), strict=True))
    torch.manual_seed(strategy.workers.index)
    history = model.fit(x.numpy(), y, 5, 2, validation_split=0.25, verbose=0)
    logs = model.train_on_batch(x[:3], y[:3])
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    with contextlib.redirect_stdout(io.StringIO()):
        ended = model.fit(x * torch.nan, y, callbacks=[ls.TerminateOnNaN()], verbose=0)
    after = {name: value.clone() for name, value in model.state_dict().items()}
    return {
        **record(model, history),
        "weights": weights,
        "after": after,
        "ended": ended.epoch,
        "tested": model.test_on_batch(x, y)["loss"],
        "predicted": model.predict_on_batch(x),
        "called": model(x).detach(),
        "logs": logs,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fit")


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    return ls.launch(job, workers=WORKERS, args=(str(folder),), timeout_s=120)


def equal(*states: dict[str, Tensor]) -> bool:
    return all(torch.equal(states[0][name], other[name]) for other in states[1:] for name in states[0])


def assert_alike(scenes: list[dict[str, Any]]) -> None:
    chief, other = scenes
    assert chief["history"] == other["history"]
    assert chief["steps"] == other["steps"]
    assert equal(chief["weights"], other["weights"])


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("in an epoch, the chief", [2]),  # all hear of it with the next batch
        ("in an epoch, worker 1", [2]),
        ("between updates, worker 1", [2]),
        ("after the last batch, worker 1", [STEPS]),
        ("during validation, worker 1", [STEPS]),
        ("at the end of an epoch, the chief", [STEPS]),
        ("at the end of an epoch, worker 1", [STEPS]),
        ("at the beginning, worker 1", []),
    ],
)
def test_a_stop_on_one_worker_ends_the_fit_of_all_at_the_same_place(found: dict[str, Any], name: str, steps: list[int]):
    chief, other = found[name]
    assert_alike([chief, other])
    assert chief["steps"] == steps
    assert len(chief["history"].get("val_loss", [])) == len(steps)
    assert chief["stopped"]
    assert other["stopped"]


@pytest.mark.parametrize("name", [name for name, (_, place, _) in STOPS.items() if place[0] == "batch"])
def test_all_know_at_the_end_of_the_epoch_that_it_is_the_last(found: dict[str, Any], name: str):
    assert [each["known"] for each in found[name]] == [[True], [True]]


def test_early_stopping_ends_all_workers_and_gives_all_the_best_weights(found: dict[str, Any]):
    chief, other = found["early"]
    assert_alike([chief, other])
    assert chief["steps"] == [STEPS, STEPS]
    assert chief["stopped epoch"] == other["stopped epoch"] == 1
    assert chief["best"] == chief["history"]["val_loss"][0] == pytest.approx(chief["validated"])


@pytest.mark.parametrize(("who", "steps"), [("the chief", [2]), ("worker 1", [STEPS] * EPOCHS)])
def test_the_time_of_the_chief_ends_all_workers_after_the_same_batch(found: dict[str, Any], who: str, steps: list[int]):
    chief, other = found[f"time of {who}"]
    assert_alike([chief, other])
    assert chief["steps"] == steps
    assert chief["step"] == other["step"] == sum(steps)
    assert len(chief["history"]["val_loss"]) == len(steps)


@pytest.mark.parametrize("name", ["fit again", "after NaN"])
def test_no_stop_is_left_to_the_next_fit(found: dict[str, Any], name: str):
    assert_alike(found[name])
    assert found[name][0]["steps"] == [STEPS] * EPOCHS


def test_the_chief_alone_writes_and_prints(found: dict[str, Any]):
    chief, other = found["callbacks"]

    assert other == {"printed": "", "files": []}
    lines = chief["printed"].splitlines()
    assert [line.partition(":")[0] for line in lines[:-1]] == ["epoch 1", "epoch 1/2", "epoch 2", "epoch 2/2"]
    assert lines[-1].startswith("fingerprint ")
    assert {name.rpartition("/")[0] or name for name in chief["files"]} == {
        "board/train",
        "board/validation",
        "epoch-1.safetensors",
        "epoch-2.safetensors",
        "log.csv",
        f"whole/step-{2 * STEPS:08d}",
        f"whole/step-{2 * STEPS:08d}/state",
    }


def test_what_the_chief_logs_is_that_of_all_workers(found: dict[str, Any], folder: Path):
    head, *rows = (folder / "0" / "log.csv").read_text().splitlines()
    assert head == "epoch,learning_rate,loss,val_loss"
    assert [row.split(",")[0] for row in rows] == ["0", "1"]
    assert float(rows[0].split(",")[2]) == found["at the end of an epoch, worker 1"][1]["history"]["loss"][0]


def test_weights_that_the_chief_saves_are_loaded_by_all(found: dict[str, Any]):
    chief, other = found["weights"]
    assert (chief["exists"], other["exists"]) == (True, False)
    assert not equal(chief["before"], chief["trained"])
    assert equal(chief["before"], chief["after"], other["before"], other["after"])


def test_weights_that_the_chief_cannot_load_are_an_error_on_all(found: dict[str, Any]):
    chief, other = found["weights"]
    assert chief["refused"].startswith("CheckpointError: ")
    assert other["refused"].startswith("ClusterError: worker 0 ")
    assert "failed in 'load the weights' with CheckpointError" in other["refused"]


def test_labels_that_do_not_count_are_left_out_of_the_mean_of_all_workers(found: dict[str, Any]):
    module, criterion = classifier()
    train(module, labelled_batches(), lambda p: torch.optim.SGD(p, 0.5), criterion, epochs=2)
    x, y = labelled_batches()[1]
    assert_alike(found["labels"])
    for worker in found["labels"]:
        assert worker["evaluated"] == pytest.approx(float(criterion(module(x), y).detach()), rel=1e-5)
        assert_close(worker["weights"], module, 1e-5)


def test_arrays_and_single_batches_train_all_workers_as_one_device(found: dict[str, Any]):
    torch.manual_seed(1)
    module = nn.Linear(4, 1)
    x, y = (torch.cat(column) for column in zip(*batches(), strict=True))
    torch.manual_seed(0)  # the chief's
    rows = torch.utils.data.TensorDataset(x[:9], y[:9])
    steps = [batch for _ in range(2) for batch in torch.utils.data.DataLoader(rows, 5, shuffle=True)]
    alone = train(module, [*steps, (x[:3], y[:3])], lambda p: torch.optim.SGD(p, 0.05), nn.functional.mse_loss)

    assert_alike(found["arrays"])
    for worker in found["arrays"]:
        assert_close(worker["weights"], module, 1e-6)
        assert equal(worker["weights"], worker["after"])
        assert worker["ended"] == []
        assert worker["logs"] == {"loss": pytest.approx(alone.losses[-1], abs=1e-6)}
        torch.testing.assert_close(worker["predicted"], module(x).detach())
        torch.testing.assert_close(worker["called"], module(x).detach())
        assert worker["tested"] == pytest.approx(nn.functional.mse_loss(module(x), y).item(), abs=1e-6)
