from __future__ import annotations

import io
import re
import sys
import threading
from contextlib import redirect_stdout

import pytest
from torch import Tensor
from torchmetrics.regression import MeanSquaredError

import lockstep as ls
from lockstep.errors import DataError
from lockstep.train.callbacks import EarlyStopping, LambdaCallback, ProgressBar
from lockstep.train.callbacks import progress as progress_module
from lockstep.train.callbacks.progress import write_line
from lockstep.train.model import Model

Batches = list[tuple[Tensor, Tensor]]
SPEED = r"\d+ ms/step, [\d,]+ examples/s"


class Terminal(io.StringIO):
    """A text stream that says it is a terminal; tqdm draws on it as on a real one."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal to redirect to, and a bar that draws every step however fast."""
    monkeypatch.setattr(progress_module, "_REDRAW_S", 0.0)
    return Terminal()


@pytest.mark.parametrize("verbose", [1, 2])
def test_without_a_terminal_every_epoch_is_one_plain_line(
    model: Model, batches: Batches, capsys: pytest.CaptureFixture[str], verbose: int
):
    model.fit(batches, validation_data=batches, epochs=2, verbose=verbose)  # type: ignore[arg-type]

    *lines, last = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert last == f"fingerprint {ls.fingerprint(model)}"
    for number, line in enumerate(lines, start=1):
        assert re.fullmatch(rf"epoch {number}/2: 3 steps, \d+\.\d s, loss [\d.e-]+, val_loss [\d.e-]+, {SPEED}", line)


def test_zero_is_silent(model: Model, batches: Batches, capsys: pytest.CaptureFixture[str]):
    model.fit(batches, validation_data=batches, verbose=0)
    model.evaluate(batches, verbose=0)
    model.predict(batches)

    assert capsys.readouterr() == ("", "")


def test_evaluate_and_predict_have_their_lines(model: Model, batches: Batches, capsys: pytest.CaptureFixture[str]):
    model.evaluate(batches)
    model.predict(batches, verbose=1)

    evaluated, predicted = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"evaluate: 3 steps, \d+\.\d s, loss [\d.e-]+, {SPEED}", evaluated)
    assert re.fullmatch(rf"predict: 3 steps, \d+\.\d s, {SPEED}", predicted)


def test_a_terminal_gets_a_live_line_with_speed_loss_metrics_and_time_left(
    model: Model, batches: Batches, terminal: Terminal
):
    model.compile(optimizer=model.optimizer, loss=lambda a, b: (a - b).square(), metrics={"mse": MeanSquaredError()})
    before = {thread.name for thread in threading.enumerate()}

    with redirect_stdout(terminal):
        model.fit(batches, epochs=2, verbose=1)

    drawn = terminal.getvalue()
    states = re.findall(
        rf"epoch 1/2\s+\d+%\|.*?\| (\d)/3 \[[\d:]+<[\d:?]+\], loss [\d.e-]+, mse [\d.e-]+, {SPEED}", drawn
    )
    assert states == ["1", "2", "3"]
    assert re.findall(r"(?<=\r)epoch \d/2: 3 steps", drawn) == ["epoch 1/2: 3 steps", "epoch 2/2: 3 steps"]
    assert drawn.count("\n") == 3
    assert drawn.splitlines()[-1] == f"fingerprint {ls.fingerprint(model)}"
    assert {thread.name for thread in threading.enumerate()} - before == set()  # no tqdm_monitor


def test_two_is_plain_on_a_terminal_too(model: Model, batches: Batches, terminal: Terminal):
    with redirect_stdout(terminal):
        model.fit(batches, verbose=2)

    epoch, _ = terminal.getvalue().splitlines()
    assert re.fullmatch(rf"epoch 1/1: 3 steps, \d+\.\d s, loss [\d.e-]+, {SPEED}", epoch)


def test_data_of_unknown_length_shows_steps_alone(model: Model, batches: Batches, terminal: Terminal):
    with redirect_stdout(terminal):
        model.fit((batch for batch in batches), verbose=1)

    assert re.search(rf"epoch 1/1 3 steps \[[\d:]+\], loss [\d.e-]+, {SPEED}", terminal.getvalue())


def test_without_tqdm_the_lines_are_plain(
    model: Model, batches: Batches, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "tqdm", None)

    with redirect_stdout(terminal):
        model.fit(batches, verbose=1)

    assert terminal.getvalue().startswith("epoch 1/1: 3 steps,")


def test_an_error_leaves_the_terminal_on_a_new_line(model: Model, batches: Batches, terminal: Terminal):
    def stop(batch: int, logs: object) -> None:
        raise KeyboardInterrupt

    with redirect_stdout(terminal), pytest.raises(KeyboardInterrupt):
        model.fit(batches, callbacks=[LambdaCallback(on_train_batch_end=stop)], verbose=1)

    assert terminal.getvalue().endswith("\n")


def test_a_bar_serves_again_after_an_error(model: Model, batches: Batches, capsys: pytest.CaptureFixture[str]):
    bar = ProgressBar(verbose=2)
    with pytest.raises(DataError):
        model.fit([], callbacks=[bar])

    model.evaluate(batches, callbacks=[bar])

    assert capsys.readouterr().out.startswith("evaluate: 3 steps")


def test_a_message_does_not_run_into_the_live_line(model: Model, batches: Batches, terminal: Terminal):
    def say(batch: int, logs: object) -> None:
        write_line("a message")

    with redirect_stdout(terminal):
        model.fit(batches, callbacks=[LambdaCallback(on_train_batch_end=say)], verbose=1)

    assert terminal.getvalue().count("\ra message\n") == 3


def test_a_bar_of_ones_own_replaces_the_default(model: Model, batches: Batches, capsys: pytest.CaptureFixture[str]):
    model.fit(batches, callbacks=[ProgressBar(verbose=2), EarlyStopping("loss")], verbose=1)

    assert len([line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch 1/1")]) == 1
