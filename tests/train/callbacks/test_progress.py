from __future__ import annotations

import io
import os
import re
import sys
import threading
from contextlib import redirect_stdout, suppress
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor
from torchmetrics.regression import MeanSquaredError

import lockstep as ls
from lockstep import console
from lockstep.errors import DataError
from lockstep.train.callbacks import EarlyStopping, LambdaCallback, ProgressBar
from lockstep.train.callbacks import progress as progress_module
from lockstep.train.model import Model

Batches = list[tuple[Tensor, Tensor]]
SPEED = r"(?:learning_rate 0\.05, )?\d+ ms/step, [\d,]+ examples/s"


class Terminal(io.StringIO):
    """A text stream that says it is a terminal; tqdm draws on it as on a real one."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal to redirect to, and a bar that draws every step however fast."""
    monkeypatch.setattr(progress_module._TerminalBar, "every_s", 0.0)
    monkeypatch.setattr(progress_module._TerminalBar, "first_s", 0.0)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")
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
        console.write_line("a message")

    with redirect_stdout(terminal):
        model.fit(batches, callbacks=[LambdaCallback(on_train_batch_end=say)], verbose=1)

    assert terminal.getvalue().count("\ra message\n") == 3


def test_a_bar_of_ones_own_replaces_the_default(model: Model, batches: Batches, capsys: pytest.CaptureFixture[str]):
    model.fit(batches, callbacks=[ProgressBar(verbose=2), EarlyStopping("loss")], verbose=1)
    assert len([line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch 1/1")]) == 1


@pytest.mark.parametrize("columns", [80, 120])
def test_a_terminal_keeps_the_bar_in_sight_and_breaks_lines_between_numbers(
    model: Model, batches: Batches, terminal: Terminal, monkeypatch: pytest.MonkeyPatch, columns: int
):
    monkeypatch.setenv("COLUMNS", str(columns))
    metrics = {f"mean_squared_error_{number}": MeanSquaredError() for number in range(6)}
    model.compile(optimizer=model.optimizer, loss=lambda a, b: (a - b).square(), metrics=metrics)

    with redirect_stdout(terminal):
        model.fit(batches, verbose=1)

    shown = re.findall(r"(epoch 1/1\s+\d+%\|([^\r]*?)\| [1-3]/3[^\r\n]*)", terminal.getvalue())
    assert len(shown) == 3
    assert min(len(bar) for _, bar in shown) >= 8
    assert max(len(line) for line, _ in shown) <= columns - len("^C")
    lines = [line.rpartition("\r")[2] for line in terminal.getvalue().split("\n")]
    assert max(map(len, lines)) <= columns
    assert all(re.search(rf"{name} [\d.e-]+(,|$)", "\n".join(lines), re.MULTILINE) for name in metrics)


def test_a_terminal_has_bold_titles_unless_no_color_is_set(
    model: Model, batches: Batches, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "xterm")
    with redirect_stdout(terminal):
        model.fit(batches, verbose=2)
    assert terminal.getvalue().startswith("\x1b[1mepoch 1/1\x1b[0m: 3 steps")


def test_a_pipe_gets_a_line_every_while_within_an_epoch(
    model: Model, batches: Batches, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(progress_module._PlainLines, "first_s", 0.0)
    monkeypatch.setattr(progress_module._PlainLines, "every_s", 0.0)
    model.compile(optimizer=model.optimizer, loss=lambda a, b: (a - b).square(), metrics={"mse": MeanSquaredError()})

    model.fit(batches, validation_data=batches, verbose=1)

    lines = capsys.readouterr().out.splitlines()
    numbers = rf"loss [\d.e-]+, mse [\d.e-]+, {SPEED}"
    for step, line in enumerate(lines[:3], start=1):
        assert re.fullmatch(rf"epoch 1/1: step {step}/3, {numbers}(, \d+ s left)?", line)
    for step, line in enumerate(lines[3:6], start=1):
        assert re.fullmatch(rf"epoch 1/1: step 3/3, validation step {step}, {numbers}", line)
    assert lines[6].startswith("epoch 1/1: 3 steps")


def test_the_numbers_of_a_slow_step_are_asked_for_before_it(model: Model, monkeypatch: pytest.MonkeyPatch):
    now = 100.0
    monkeypatch.setattr(progress_module, "time", SimpleNamespace(monotonic=lambda: now))
    bar = ProgressBar()
    bar.set_model(model)
    bar.on_epoch_begin(0, {})
    asked = []
    for step in range(6):  # of two seconds
        asked.append(bar.wants_batch_logs())
        now += 2.0
        bar.on_train_batch_end(step, {"loss": 1.0})

    assert asked == [True, True, True, False, False, False]  # shown after 6 s, and then after 30 s


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Makes a StringIO the output of a cell. Returns what is displayed there."""
    shown: list[Any] = []
    display = SimpleNamespace(
        display=lambda each, display_id: shown.append(each) or SimpleNamespace(update=shown.append)
    )
    monkeypatch.setitem(sys.modules, "ipykernel.iostream", SimpleNamespace(OutStream=io.StringIO))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr(progress_module._NotebookBar, "every_s", 0.0)
    monkeypatch.setattr(progress_module._NotebookBar, "first_s", 0.0)
    return shown


def test_a_notebook_has_one_bar_for_all_epochs(model: Model, batches: Batches, notebook: list[Any]):
    cell = io.StringIO()

    with redirect_stdout(cell):
        model.fit(batches, epochs=2, verbose=1)

    assert [line.split(",")[0] for line in cell.getvalue().splitlines()[:2]] == [
        "epoch 1/2: 3 steps",
        "epoch 2/2: 3 steps",
    ]
    assert [repr(each).split(",")[0] for each in notebook] == [
        f"epoch {epoch}/2: {state}"
        for epoch in (1, 2)
        for state in ("step 0/3", "step 1/3", "step 2/3", "step 3/3", "done")
    ]
    assert '<progress value="1.000" max="1">' in notebook[-1]._repr_html_()


def test_the_bar_of_a_notebook_says_where_an_error_stopped_it(model: Model, batches: Batches, notebook: list[Any]):
    def fail(batch: int, logs: object) -> None:
        if batch == 1:
            raise KeyboardInterrupt

    with redirect_stdout(io.StringIO()), pytest.raises(KeyboardInterrupt):
        model.fit(batches, callbacks=[LambdaCallback(on_train_batch_begin=fail)], verbose=1)

    assert repr(notebook[-1]) == "epoch 1/1: stopped after step 1/3"


def test_a_reader_that_has_left_is_no_fault_of_a_callback(model: Model, batches: Batches):
    reading, writing = os.pipe()
    os.close(reading)
    pipe = open(writing, "w", buffering=1)  # noqa: PTH123, SIM115
    with redirect_stdout(pipe), pytest.raises(BrokenPipeError):
        model.fit(batches, verbose=2)
    with suppress(BrokenPipeError):
        pipe.close()  # flushes once more


def test_a_line_that_comes_due_in_a_long_step_waits_for_one_with_numbers(
    model: Model, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    now = 0.0
    monkeypatch.setattr(progress_module, "time", SimpleNamespace(monotonic=lambda: now))
    bar = ProgressBar()
    bar.set_model(model)
    bar.on_epoch_begin(0, {})
    for step, seconds in enumerate((0.1, 0.1, 9.0, 0.1, 0.1)):
        wanted = bar.wants_batch_logs()
        now += seconds
        bar.on_train_batch_end(step, {"loss": 1.0} if wanted else {})

    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("epoch 1/?: step 4, loss 1.000, ")
