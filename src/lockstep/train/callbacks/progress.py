"""ProgressBar: one line per epoch on standard output, and a live line meanwhile on a terminal with tqdm."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Literal

from lockstep.collectives.communicator import Communicator
from lockstep.errors import CheckpointError, MissingExtraError
from lockstep.extras import require
from lockstep.train.callbacks.base import Callback, Logs
from lockstep.train.logs import LazyLogs

_REDRAW_S = 0.1
_BAR_KNOWN = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}"
_BAR_UNKNOWN = "{desc} {n_fmt} steps [{elapsed}]{postfix}"


def write_line(text: str) -> None:
    """Writes a line to standard output, above a live progress line if there is one."""
    tqdm = sys.modules.get("tqdm")  # if it is not loaded there is no live line
    if tqdm is None:
        sys.stdout.write(text + "\n")
    else:
        tqdm.tqdm.write(text, file=sys.stdout)
    sys.stdout.flush()


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
        write_line(line)


class ProgressBar(Callback):
    """Shows step time, examples a second, loss, metrics and the time left. ``fit(verbose=...)`` makes one by default.

    ``verbose`` is 1 for a live line if standard output is a terminal, 2 for plain lines only.
    """

    chief_only = True

    def __init__(self, verbose: Literal[1, 2] = 1) -> None:
        super().__init__()
        self.verbose = verbose
        self._bar: Any = None
        self._drawn = 0.0
        self._known: Logs = {}
        self._late: LazyLogs | None = None
        self._title = ""
        self._training = False

    def wants_batch_logs(self) -> bool:
        return self._bar is not None and time.monotonic() - self._drawn >= _REDRAW_S

    def on_train_begin(self, logs: Logs) -> None:  # evaluations inside fit are shown on the epoch's line
        self._training = True

    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        self._begin(f"epoch {epoch + 1}/{self.params.get('epochs', '?')}", self.params.get("steps"))

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        self._advance(logs)

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        self._finish(logs)

    def on_test_begin(self, logs: Logs) -> None:
        if not self._training:
            self._begin("evaluate", self.params.get("steps"))

    def on_test_batch_end(self, batch: int, logs: Logs) -> None:
        if not self._training:
            self._advance(logs)

    def on_test_end(self, logs: Logs) -> None:
        if not self._training:
            self._finish(logs)

    def on_predict_begin(self, logs: Logs) -> None:
        self._begin("predict", self.params.get("steps"))

    on_predict_batch_end = on_train_batch_end
    on_predict_end = on_test_end

    def close(self) -> None:
        self._training = False
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _begin(self, title: str, steps: int | None) -> None:
        self._title = title
        self._known, self._late = {}, None
        self._drawn = time.monotonic()
        self._bar = _make_bar(title, steps) if self.verbose == 1 else None

    def _advance(self, logs: Logs) -> None:
        if self._bar is None:
            return
        self._bar.n += 1
        if self.wants_batch_logs():
            self._drawn = time.monotonic()
            self._bar.set_postfix_str(self._describe(self._arrived(logs)))

    def _arrived(self, logs: Logs) -> Logs:
        """The newest numbers that can be shown without waiting for a GPU."""
        if not isinstance(logs, LazyLogs) or logs.arrived:
            return logs
        if self._late is None:
            self._late = logs
        elif self._late.arrived:
            self._known, self._late = self._late, logs
        return self._known

    def _finish(self, logs: Logs) -> None:
        if self._bar is not None:
            self._bar.leave = False
            self._bar.close()
            self._bar = None
        timing = self.model.clock.summary()
        steps = "1 step" if timing.steps == 1 else f"{timing.steps} steps"
        write_line(f"{self._title}: {steps}, {timing.seconds:.1f} s, {self._describe(logs)}")

    def _describe(self, logs: Logs) -> str:
        timing = self.model.clock.summary()
        speed = [f"{timing.median_step_s * 1000:.0f} ms/step", f"{timing.examples_per_s:,.0f} examples/s"]
        return ", ".join([f"{name} {value:#.4g}" for name, value in logs.items()] + speed)


def _make_bar(title: str, steps: int | None) -> Any:
    """A tqdm bar on standard output; None if that is not a terminal or tqdm is missing."""
    if not sys.stdout.isatty():
        return None
    try:
        tqdm = require("tqdm", "train").tqdm
    except MissingExtraError:
        return None
    # Without tqdm's monitor thread, which would outlive the run.
    bar_class = type("Bar", (tqdm,), {"monitor_interval": 0})
    form = _BAR_UNKNOWN if steps is None else _BAR_KNOWN
    return bar_class(desc=title, total=steps, bar_format=form, file=sys.stdout, dynamic_ncols=True, mininterval=0)
