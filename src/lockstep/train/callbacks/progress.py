"""ProgressBar: one line per epoch on standard output, and meanwhile what that can show.

terminal          a bar in the last line, by tqdm; also under ``lockstep run``, which shows what the chief prints
notebook          a bar above the lines of the epochs, by a display handle of IPython
pipe, file        a plain line every 30 seconds
"""

from __future__ import annotations

import html
import math
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Literal

from lockstep import console
from lockstep.checks import check_number
from lockstep.collectives.communicator import Communicator
from lockstep.errors import CheckpointError, MissingExtraError
from lockstep.extras import require
from lockstep.train.callbacks.base import Callback, Logs
from lockstep.train.logs import LEARNING_RATE, LazyLogs

_FIRST_STEP = "first step"
_BAR_CELLS = 8  # the numbers leave the bar at least this much space
_BAR_KNOWN = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}"
_BAR_UNKNOWN = "{desc} {n_fmt} steps [{elapsed}]{postfix}"


def write_fingerprint(workers: Communicator, find: Callable[[], str], *, verbose: int) -> None:
    """Writes the last line of a training: what ``find`` returns, or why there is none. Every worker must call it.

    The chief writes it, if its ``verbose`` is not 0.
    """
    processes = workers.processes
    if not processes.all_gather_numbers("whether to write the fingerprint", [verbose])[0][0]:
        return
    try:
        line = f"fingerprint {find()}"
    except CheckpointError as error:
        line = f"no fingerprint: {error}"
    if processes.is_chief:
        console.write_line(line)


class _Display(ABC):
    """Shows how far one pass after another is.

    ``first_s`` is how long after the beginning of the run it first wants numbers, and ``every_s`` how often then.
    """

    first_s: float
    every_s: float

    def __init__(self) -> None:
        self.title = ""
        self.steps: int | None = None

    def begin(self, title: str, steps: int | None) -> None:
        """Begins a pass; ``steps`` is None if their number is not known."""
        self.title, self.steps = title, steps

    @abstractmethod
    def show(self, step: int, items: Sequence[str], step_s: float) -> None:
        """Shows that ``step`` steps are done.

        ``items`` are the numbers, such as "loss 0.1", the most important first; a step takes ``step_s`` seconds.
        """

    @abstractmethod
    def end(self) -> None:
        """Ends the pass, whose line follows."""

    @abstractmethod
    def stop(self, step: int) -> None:
        """Ends the pass after ``step`` steps, because of an error or Ctrl-C."""

    def _position(self, step: int) -> str:
        return f"step {step}" if self.steps is None else f"step {step}/{self.steps}"

    def _time_left(self, step: int, step_s: float) -> list[str]:
        if self.steps is None or not 1 < step < self.steps:  # the first step says nothing about the others
            return []
        return [f"{_duration(step_s * (self.steps - step))} left"]


class _PlainLines(_Display):
    """A line at a time, for logs and pipes; the first one early, as a sign of life."""

    first_s, every_s = 5.0, 30.0

    def show(self, step: int, items: Sequence[str], step_s: float) -> None:
        console.write_line(console.line_of(self.title, [self._position(step), *items, *self._time_left(step, step_s)]))

    def end(self) -> None: ...

    def stop(self, step: int) -> None: ...


class _TerminalBar(_Display):
    """A tqdm bar in the last line of the terminal. ``tqdm`` is the class."""

    first_s = every_s = 0.1

    def __init__(self, tqdm: type[Any]) -> None:
        super().__init__()
        # Without tqdm's monitor thread, which would outlive the run.
        # A class of its own, as the interval is an attribute of the class: set on tqdm itself, it would change the bars
        # of the program.
        self._make = type("Bar", (tqdm,), {"monitor_interval": 0})
        self._bar: Any = None

    def begin(self, title: str, steps: int | None) -> None:
        super().begin(title, steps)
        form = _BAR_UNKNOWN if steps is None else _BAR_KNOWN
        settings = {"bar_format": form, "file": sys.stdout, "ncols": _bar_columns(), "mininterval": 0}
        self._bar = self._make(desc=title, total=steps, postfix=_FIRST_STEP, **settings)

    def show(self, step: int, items: Sequence[str], step_s: float) -> None:
        columns = self._bar.ncols = _bar_columns()
        fixed = len(f"{self.title} 100%|| {self.steps}/{self.steps} [00:00<00:00]") + _BAR_CELLS
        self._bar.n = step
        self._bar.set_postfix_str(", ".join(console.items_that_fit(items, (columns or sys.maxsize) - fixed)))

    def end(self) -> None:
        self._bar.leave = False
        self._bar.close()

    def stop(self, step: int) -> None:
        self._bar.close()


class _NotebookBar(_Display):
    """A bar in the output of a cell, the same one for all epochs; it stays with what it last showed."""

    first_s = every_s = 0.5

    def __init__(self) -> None:
        super().__init__()
        self._handle: Any = None

    def begin(self, title: str, steps: int | None) -> None:
        super().begin(title, steps)
        self.show(0, [_FIRST_STEP], 0.0)

    def show(self, step: int, items: Sequence[str], step_s: float) -> None:
        self._display([self._position(step), *items, *self._time_left(step, step_s)], step)

    def end(self) -> None:
        self._display(["done"], self.steps or 0)

    def stop(self, step: int) -> None:
        self._display([f"stopped after {self._position(step)}"], step)

    def _display(self, items: Sequence[str], step: int) -> None:
        ipython = import_module("IPython.display")  # a kernel is running, so it is there
        fraction = step / self.steps if self.steps else None
        bar = _NotebookText(f"{self.title}: {', '.join(items)}", fraction=fraction)
        # One handle for all epochs: a new display for each would leave a bar in the cell for every one
        # (test_a_notebook_has_one_bar_for_all_epochs).
        if self._handle is None:
            self._handle = ipython.display(bar, display_id=True)
        else:
            self._handle.update(bar)


class _NotebookText:
    """A line with a bar for a ``fraction`` of it, as IPython displays objects: HTML, and text where there is none."""

    def __init__(self, text: str, *, fraction: float | None) -> None:
        self._text, self._fraction = text, fraction

    def __repr__(self) -> str:
        return self._text

    def _repr_html_(self) -> str:
        bar = "" if self._fraction is None else f'<progress value="{self._fraction:.3f}" max="1"></progress> '
        return f"<div>{bar}{html.escape(self._text)}</div>"


class ProgressBar(Callback):
    """Shows step time, examples a second, loss, metrics and the time left. ``fit(verbose=...)`` makes one by default.

    A line ends each epoch. ``verbose`` is 1 to show the steps too: a bar in a terminal or a notebook, a line every 30
    seconds elsewhere; 2 for the lines of the epochs only.
    """

    chief_only = True

    def __init__(self, verbose: Literal[1, 2] = 1) -> None:
        super().__init__()
        check_number("ProgressBar(verbose)", verbose, least=1, most=2, whole=True, optional=False)
        self.verbose = verbose
        self._display: _Display | None = None
        self._due = 0.0  # when the display wants to show something
        self._step_s, self._step_ended = 0.0, 0.0
        self._step = 0
        self._newest: Logs = {}
        self._late: LazyLogs | None = None
        self._title = ""
        self._items: list[str] = []  # the numbers of the newest step that has any
        self._asks_for_logs = True  # whether the numbers of this step were asked for
        self._training = False  # in fit
        self._running = False  # a pass

    def wants_batch_logs(self) -> bool:
        # Asked before a step, which is shown when it is done. It may take half as long again as the last one. While
        # the validation runs, the numbers of the last step are shown.
        soon = time.monotonic() + 1.5 * self._step_s >= self._due
        self._asks_for_logs = self._display is not None and (soon or self._step + 1 == self.params.get("steps"))
        return self._asks_for_logs

    def on_train_begin(self, logs: Logs) -> None:  # evaluations inside fit are shown on the epoch's line
        self._training = True

    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        self._begin(f"epoch {epoch + 1}/{self.params.get('epochs', '?')}", self.params.get("steps"))

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        self._step = batch + 1
        self._advance(logs)

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        self._finish(logs)

    def on_test_begin(self, logs: Logs) -> None:
        if not self._training:
            self._begin("evaluate", self.params.get("steps"))

    def on_test_batch_end(self, batch: int, logs: Logs) -> None:
        if not self._training:
            self.on_train_batch_end(batch, logs)
        elif self._display is not None and time.monotonic() >= self._due:
            self._show(self._display, [f"validation step {batch + 1}", *self._items])

    def on_test_end(self, logs: Logs) -> None:
        if not self._training:
            self._finish(logs)

    def on_predict_begin(self, logs: Logs) -> None:
        self._begin("predict", self.params.get("steps"))

    on_predict_batch_end = on_train_batch_end
    on_predict_end = on_test_end

    def close(self) -> None:
        if self._display is not None and self._running:
            self._display.stop(self._step)
        self._display = None
        self._training = self._running = False

    def _begin(self, title: str, steps: int | None) -> None:
        self._title, self._step, self._running = title, 0, True
        self._newest, self._late = {}, None
        self._items, self._asks_for_logs = [], True
        self._step_s, self._step_ended = math.inf, time.monotonic()  # the first step may take long
        if self.verbose != 1:
            return
        if self._display is None:
            self._display = _make_display()
            self._due = self._step_ended + self._display.first_s
        self._display.begin(title, steps)

    def _advance(self, logs: Logs) -> None:
        now = time.monotonic()
        self._step_s, self._step_ended = now - self._step_ended, now
        # A step that took longer than expected is due without having been asked for its numbers.
        if self._display is None or not (logs or self._asks_for_logs):
            return
        if now >= self._due or self._step == self.params.get("steps"):
            self._items = self._describe(self._arrived(logs))
        if now >= self._due:
            self._show(self._display, self._items)

    def _show(self, display: _Display, items: Sequence[str]) -> None:
        display.show(self._step, items, self.model.clock.summary().median_step_s)
        self._due = time.monotonic() + display.every_s

    def _arrived(self, logs: Logs) -> Logs:
        """The newest numbers that can be shown without waiting for a GPU."""
        if not isinstance(logs, LazyLogs) or logs.arrived:
            return logs
        if self._late is None:
            self._late = logs
        elif self._late.arrived:
            self._newest, self._late = self._late, logs
        return self._newest

    def _finish(self, logs: Logs) -> None:
        self._running = False
        if self._display is not None:
            self._display.end()
            self._due = time.monotonic() + self._display.every_s
        timing = self.model.clock.summary()
        steps = "1 step" if timing.steps == 1 else f"{timing.steps} steps"
        console.write_line(console.line_of(self._title, [steps, f"{timing.seconds:.1f} s", *self._describe(logs)]))

    def _describe(self, logs: Logs) -> list[str]:
        timing = self.model.clock.summary()
        speed = [f"{timing.median_step_s * 1000:.0f} ms/step", f"{timing.examples_per_s:,.0f} examples/s"]
        numbers = [f"{name} {value:#.4g}" for name, value in logs.items() if name != LEARNING_RATE]
        rate = [f"{LEARNING_RATE} {self.model.learning_rate:.4g}"] if self._training else []
        return numbers + rate + speed


def _make_display() -> _Display:
    """The display for where standard output goes; without tqdm a terminal gets plain lines."""
    if console.output() == "notebook":
        return _NotebookBar()
    if console.shows_bar():
        try:
            return _TerminalBar(require("tqdm", "train").tqdm)
        except MissingExtraError:
            pass
    return _PlainLines()


def _bar_columns() -> int | None:
    """Columns of a bar. The ^C that a terminal echoes has room beside it: in a new line it would leave two bars."""
    columns = console.width()
    return columns and max(columns - len("^C"), 1)


def _duration(seconds: float) -> str:
    """``45 s``, ``12 min``, ``3 h 05 min``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02} min"
