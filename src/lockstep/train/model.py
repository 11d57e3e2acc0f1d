"""Model: a module with compile, fit, evaluate and predict, on the strategy that it was made under."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from lockstep import console, tensorflow_names
from lockstep.checkpoint.checkpoint import Checkpoint
from lockstep.checkpoint.fingerprint import fingerprint_of
from lockstep.checks import check_number
from lockstep.collectives.communicator import refuse_to_train
from lockstep.errors import ConfigError, UsageError
from lockstep.mirroring.module.compile import Compilation
from lockstep.mirroring.module.module import MemoryFormat, MirroredModule
from lockstep.mirroring.optim.optimizer import MirroredOptimizer
from lockstep.replicas.context import get_replica_context
from lockstep.strategies.base import Strategy, get_strategy
from lockstep.tracebacks import OwnFramesHidden
from lockstep.train.arrays import (
    ArrayOptions,
    Arrays,
    Data,
    evaluation_data,
    floats_of,
    on_device,
    prediction_data,
    training_data,
)
from lockstep.train.batch import module_arguments
from lockstep.train.callbacks.base import Callback, CallbackList
from lockstep.train.callbacks.progress import ProgressBar, write_fingerprint
from lockstep.train.compile import (
    CompileConfig,
    Loss,
    OptimizerLike,
    Precision,
    PrecisionName,
    SchedulerLike,
    TrainSetup,
    keras_execution,
    make_setup,
)
from lockstep.train.epoch_iterator import EpochIterator, distribute
from lockstep.train.fit import AgreedStop, Epochs, FitVerbose, TrainLoop, agree_on_fit, batches_of_trial, run_fit
from lockstep.train.inference import module_mode, run_evaluation, run_prediction
from lockstep.train.logs import History, StepClock
from lockstep.train.model_weights import host_state, load_arrays, load_weights, save_weights
from lockstep.train.module_loss import check_computes_loss
from lockstep.train.string_identifiers import ModuleLoss, loss_named, metrics_named, optimizer_named
from lockstep.train.summary import noting_shapes, summary_table
from lockstep.train.trained_model import Position
from lockstep.train.training_state import TrainingState
from lockstep.train.user_step import ShardLoss, TrainStep, UserStep

# Methods that Keras and Lightning call in a subclass, and Model does not: ignoring them would train another loss.
_NOT_CALLED = frozenset(
    [
        *("predict_step", "compute_loss", "compute_metrics", "forward", "call"),
        *("make_train_function", "make_test_function", "make_predict_function"),
        *("training_step", "validation_step", "configure_optimizers", "optimizer_step"),
    ]
)


def _refuse_step_methods(names: Iterable[str], where: str) -> None:
    for name in _NOT_CALLED.intersection(names):
        raise UsageError(
            f"{where} defines {name}, which fit, evaluate and predict do not call; define forward in the module that "
            "is given to Model, and a step as train_step or test_step, or in a loop with strategy.run(step, (batch,))"
        )


class Model:
    """Trains and runs a module on the strategy in whose scope it is made; without a scope, on one device.

    The module's parameters are trained in place, and an optimizer made over them stays valid.

    Args:
        module: any ``nn.Module``, or a mirrored one.
        sync_batchnorm: compute batch-norm statistics over the global batch instead of each replica's shard.
        memory_format: "auto", "preserve" and so on, as in ``strategy.mirror``.

    Attributes:
        stop_training: set it in a callback, on any worker, to end fit.
        history: the History of the last fit.
        clock: the times of the current or last pass.

    Example:
        >>> import torch, lockstep as ls
        >>> model = ls.Model(torch.nn.Linear(2, 1))
        >>> model.compile(optimizer=lambda p: torch.optim.SGD(p, 0.1), loss=torch.nn.functional.mse_loss)
        >>> history = model.fit([(torch.zeros(4, 2), torch.zeros(4, 1))], epochs=2, verbose=0)
        >>> len(history.history["loss"])
        2
    """

    def __init__(
        self, module: nn.Module, *, sync_batchnorm: bool = False, memory_format: MemoryFormat = "auto"
    ) -> None:
        if not isinstance(module, nn.Module):
            raise ConfigError(f"Model got a {type(module).__name__}; give a torch.nn.Module")
        self.strategy: Strategy = get_strategy()
        self._module: MirroredModule = self.strategy.mirror(
            module, sync_batchnorm=sync_batchnorm, memory_format=memory_format
        )
        self.training_state = TrainingState(self, self._module)
        self._setup: TrainSetup | None = None
        self._batch_loop: TrainLoop | None = None  # of train_on_batch
        self.stop_training = False
        self.history = History()
        self.clock = StepClock()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        above = cls.__mro__[: cls.__mro__.index(Model)]
        _refuse_step_methods((name for kind in above for name in vars(kind)), f"class {cls.__name__}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("train_step", "test_step"):
            raise UsageError(f"{name} was set on an object; override it in a subclass of Model")
        _refuse_step_methods((name,), f"an attribute of {type(self).__name__}")
        object.__setattr__(self, name, value)

    if not TYPE_CHECKING:  # which takes a class that has this for one that has every name

        def __getattr__(self, name: str) -> object:
            if name in tensorflow_names.MODEL:
                raise tensorflow_names.missing(repr(type(self).__name__), name, tensorflow_names.MODEL)
            return object.__getattribute__(self, name)  # raises again what a property has raised, if it is one

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's outputs for these arguments in evaluation mode, on the first device. Every worker must call it.

        NumPy arrays become tensors, and tensors are moved to the device. Gradients are recorded unless torch's grad
        mode is off. For many rows use ``predict``, which divides them among the replicas. Inside a replica it runs the
        replica's copy in its own mode.
        """
        if get_replica_context() is not None:
            return self._module(*args, **kwargs)
        if self._module.is_part or self._module.shards_weights or self._module.pipeline is not None:
            raise UsageError("the model is divided among workers, and cannot be called by itself; call model.predict")
        moved = on_device((args, kwargs), self.strategy.devices[0].torch_device, floats_of(self.module))
        with module_mode(self._module, training=False), self._precision.autocast():
            return self._module(*moved[0], **moved[1])

    def __repr__(self) -> str:
        parameters = sum(parameter.numel() for parameter in self.module.parameters())
        parts = [type(self.module).__name__, f"{parameters:,} parameters", repr(self.strategy)]
        if self._setup is None:
            parts.append("not compiled")
        elif self.optimizer is not None:
            parts.append(type(self.optimizer.plain).__name__)
        return f"{type(self).__name__}({', '.join(parts)})"

    @property
    def module(self) -> nn.Module:
        """The user's module."""
        return self._module.module

    @property
    def optimizer(self) -> MirroredOptimizer | None:
        """The mirrored optimizer; None before compile."""
        return self._setup.optimizer if self._setup is not None else None

    @property
    def scheduler(self) -> LRScheduler | None:
        """The scheduler, if there is one. It is stepped once per update."""
        return self._setup.scheduler if self._setup is not None else None

    @property
    def metrics(self) -> Mapping[str, Any]:
        """The metrics given to compile, by name."""
        return self._setup.config.metrics if self._setup is not None else {}

    @property
    def learning_rate(self) -> float:
        """The learning rate of the optimizer's first group; setting it sets that of all groups, if they have one."""
        return float(self.optimizer.param_groups[0]["lr"]) if self.optimizer is not None else 0.0

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        check_number("learning_rate", value, least=0, optional=False)
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        if not groups or any(group["lr"] != groups[0]["lr"] for group in groups):
            what = "several learning rates" if groups else "no optimizer"
            raise UsageError(f"the model has {what}; set lr in the model.optimizer.param_groups that you mean")
        for group in groups:
            group["lr"] = value

    @property
    def grad_norm(self) -> float | None:
        """The global norm of the last update's gradients before clipping, during fit; None without ``clip_norm``.

        Reading it waits for the device.
        """
        return self.training_state.grad_norm

    @tensorflow_names.advise(tensorflow_names.COMPILE)
    def compile(
        self,
        optimizer: OptimizerLike | str | None = None,
        loss: Loss | str | None = None,
        *,
        metrics: Mapping[str, Any] | Sequence[Any] | None = None,
        scheduler: SchedulerLike | None = None,
        precision: PrecisionName = "fp32",
        accumulate: int = 1,
        clip_norm: float | None = None,
        graphs: bool = True,
        compile_module: bool | Mapping[str, Any] = False,
        combines_rows: bool = False,
        jit_compile: bool | Literal["auto"] | None = "auto",
        run_eagerly: bool = False,
    ) -> None:
        """Configures training.

        Args:
            optimizer: a torch optimizer over the module's parameters, a function of the parameters that makes one, or
                the name of one, with torch's defaults: "sgd", "adam", "adamw" and others; None to evaluate only.
            loss: ``loss(outputs, targets)`` returns one value per example (any shape whose first dimension is the
                rows), a pair (total, count), or a scalar mean. Means of torch's losses, and over masked or selected
                values, are divided by their count in the whole batch; any other scalar is a mean over the examples.
                None for the loss that the module computes itself from "labels" in x, as those of transformers do;
                items may then be dicts with "labels".
                Or the name of one of torch's losses: "mse", "mae", "cross_entropy", "binary_cross_entropy" and others;
                or of one of Keras's, such as "sparse_categorical_crossentropy", which take probabilities.
            metrics: name to torchmetrics Metric, updated with (outputs, targets); or a list of metrics. "accuracy",
                "f1", "mse", "mae", "rmse", "r2", "perplexity", "shifted_accuracy" and Keras's names of them are known.
            scheduler: a torch scheduler, or a function of the optimizer that makes one; stepped once per update.
            precision: "fp32", or autocast to "bf16" or "fp16"; fp16 scales the gradients.
            accumulate: global batches per update.
            clip_norm: clips the gradients of each update to this global norm. ``math.inf`` clips nothing and computes
                the norm, for ``grad_norm`` and the loggers.
            graphs: on a GPU, replay whole steps as CUDA graphs where possible; the log "lockstep" says why not.
            compile_module: run the module through ``torch.compile``; or a dict of its options "mode", "dynamic" and
                "backend". All replicas run one compiled code.
            combines_rows: True says that the module or the loss combines rows on purpose, such as by statistics of its
                own over the batch, or an auxiliary loss of experts. Each replica then combines the rows of its shard,
                so the numbers depend on the number of replicas; False refuses it.
            jit_compile: Keras's name for ``compile_module``: True compiles the module, "auto" does not.
            run_eagerly: Keras's name for running every step in Python: no CUDA graphs, and no compiled module.

        Raises:
            ConfigError: a value is not valid.
            UsageError: the optimizer holds parameters of another module, or the loss has some that it does not hold.
        """
        if loss is None:
            check_computes_loss(self.module)
        loss, optimizer = ModuleLoss() if loss is None else loss_named(loss), optimizer_named(optimizer)
        graphs, compile_module = keras_execution(graphs, compile_module, jit_compile, run_eagerly)
        settings = {"precision": precision, "accumulate": accumulate, "clip_norm": clip_norm, "graphs": graphs}
        settings["combines_rows"] = combines_rows
        config = CompileConfig(loss=loss, metrics=metrics_named(metrics or {}, loss), **settings)  # type: ignore[arg-type]  # checked there
        compilation = Compilation.of(compile_module)
        if isinstance(loss, ModuleLoss):
            self._check_module_loss(compilation)
        setup = make_setup(self.strategy, self._module, config, optimizer, scheduler)
        self._setup = replace(setup, train_step=self._user_step("train_step"), test_step=self._user_step("test_step"))
        self._batch_loop = None
        self._module.compile_as(compilation)

    def _check_module_loss(self, compilation: Compilation | None) -> None:
        obstacles = [name for name in ("train_step", "test_step") if self._user_step(name) is not None]
        if compilation is not None:
            obstacles.append("compile_module")
        if self._module.pipeline is not None:
            obstacles.append("a pipeline")
        if obstacles:
            raise ConfigError(
                f"compile got no loss; with {obstacles[0]} the calls that tell what the module's own loss is a mean "
                "over cannot be traced. Give a loss(outputs, targets) of the logits, and leave the labels out of x"
            )

    def train_step(self, step: TrainStep) -> ShardLoss:
        """Computes the loss of one replica's shard. Override it in a subclass; each replica calls it in its thread.

        It may change inputs and targets, and run the module several times. It returns what ``step.loss`` gives; then
        Lockstep runs backward and updates, exactly as on one device if what it computes of a row depends on that row
        alone. ``evaluate`` does not call it.

        Args:
            step: the shard, with ``x``, ``y``, ``sample_weight``, ``forward`` and ``loss``.
        """
        return step.loss(step.forward(step.x), step.y)

    def test_step(self, step: TrainStep) -> ShardLoss:
        """Computes the loss of one replica's shard in ``evaluate`` and in the validation of ``fit``.

        A subclass may override it, as ``train_step``. The module is in evaluation mode, and nothing has gradients.
        """
        return step.loss(step.forward(step.x), step.y)

    def fit(
        self,
        x: Any,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        *,
        verbose: FitVerbose = 1,
        callbacks: Sequence[Callback] | None = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool | None = None,
        class_weight: Mapping[int, float] | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int = 1,
        fast_dev_run: bool | int = False,
    ) -> History:
        """Trains, on arrays or on batches. Every worker must call it with the same data.

        Args:
            x: the inputs of all rows: a tensor, a NumPy array or a DataFrame of pandas, a dict of them by the module's
                keyword arguments, or a tuple of its positional ones. Or an iterable of global batches (x, y) or
                (x, y, sample_weight), such as a DataLoader, or a distributed dataset; then leave out y, batch_size,
                validation_split, shuffle, class_weight and sample_weight.
            y: the targets of all rows: a tensor, a NumPy array, a DataFrame or Series, or several of them.
            batch_size: rows of a global batch; 32 if None.
            epochs: the last epoch, counted from 1.
            verbose: 0 silent, 1 or "auto" a live line per epoch, 2 a plain line per epoch; after the last epoch, the
                fingerprint.
            callbacks: called at Keras's hooks, in order, before the progress bar.
            validation_split: the fraction of the rows, taken from their end, to validate with instead of training.
            validation_data: evaluated at the end of epochs; its results get the prefix "val_". A tuple (x, y) or
                (x, y, sample_weight) of arrays, or an iterable of global batches. Beside arrays as ``x``, its items
                may be tuples of several inputs or targets.
            shuffle: whether each epoch has another order of rows, drawn as ``DataLoader(shuffle=True)`` does, from
                torch's default generator; None is True for arrays.
            class_weight: class number to the weight of its rows in training; 1 for a class without one.
            sample_weight: one weight per row. It multiplies the losses; they are still divided by the number of rows.
            initial_epoch: the first epoch, counted from 0.
            steps_per_epoch: global batches per epoch; by default all there are.
            validation_steps: validate with the first so many global batches, the same ones each time; None for all.
            validation_batch_size: rows of a global batch of validation arrays; ``batch_size`` if None.
            validation_freq: validate after every this many epochs.
            fast_dev_run: True, or a number of batches, tries the program: one epoch of so many batches of training and
                of validation, without the callbacks that write files. It trains the weights.

        Returns:
            The History of this fit, with ``history``, ``epoch`` and ``timing``.

        Raises:
            DataError: the data has no batches, an item is not a pair or triple, or arrays differ in their rows.
            NonFiniteLossError: the loss became NaN or infinite. The weights are those of the last good update.
            CallbackError: a callback raised.
        """
        settings = Epochs(epochs=epochs, initial_epoch=initial_epoch, validation_freq=validation_freq)
        trial = batches_of_trial(fast_dev_run)
        if trial is not None:
            settings = settings.trial()
        options = ArrayOptions(
            batch_size=batch_size,
            shuffle=shuffle,
            validation_split=validation_split,
            validation_batch_size=validation_batch_size,
            class_weight=class_weight,
            sample_weight=sample_weight,
        )
        refuse_to_train(self.strategy.workers, "fit")
        setup = self._trainable("fit")
        y = setup.targets(x, y)
        if (labels := setup.targets(validation_data, None)) is not None:
            validation_data = (validation_data, labels)
        data, held_out = training_data(self.strategy, self.module, x, y, validation_data, options)
        steps = {"steps_per_epoch": steps_per_epoch} if trial is None else {"first": trial}
        batches = self._iterator(data, "the training data", **steps)
        validation = None
        if held_out is not None:
            validation = self._iterator(held_out, "the validation data", first=trial or validation_steps)
        elif validation_steps is not None:
            raise ConfigError("validation_steps came with no validation data; give validation_data, or leave it out")
        agree_on_fit(self.strategy.workers, setup.config, batches, validation, settings)
        self.stop_training, self.history, self._batch_loop = False, History(), None
        params = {"epochs": settings.epochs, "validated": validation is not None}
        if trial is not None:
            callbacks = self._without_files(callbacks, trial, verbose)
        with OwnFramesHidden(), self._callbacks(callbacks, verbose, batches, **params) as called:
            first = settings.initial_epoch
            state = partial(self.training_state.during_fit, data=batches, callbacks=called, epoch=first)
            run_fit(self, setup, batches, validation=validation, callbacks=called, epochs=settings, during_fit=state)
        write_fingerprint(self.strategy.workers, self.fingerprint, verbose=bool(verbose))
        return self.history

    @tensorflow_names.advise(tensorflow_names.EVALUATE)
    def evaluate(
        self,
        x: Any,
        y: Any = None,
        batch_size: int | None = None,
        *,
        sample_weight: Any = None,
        verbose: FitVerbose = 1,
        callbacks: Sequence[Callback] | None = None,
        steps: int | None = None,
    ) -> dict[str, float]:
        """The loss and the metrics over the data, each example counted once.

        Args:
            x: the inputs of all rows, or an iterable of global batches, as in ``fit``.
            y: the targets of all rows.
            batch_size: rows of a global batch of arrays; 32 if None.
            sample_weight: one weight per row of arrays.
            verbose: 0 silent, 1 or "auto" a live line, 2 a plain line.
            callbacks: called at the ``on_test`` hooks.
            steps: the first so many global batches; None for all.
        """
        check_number("steps", steps, least=1, whole=True)
        setup = self._compiled("evaluate")
        y = setup.targets(x, y)
        options = ArrayOptions(batch_size=batch_size, sample_weight=sample_weight)
        data = evaluation_data(self.strategy, self.module, x, y, options)
        return self._evaluate(setup, self._iterator(data, "the data", first=steps), verbose, callbacks)

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        *,
        verbose: FitVerbose = 0,
        callbacks: Sequence[Callback] | None = None,
        steps: int | None = None,
    ) -> Any:
        """The module's outputs for all rows, in the order of the data, on the CPU.

        Args:
            x: the inputs of all rows: a tensor, a NumPy array or a dict of them; with ``batch_size`` also a tuple of
                them. Or an iterable of global batches: x alone (a tensor or a dict of the module's keyword arguments),
                or tuples and lists (x, y) or (x, y, sample_weight), of which x is used.
            batch_size: rows of a global batch of arrays; 32 if None.
            verbose: 0 silent, 1 or "auto" a live line, 2 a plain line.
            callbacks: called at the ``on_predict`` hooks.
            steps: the first so many global batches; None for all.

        Returns:
            One tensor, or the structure of tensors that the module returns, with one row per example.
        """
        check_number("steps", steps, least=1, whole=True)
        data = prediction_data(self.strategy, self.module, x, ArrayOptions(batch_size=batch_size))
        return self._predict(self._iterator(data, "the data", first=steps), verbose, callbacks)

    def train_on_batch(self, x: Any, y: Any = None, sample_weight: Any = None) -> dict[str, float]:
        """Makes one update with one global batch, and returns its loss and metrics. Every worker must call it.

        ``compile(accumulate=...)`` does not apply. The next fit goes on with these weights and this optimizer state.

        Args:
            x: the inputs: a tensor, a NumPy array, a dict of them by the module's keyword arguments, or a tuple.
            y: the targets; None for a loss that the module computes from "labels" in x.
            sample_weight: one weight per row.
        """
        refuse_to_train(self.strategy.workers, "train_on_batch")
        setup = self._trainable("train_on_batch")
        batches = self._one_batch(x, setup.targets(x, y), sample_weight)
        self.stop_training = False
        # A loop that fails is not used again: gradients of its step may be left.
        loop, self._batch_loop = self._batch_loop or self._make_loop(setup), None
        loop.epoch = 0
        with OwnFramesHidden(), module_mode(setup.module, training=True):
            logs = loop.run_epoch(batches, StepClock())
        self.training_state.count_step()
        self._batch_loop = loop
        return logs

    def test_on_batch(self, x: Any, y: Any = None, sample_weight: Any = None) -> dict[str, float]:
        """The loss and the metrics of one global batch. Every worker must call it. Arguments as ``train_on_batch``."""
        setup = self._compiled("test_on_batch")
        return self._evaluate(setup, self._one_batch(x, setup.targets(x, y), sample_weight))

    def predict_on_batch(self, x: Any) -> Any:
        """The module's outputs for one global batch, on the CPU. Every worker must call it."""
        return self._predict(self._one_batch(x))

    def summary(self, example: Any = None, *, depth: int | None = None) -> None:
        """Writes a table of the layers, their parameters and their memory, fitted to the terminal.

        Args:
            example: an input, as for ``predict_on_batch``, to show the shapes of the outputs; then every worker must
                call it.
            depth: modules that are nested deeper count in the one that holds them; None shows all.
        """
        shapes: dict[str, str] = {}
        if example is not None:
            args, kwargs = module_arguments(example)
            with noting_shapes(self.module) as shapes, torch.no_grad():
                self(*args, **kwargs)
        if self.strategy.workers.leads:
            console.write_line(summary_table(self.module, shapes, depth=depth, width=console.width()))

    def state_dict(self) -> dict[str, Any]:
        """The module's own state_dict: plain keys, batch-norm statistics averaged over the replicas.

        A worker may call it alone at the end of an epoch, of ``fit`` and of ``evaluate``. Between batches all workers
        must call it, and always if the model is sharded over them.
        """
        self._module.exchange_buffers(always=False)
        return self._module.state_dict()

    def host_state_dict(self) -> dict[str, torch.Tensor]:
        """A copy of ``state_dict()`` on the CPU, for which no device holds more than one tensor of other workers."""
        return host_state(self._module)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a state_dict of the plain module into every replica's copy."""
        self._module.load_state_dict(state)

    def get_weights(self) -> list[Any]:
        """The values of ``state_dict()`` as NumPy arrays, in its order. Every worker must call it.

        An array has no bfloat16: these weights become float32, exactly.
        """
        state = host_state(self._module).values()
        return [(value.float() if value.dtype == torch.bfloat16 else value).numpy() for value in state]

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Loads what ``get_weights`` returned into every replica's copy. Every worker must call it.

        Args:
            weights: arrays or tensors, as many and of the same shapes.
        """
        load_arrays(self._module, weights)

    def save_weights(self, path: str | os.PathLike[str]) -> None:
        """Writes the state_dict to a file, atomically. Every worker must call it; the chief writes.

        The file has the format of safetensors, and that of ``torch.save`` if its suffix is .pt, .pth or .bin. Suffixes
        of other formats, such as .h5, .keras and .ckpt, are a ConfigError.
        """
        save_weights(self._module, self.strategy.workers, path)

    def load_weights(self, path: str | os.PathLike[str]) -> None:
        """Loads a file of weights into every copy, or raises a CheckpointError. Every worker must call it.

        The file is a safetensors file, or a state_dict that ``torch.save`` wrote, whatever its name.
        """
        load_weights(self._module, self.strategy.workers, path)

    def checkpoint(self) -> Checkpoint:
        """A checkpoint of all state of the training, for an ``ls.CheckpointManager``. ``BackupAndRestore`` saves it.

        Raises a UsageError if the model is not compiled with an optimizer.
        """
        setup = self._trainable("checkpoint")
        # The training comes first: other settings are told as such, and not as weights that do not fit.
        checkpoint = Checkpoint(training=self.training_state, **setup.parts())
        checkpoint.settings["precision"] = setup.config.precision
        return checkpoint

    def load_checkpoint(self, path: str | os.PathLike[str]) -> Position:
        """Restores a checkpoint, or the newest in a folder, or raises a CheckpointError. Every worker must call it.

        Returns:
            The position of the training. ``fit(initial_epoch=position.epoch)`` begins that epoch.
        """
        self.checkpoint().restore(path)
        return self.training_state.position

    def fingerprint(self) -> str:
        """16 hex digits of all state of the training; see ``ls.fingerprint``. Every worker must call it."""
        parts = {"model": self._module} if self._setup is None else self._setup.parts()
        if self._setup is not None and isinstance(self._setup.config.loss, MirroredModule):
            parts["loss"] = self._setup.config.loss
        return fingerprint_of({**parts, "position": asdict(self.training_state.position)})

    def _compiled(self, caller: str) -> TrainSetup:
        if self._setup is None:
            raise UsageError(f"{caller} was called before compile; call model.compile(optimizer=..., loss=...) first")
        return self._setup

    def _trainable(self, caller: str) -> TrainSetup:
        setup = self._compiled(caller)
        if setup.optimizer is None:
            raise UsageError(f"{caller} needs an optimizer; call model.compile(optimizer=..., loss=...) first")
        return setup

    def _user_step(self, name: Literal["train_step", "test_step"]) -> UserStep | None:
        """The method of this name if a subclass has overridden it."""
        if getattr(type(self), name) is getattr(Model, name):
            return None
        if self._module.pipeline is not None:
            raise UsageError(f"a pipeline runs the model in parts, so {name} cannot; use another strategy for it")
        return weakref.WeakMethod(getattr(self, name))

    def _evaluate(
        self,
        setup: TrainSetup,
        data: EpochIterator,
        verbose: FitVerbose = 0,
        callbacks: Sequence[Callback] | None = None,
    ) -> dict[str, float]:
        self.clock = StepClock()
        with OwnFramesHidden(), self._callbacks(callbacks, verbose, data) as called:
            return run_evaluation(setup, data, callbacks=called, clock=self.clock)

    def _predict(
        self, data: EpochIterator, verbose: FitVerbose = 0, callbacks: Sequence[Callback] | None = None
    ) -> Any:
        self.clock = StepClock()
        with OwnFramesHidden(), self._callbacks(callbacks, verbose, data) as called:
            return run_prediction(
                self.strategy, self._module, self._precision, data, callbacks=called, clock=self.clock
            )

    @property
    def _precision(self) -> Precision:
        uncompiled = Precision("fp32", self.strategy.devices[0].torch_device.type)
        return uncompiled if self._setup is None else self._setup.precision

    def _make_loop(self, setup: TrainSetup) -> TrainLoop:
        # The loop outlives this call; a cycle would keep the weights alive.
        return TrainLoop(setup, self._callbacks((), 0, None), AgreedStop(cast("Model", weakref.proxy(self))))

    def _one_batch(self, x: Any, y: Any = None, sample_weight: Any = None) -> EpochIterator:
        rows = Arrays.of(x, y, sample_weight, floats=floats_of(self.module))
        return EpochIterator(rows.one_batch(self.strategy), name="the batch")

    def _iterator(self, data: Data, name: str, **steps: int | None) -> EpochIterator:
        return EpochIterator(distribute(self.strategy, data), name=name, **steps)

    def _without_files(
        self, callbacks: Sequence[Callback] | None, batches: int, verbose: FitVerbose
    ) -> Sequence[Callback] | None:
        """The callbacks that write no files, for a ``fast_dev_run``. Writes a line that names the others."""
        if not isinstance(callbacks, (list, tuple)):
            return callbacks  # checked later
        writers = [callback for callback in callbacks if isinstance(callback, Callback) and callback.writes_files]
        if verbose and self.strategy.workers.leads:
            names = ", ".join(type(callback).__name__ for callback in writers)
            without = f", without {names}" if names else ""
            console.write_line(f"fast_dev_run: 1 epoch of {batches} training and validation batches{without}")
        return [callback for callback in callbacks if callback not in writers]

    def _callbacks(
        self,
        user_callbacks: Sequence[Callback] | None,
        verbose: FitVerbose,
        data: EpochIterator | None,
        **params: Any,
    ) -> CallbackList:
        """The given callbacks, and a progress bar if ``verbose`` asks for one and there is none among them."""
        if verbose not in (0, 1, 2, "auto"):
            raise ConfigError(
                f"verbose={verbose!r} is unknown; choose 0 (silent), 1 or 'auto' (a live line) or 2 (plain lines)"
            )
        verbose = 1 if verbose == "auto" else verbose
        if isinstance(user_callbacks, Callback):
            raise ConfigError(
                f"callbacks is a {type(user_callbacks).__name__}; give a list, such as callbacks=[callback]"
            )
        if user_callbacks is not None and not isinstance(user_callbacks, (list, tuple)):
            raise ConfigError(f"callbacks is a {type(user_callbacks).__name__}; give a list of lockstep.Callback")
        callbacks = list(user_callbacks or ())
        if verbose and not any(isinstance(callback, ProgressBar) for callback in callbacks):
            callbacks.append(ProgressBar(verbose))
        params |= {"steps": None if data is None else data.steps, "verbose": verbose}
        return CallbackList(callbacks, model=self, params=params)
