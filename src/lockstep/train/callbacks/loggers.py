"""Callbacks that write the numbers of a training to files, or to a run of a library that tracks experiments.

CSVLogger writes the logs as they are. The others are a ScalarLogger each: ``epoch_scalars`` and ``batch_scalars`` make
the numbers and their tags, equal for all of them, and each writes these with its library.
"""

from __future__ import annotations

import csv
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TextIO, final

from lockstep.checks import check_kind, check_number, check_path, shown
from lockstep.errors import ConfigError
from lockstep.extras import require
from lockstep.replicas.device.memory import DeviceMemory
from lockstep.train.callbacks.base import Callback, Logs
from lockstep.train.callbacks.trace import ProfileBatch, StepTrace, profiled_batches
from lockstep.train.logs import LEARNING_RATE, EpochTiming


class CSVLogger(Callback):
    """Writes the logs of every epoch to a CSV file, flushed after each line. Arguments as in Keras.

    The columns are ``epoch`` and the sorted names of the first epoch's logs. With validation every name has its
    ``val_`` column, which holds NA where an epoch was not validated. A name that appears only later has no column.

    Args:
        filename: the file; its folder is made.
        separator: between the fields.
        append: go on in an existing file instead of writing it anew, as a training that is resumed should.

    Example:
        >>> callback = CSVLogger("log.csv")
    """

    chief_only = writes_files = True

    def __init__(self, filename: str | os.PathLike[str], separator: str = ",", append: bool = False) -> None:
        super().__init__()
        self.filename = Path(check_path(filename, "CSVLogger(filename)"))
        if not isinstance(separator, str) or len(separator) != 1:
            raise ConfigError(f"CSVLogger(separator={shown(separator)}) was given, expected one character")
        self.separator = separator
        self.append = append
        self._file: TextIO | None = None
        self._columns: list[str] = []

    def on_train_begin(self, logs: Logs) -> None:
        try:
            self.filename.parent.mkdir(parents=True, exist_ok=True)
            self._columns = self._existing_columns() if self.append else []
            self._file = self.filename.open("a" if self.append else "w", newline="", encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"CSVLogger(filename) cannot be written to: {error}; choose another file") from error

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        if self._file is None:
            return
        writer = csv.writer(self._file, delimiter=self.separator, lineterminator="\n")
        if not self._columns:
            self._columns = ["epoch", *self._names(logs)]
            writer.writerow(self._columns)
        row = {"epoch": epoch, **logs}
        writer.writerow([row.get(column, "NA") for column in self._columns])
        # A program that is killed has the lines of all its epochs
        # (test_a_line_is_in_the_file_as_soon_as_its_epoch_ends).
        self._file.flush()

    def state_dict(self) -> dict[str, Any]:
        return {"bytes": self._file.tell()} if self._file is not None else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.append and self._file is not None and self._file.tell() > state["bytes"]:
            # The interrupted run may have written epochs after its last backup, which are trained again
            # (test_a_resumed_training_writes_no_epoch_twice).
            self._file.truncate(state["bytes"])
            self._columns = self._existing_columns()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _names(self, logs: Logs) -> list[str]:
        names = set(logs)
        if self.params.get("validated"):
            names |= {f"val_{name}" for name in logs if not name.startswith("val_") and name != LEARNING_RATE}
        return sorted(names)

    def _existing_columns(self) -> list[str]:
        if not self.filename.exists():
            return []
        with self.filename.open(newline="", encoding="utf-8-sig") as file:  # a spreadsheet may have saved it
            return next(csv.reader(file, delimiter=self.separator), [])


Scalars = dict[str, float]
"""Numbers by tag."""


def epoch_scalars(
    logs: Logs, timing: EpochTiming, learning_rate: float, grad_norm: float | None, memory: Sequence[DeviceMemory]
) -> Scalars:
    """What is written at the end of an epoch.

    Args:
        logs: the loss, the metrics, and those of the validation, which begin with "val_".
        timing: of the training part.
        learning_rate: that of the next update.
        grad_norm: of the last update; None if nothing computed it.
        memory: of the local devices that count it.
    """
    numbers = {
        **logs,
        "learning_rate": learning_rate,
        "examples_per_s": timing.examples_per_s,
        "step_ms": 1000 * timing.median_step_s,
        **({} if grad_norm is None else {"grad_norm": grad_norm}),
    }
    sizes = {f"{device.name}/{what}": size for device in memory for what, size in device.sizes_mb().items()}
    return _tagged("epoch_", numbers) | _tagged("memory_mb/", sizes)


def batch_scalars(logs: Logs, step_s: float, learning_rate: float, grad_norm: float | None) -> Scalars:
    """What is written after a batch: ``logs`` are the numbers of the epoch so far, ``step_s`` is the step's time."""
    norm = {} if grad_norm is None else {"grad_norm": grad_norm}
    return _tagged("batch_", {**logs, "learning_rate": learning_rate, "step_ms": 1000 * step_s, **norm})


def _tagged(prefix: str, numbers: Mapping[str, float]) -> Scalars:
    """The numbers by tag, with "_" for each character that some library refuses, such as the colon of "gpu:0"."""
    return {prefix + re.sub(r"[^\w./ -]", "_", name): float(value) for name, value in numbers.items()}


UpdateFreq = Literal["epoch", "batch"] | int
Axis = Literal["epoch", "batch"]


class ScalarLogger(Callback, ABC):
    """Base of the callbacks that write scalars to a run. A subclass opens a run, writes to it and closes it.

    A callback has one run. It goes on in a later fit, and in one that BackupAndRestore resumes in another process: the
    checkpoint holds what identifies it.

    Args:
        update_freq: "epoch", "batch", or every this many global batches.
    """

    chief_only = writes_files = True

    def __init__(self, update_freq: UpdateFreq) -> None:
        super().__init__()
        interval = {"epoch": 0, "batch": 1}.get(update_freq) if isinstance(update_freq, str) else update_freq
        if type(interval) is not int or interval < 0 or update_freq == 0:
            name = type(self).__name__
            raise ConfigError(f"{name}(update_freq={shown(update_freq)}) is unknown; give 'epoch', 'batch' or a number")
        self.update_freq = update_freq
        self._interval = interval  # batches; 0 for epochs
        self._run: str | None = None
        self._is_open = self._completed = False

    @abstractmethod
    def _open(self, run: str | None, step: int) -> str:
        """Opens ``run``, or a new one for None, at this global batch. Returns what identifies it."""

    @abstractmethod
    def _write(self, scalars: Scalars, axis: Axis, number: int) -> None:
        """Writes scalars of an epoch, counted from 0, or of a global batch, counted from 1 over all epochs."""

    @abstractmethod
    def _close(self, completed: bool) -> None:
        """Closes what is open. ``completed``: no error or interrupt has ended the fit."""

    @final
    def wants_batch_logs(self) -> bool:
        return self._interval > 0 and (self.model.training_state.position.step + 1) % self._interval == 0

    @final
    def on_train_begin(self, logs: Logs) -> None:
        self._completed = False

    @final
    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        # Not when the fit begins: BackupAndRestore restores the run only then.
        if not self._is_open:
            self._run = self._open(self._run, self.model.training_state.position.step)
            self._is_open = True

    @final
    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        model = self.model
        step = model.training_state.position.step
        if self._interval and step % self._interval == 0:
            scalars = batch_scalars(logs, model.clock.last_step_s, model.learning_rate, model.grad_norm)
            self._write(scalars, "batch", step)

    @final
    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        model = self.model
        memory = model.strategy.device_memory()
        scalars = epoch_scalars(logs, model.clock.summary(), model.learning_rate, model.grad_norm, memory)
        self._write(scalars, "epoch", epoch)

    @final
    def on_train_end(self, logs: Logs) -> None:
        self._completed = True

    @final
    def state_dict(self) -> dict[str, Any]:
        return {} if self._run is None else {"run": self._run}

    @final
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._run = state["run"]

    @final
    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._close(self._completed)


@final
class TensorBoard(ScalarLogger):
    """Writes scalars for TensorBoard, in the folders and with the names that Keras uses.

    ``log_dir/train`` and ``log_dir/validation`` hold ``epoch_loss`` and one ``epoch_<metric>`` each; ``train`` also
    ``epoch_learning_rate``, ``epoch_examples_per_s``, ``epoch_step_ms``, of the chief's GPUs
    ``memory_mb/gpu_0/in_use`` (of tensors), ``reserved``, ``peak`` and ``limit``, and ``epoch_grad_norm`` of the last
    update if the model is compiled with ``clip_norm``. With another ``update_freq`` there are ``batch_loss`` and so on.

    Args:
        log_dir: the folder; look at it with ``tensorboard --logdir``. A training that BackupAndRestore resumes goes on
            in its folder, if that still exists.
        update_freq: "epoch", "batch", or every this many global batches.
        histogram_freq: write a histogram of each weight after every so many epochs, from the first on; 0 writes none.
            Not of a model that is divided among workers.
        profile_batch: a global batch, counted from 1 over all epochs, or the first and the last one, to trace with
            torch.profiler: into ``log_dir/profile/worker-0.12.pt.trace.json``, a file for each worker with a track for
            each of its replicas, for https://ui.perfetto.dev, chrome://tracing or TensorBoard's torch-tb-profiler. 0
            traces nothing.

    Example:
        >>> callback = TensorBoard("logs", profile_batch=(10, 12))
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] = "logs",
        update_freq: UpdateFreq = "epoch",
        *,
        histogram_freq: int = 0,
        profile_batch: ProfileBatch = 0,
    ) -> None:
        super().__init__(update_freq)
        self.log_dir = Path(check_path(log_dir, "TensorBoard(log_dir)"))
        check_number("TensorBoard(histogram_freq)", histogram_freq, least=0, whole=True, optional=False)
        self.histogram_freq, self.profile_batch = histogram_freq, profile_batch
        self._profiled = profiled_batches(profile_batch, "TensorBoard(profile_batch)")
        self._purge_step: int | None = None
        self._writers: dict[str, Any] = {}

    def _open(self, run: str | None, step: int) -> str:
        if run is not None and Path(run).is_dir():
            self.log_dir = Path(run)
            self._purge_step = step + 1  # what an interrupted run wrote after its last backup is not drawn
        self._writer("train")
        return str(self.log_dir)

    def expanded(self) -> Sequence[Callback]:
        trace = [] if self._profiled is None else [StepTrace(self.log_dir / "profile", self._profiled)]
        return (self, *trace)

    def _write_histograms(self, epoch: int) -> None:
        if self.model.training_state.module.is_part:
            raise ConfigError(
                "TensorBoard(histogram_freq) is for weights that this worker has whole, and the model is divided among "
                "workers; leave it out"
            )
        for name, weight in self.model.module.named_parameters():
            self._writer("train").add_histogram(name.replace(".", "/"), weight.detach().float().cpu(), epoch)

    def _write(self, scalars: Scalars, axis: Axis, number: int) -> None:
        if axis == "epoch" and self.histogram_freq and number % self.histogram_freq == 0:
            self._write_histograms(number)
        for tag, value in scalars.items():
            run = "validation" if tag.startswith("epoch_val_") else "train"
            self._writer(run).add_scalar(tag.replace("epoch_val_", "epoch_", 1), value, number)
        if axis == "epoch":
            for writer in self._writers.values():
                writer.flush()

    def _close(self, completed: bool) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers = {}

    def _writer(self, run: str) -> Any:
        if run not in self._writers:
            module = require("torch.utils.tensorboard", "train")
            # After a Ctrl-C inside a write, close waits until the writer's thread next flushes by itself.
            folder = str(self.log_dir / run)
            try:
                self._writers[run] = module.SummaryWriter(folder, purge_step=self._purge_step, flush_secs=2)
            except OSError as error:
                raise ConfigError(
                    f"TensorBoard(log_dir) cannot be written to: {error}; choose another folder"
                ) from error
        return self._writers[run]


def _settings(name: str, settings: Mapping[str, Any] | None) -> dict[str, Any]:
    check_kind(name, settings, Mapping, "a dict of settings")
    return dict(settings or {})


@final
class WeightsAndBiases(ScalarLogger):
    """Writes the scalars of ``TensorBoard`` to a run of Weights & Biases; those of validation as ``epoch_val_loss``.

    A run that the program has opened with ``wandb.init`` is used and left open. Else the callback opens one, and
    finishes it when fit ends. Needs the extra ``loggers``.

    Args:
        project: the project; None for the one that wandb chooses.
        name: the run's name; None for one that wandb makes.
        config: settings of the training to show with the run.
        update_freq: "epoch", "batch", or every this many global batches.
        init: further arguments of ``wandb.init``, such as ``{"mode": "offline"}``.

    Example:
        >>> callback = WeightsAndBiases("digits", config={"lr": 0.1})  # doctest: +SKIP
    """

    def __init__(
        self,
        project: str | None = None,
        *,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        update_freq: UpdateFreq = "epoch",
        init: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(update_freq)
        require("wandb", "loggers")
        self._arguments = {
            "project": project,
            "name": name,
            "config": _settings("config", config),
            **_settings("init", init),
        }
        self._to: Any = None
        self._owned = False

    def _open(self, run: str | None, step: int) -> str:
        wandb = require("wandb", "loggers")
        self._owned = wandb.run is None
        # "allow" and not "must": a run that somebody has deleted meanwhile begins anew instead of ending the training.
        resumed = {} if run is None else {"id": run, "resume": "allow"}
        self._to = wandb.init(**self._arguments, **resumed) if self._owned else wandb.run
        for axis in ("epoch", "batch"):
            self._to.define_metric(f"{axis}_*", step_metric=axis)
        self._to.define_metric("memory_mb/*", step_metric="epoch")
        return str(self._to.id)

    def _write(self, scalars: Scalars, axis: Axis, number: int) -> None:
        self._to.log({axis: number, **scalars})

    def _close(self, completed: bool) -> None:
        run, self._to = self._to, None
        if self._owned:
            run.finish(exit_code=0 if completed else 1)


@final
class MLflow(ScalarLogger):
    """Writes the scalars of ``TensorBoard`` to a run of MLflow; those of validation as ``epoch_val_loss``.

    A run that the program has opened with ``mlflow.start_run`` is used and left open. Else the callback opens one, and
    ends it when fit ends: as FINISHED, or as FAILED after an error. Needs the extra ``loggers``.

    Args:
        experiment: the experiment's name; it is made if there is none.
        name: the run's name; None for one that MLflow makes.
        config: settings of the training, written as parameters of the run.
        update_freq: "epoch", "batch", or every this many global batches.
        tracking_uri: the server, or the database such as "sqlite:///mlflow.db"; None for MLflow's own setting.

    Example:
        >>> callback = MLflow("digits", config={"lr": 0.1})  # doctest: +SKIP
    """

    def __init__(
        self,
        experiment: str = "Default",
        *,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        update_freq: UpdateFreq = "epoch",
        tracking_uri: str | None = None,
    ) -> None:
        super().__init__(update_freq)
        require("mlflow", "loggers")
        self._experiment, self._name, self._config = experiment, name, _settings("config", config)
        self._tracking_uri = tracking_uri
        self._client: Any = None
        self._to = ""
        self._owned = False

    def _open(self, run: str | None, step: int) -> str:
        mlflow = require("mlflow", "loggers")
        active = mlflow.active_run()
        self._owned = active is None
        self._client = mlflow.MlflowClient(None if active else self._tracking_uri)
        if active is not None:
            self._to = active.info.run_id
        elif run is not None:
            self._client.update_run(run, status="RUNNING")
            self._to = run
        else:
            self._to = self._client.create_run(self._experiment_id(), run_name=self._name).info.run_id
            for key, value in self._config.items():
                self._client.log_param(self._to, key, value)
        return self._to

    def _experiment_id(self) -> str:
        experiment = self._client.get_experiment_by_name(self._experiment)
        return str(self._client.create_experiment(self._experiment) if experiment is None else experiment.experiment_id)

    def _write(self, scalars: Scalars, axis: Axis, number: int) -> None:
        metric, now_ms = require("mlflow.entities", "loggers").Metric, int(1000 * time.time())
        self._client.log_batch(self._to, metrics=[metric(tag, value, now_ms, number) for tag, value in scalars.items()])

    def _close(self, completed: bool) -> None:
        client, self._client = self._client, None
        if self._owned:
            client.set_terminated(self._to, status="FINISHED" if completed else "FAILED")


@final
class Trackio(ScalarLogger):
    """Writes the scalars of ``TensorBoard`` to a run of trackio; those of validation as ``epoch_val_loss``.

    A run that the program has opened with ``trackio.init`` is used and left open. Else the callback opens one, in the
    local database unless ``init`` names a Space, and finishes it when fit ends. Needs the extra ``loggers``.

    Args:
        project: the project.
        name: the run's name; None for one that trackio makes.
        config: settings of the training to show with the run.
        update_freq: "epoch", "batch", or every this many global batches.
        init: further arguments of ``trackio.init``, such as ``{"space_id": "me/runs"}``.

    Example:
        >>> callback = Trackio("digits", config={"lr": 0.1})  # doctest: +SKIP
    """

    def __init__(
        self,
        project: str,
        *,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        update_freq: UpdateFreq = "epoch",
        init: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(update_freq)
        require("trackio", "loggers")
        alone = {"embed": False, "auto_log_cpu": False, "auto_log_gpu": False}  # no dashboard, no sampling threads
        self._arguments = {
            "project": project,
            "config": _settings("config", config),
            **alone,
            **_settings("init", init),
        }
        self._name = name
        self._to: Any = None
        self._owned = False

    def _open(self, run: str | None, step: int) -> str:
        trackio = require("trackio", "loggers")
        self._to = require("trackio.context_vars", "loggers").current_run.get()
        self._owned = self._to is None
        if self._owned:
            resume = "never" if run is None else "allow"
            self._to = trackio.init(name=run or self._name, resume=resume, **self._arguments)
        return str(self._to.name)

    def _write(self, scalars: Scalars, axis: Axis, number: int) -> None:
        self._to.log({axis: number, **scalars}, step=number)

    def _close(self, completed: bool) -> None:
        run, self._to = self._to, None
        if self._owned and run is require("trackio.context_vars", "loggers").current_run.get():
            require("trackio", "loggers").finish()
