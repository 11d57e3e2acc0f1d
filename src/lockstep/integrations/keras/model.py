"""``distribute``: has Keras's own ``fit``, ``evaluate`` and ``predict`` run their steps on all replicas.

    Keras's loop -> batch -> shards -> step in each replica -> sums over the replicas -> Keras's optimizer, once

The model stays the object that it was, with its layers, variables and optimizer; its class becomes a subclass of its
own, in which the steps are ours. A ``train_step`` of the model's class that calls ``super().train_step`` calls ours;
one that computes the step by itself runs in each replica.
"""

from __future__ import annotations

import warnings
import weakref
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate
from typing import Any, TypeVar

import keras
import torch

from lockstep.collectives.communicator import refuse_to_save, refuse_to_train, run_on_chief
from lockstep.collectives.per_replica import PerReplica, merge
from lockstep.data.readers import batch_digest
from lockstep.data.sharding import as_tensor, batch_rows, local_rows
from lockstep.data.structure import leaf_has_rows, take_rows
from lockstep.errors import ConfigError, DataError, UsageError
from lockstep.integrations.keras.batch_check import check_batch, check_user_step
from lockstep.integrations.keras.batchnorm import synchronize_batchnorms
from lockstep.integrations.keras.compiled import CompiledForward
from lockstep.integrations.keras.custom_loop import allow_custom_steps, build, prepare_in_step, runs_user_step
from lockstep.integrations.keras.kernels import fuse_batchnorms, needs_modes
from lockstep.integrations.keras.metrics import computes_metrics, results_of_all
from lockstep.integrations.keras.step import Step
from lockstep.integrations.keras.torch_modules import replicate_torch_modules
from lockstep.integrations.keras.user_step import UserStep, is_user_step
from lockstep.integrations.keras.variables import DefaultGenerators, ModelVariables, RunVariables, metrics_of
from lockstep.replicas.context import get_replica_context
from lockstep.strategies.base import Strategy, get_strategy
from lockstep.strategies.parallel import ParallelStrategy
from lockstep.train.arrays import check_equal_rows
from lockstep.train.callbacks.base import Callback

M = TypeVar("M", bound=keras.Model)
_COMPARED_ROWS = 4
"""Rows of each replica with which a model's own step is checked; every replica computes with those of all at once."""


def distribute(model: M, strategy: Strategy | None = None, *, sync_batchnorm: bool = False) -> M:
    """Has a Keras model train, evaluate and predict on all replicas of a strategy.

    With several workers each of them calls it, on a model with the same weights.

    Args:
        model: a Sequential, Functional or subclassed model, compiled or not.
        strategy: the strategy; that of the scope if None.
        sync_batchnorm: batch norms take their statistics from the whole batch, so that they too give the numbers of one
            device. Otherwise each replica's are those of its shard, and the moving ones are averaged over the rows.

    Returns:
        The same model. ``compile``, ``fit``, ``evaluate``, ``predict``, callbacks and ``save`` are Keras's own.

    Raises:
        ConfigError: a layer is stateful, or the strategy divides models.
        TypeError: ``model`` is no Keras model, or ``strategy`` no strategy.
        UsageError: the model belongs to another strategy already.

    Example:
        >>> import keras, lockstep as ls
        >>> from lockstep.integrations.keras import distribute
        >>> with ls.MirroredStrategy().scope():
        ...     model = distribute(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]))
        >>> model.compile("adam", "mse")
    """
    if not isinstance(model, keras.Model):
        raise TypeError(f"distribute takes a keras.Model, got {type(model).__name__}")
    strategy = get_strategy() if strategy is None else strategy
    if not isinstance(strategy, Strategy):
        raise TypeError(f"distribute takes a strategy, such as ls.MirroredStrategy(), got {type(strategy).__name__}")
    if isinstance(strategy, ParallelStrategy):
        raise ConfigError(
            "a ParallelStrategy divides torch modules and was given for a Keras model; use MirroredStrategy or "
            "MultiWorkerMirroredStrategy"
        )
    if isinstance(model, DistributedModel):
        if model._distribution.strategy is not strategy:
            raise UsageError("this model belongs to another strategy already; build it anew for this one")
        return model
    stateful = [layer.name for layer in model._flatten_layers() if getattr(layer, "stateful", False)]
    if stateful:
        raise ConfigError(
            f"the layer {stateful[0]!r} is stateful: it keeps a state for each row of a batch, and replicas divide the "
            "rows; make it with stateful=False, or use the model on one device"
        )
    (synchronize_batchnorms if sync_batchnorm else fuse_batchnorms)(model)
    replicate_torch_modules(model, len(strategy.devices), sync_batchnorm=sync_batchnorm)
    distribution = Distribution(strategy, allow_custom_steps(model, strategy), sync_batchnorm=sync_batchnorm)
    object.__setattr__(model, "_distribution", distribution)  # which Keras does not track
    # The object stays and its class changes: the program holds the model, its layers and its optimizer in variables
    # already.
    kind: Any = type(model)
    model.__class__ = _distributed_class(kind)
    model.train_function = model.test_function = model.predict_function = None
    return model


class Distribution:
    """A strategy, and what has been seen of the model that it trains."""

    def __init__(self, strategy: Strategy, default_generators: DefaultGenerators, *, sync_batchnorm: bool) -> None:
        self.strategy, self.sync_batchnorm = strategy, sync_batchnorm
        self.default_generators = default_generators
        self._checkable_batches = 0  # since the model was compiled, that Keras's steps or the model's own have taken
        self.weights_are_compared = False
        self.has_stepped = False  # Keras's loop has come to a step of all replicas
        self._needs_modes: bool | None = None  # None until it is looked at
        self._compiled: CompiledForward | None = None  # None until a step needs it
        self._first_rows: int | None = None  # of the present loop's first batch
        self.epoch_iterator: Callable[[], Any] = lambda: None  # Keras's, of the loop that has begun last

    def model_was_compiled(self) -> None:
        """Notes that the model's ``compile`` was called: what was seen of it before may hold no more."""
        self._needs_modes, self._compiled, self._checkable_batches = None, None, 0

    def checks_batch(self, rows: int) -> bool:
        """Whether a batch is compared with Keras's own numbers: the 1st, 2nd, 4th, ... that replicas divide."""
        if rows < 2 or self.strategy.num_replicas_in_sync == 1:
            return False
        self._checkable_batches += 1
        return self._checkable_batches.bit_count() == 1

    def begin_loop(self) -> None:
        """Notes that ``fit``, ``evaluate`` or ``predict`` begins, or a call for one batch."""
        self._first_rows = None

    def step(self, model: Any, rows: int, scale: float = 1.0) -> Step:
        """A step on a batch of ``rows``.

        With ``jit_compile`` it runs compiled code, but for batches of other sizes than the loop's first: the last one
        is not worth a code of its own.
        """
        if self._needs_modes is None:
            self._needs_modes = needs_modes(model)
        variables = ModelVariables(model)
        run = RunVariables("keras", self.default_generators.generators(), lambda: [variables], variables.metrics)
        step = Step(model=model, variables=variables, run=run, rows=rows, scale=scale, needs_modes=self._needs_modes)
        self._first_rows = self._first_rows or rows
        if not model.jit_compile or rows != self._first_rows:
            return step
        self._compiled = self._compiled or CompiledForward(model, variables.of_layers)
        return replace(step, compiled=self._compiled)

    def divide(self, data: Any) -> tuple[tuple[PerReplica[Any], PerReplica[int]], int]:
        """Divides a batch of all workers. Returns the local replicas' shards with their rows, and the rows of all.

        The shard of a replica without rows is the first row. Raises DataError if the workers' batches differ.
        """
        workers = self.strategy.workers
        data = keras.tree.map_structure(_on_host, data)
        if other := self._other("batch of a Keras model", lambda: batch_digest(data)):
            raise DataError(
                f"{other} has another batch than {workers.names[0]}; all workers read the same batches and take "
                "their rows of each: call keras.utils.set_random_seed with one seed, and give all the same data"
            )
        rows = batch_rows(data, is_item=True)
        local = local_rows(rows, workers)
        shards = [
            keras.tree.map_structure(lambda leaf, at=at: _rows(leaf, at, copies=workers.any_layout), data)
            for at in (
                (begin, size) if size else (0, 1)
                for begin, size in zip(accumulate(local.sizes, initial=local.start), local.sizes, strict=False)
            )
        ]
        return (PerReplica(shards), PerReplica(local.sizes)), rows

    def compare_weights(self, model: Any) -> None:
        """Raises a UsageError if workers have models with different variables. Compares them once."""
        if self.weights_are_compared:
            return
        self.weights_are_compared = True
        if other := self._other("weights of a Keras model", lambda: _digest(model.variables)):
            raise UsageError(
                f"{other} has other weights than {self.strategy.workers.names[0]}; call keras.utils.set_random_seed "
                "with one seed on all workers before the model is built, or load the same weights on all"
            )

    def _other(self, name: str, digest: Callable[[], int]) -> str | None:
        """The name of the first worker whose 32-bit digest is not the chief's; None if all are equal."""
        workers = self.strategy.workers
        if workers.is_single:
            return None
        digests = workers.all_gather_bytes(name, digest().to_bytes(4, "big"))
        return next((name for name, value in zip(workers.names, digests, strict=True) if value != digests[0]), None)


class DistributedModel(keras.Model):  # type: ignore[misc]  # Keras has no types
    """The steps of a model on all replicas. Stands between a model's own class and Keras's trainer."""

    _distribution: Distribution
    train_function: Any
    test_function: Any
    predict_function: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Keras's own, in a step of all replicas too."""
        context = get_replica_context()
        if context is not None and context.strategy is not self._distribution.strategy:
            raise UsageError(f"the model {self.name!r} is called in a step of another strategy than its own")
        if context is not None and not self._distribution.weights_are_compared and runs_user_step():
            prepare_in_step(self, args, kwargs)
        return super().__call__(*args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Keras's own."""
        super().compile(*args, **kwargs)
        self._distribution.model_was_compiled()

    def compile_from_config(self, config: Any) -> None:
        """Keras's own, which compiles no model whose class has a ``compile`` other than Keras's."""
        with _undistributed(self):
            self.compile_from_config(config)
        self._distribution.model_was_compiled()

    def fit(self, x: Any = None, y: Any = None, batch_size: int | None = None, *args: Any, **kwargs: Any) -> Any:
        """Keras's own."""
        refuse_to_train(self._distribution.strategy.workers, "fit")
        _check_given(x, batch_size, kwargs.get("callbacks"))
        check_equal_rows(x=x, y=y, sample_weight=kwargs.get("sample_weight"))
        if isinstance(held_out := kwargs.get("validation_data"), tuple):
            check_equal_rows(validation_data=held_out)
        return super().fit(x, y, batch_size, *args, **kwargs)

    def evaluate(self, x: Any = None, y: Any = None, batch_size: int | None = None, *args: Any, **kwargs: Any) -> Any:
        """Keras's own."""
        _check_given(x, batch_size, kwargs.get("callbacks"))
        check_equal_rows(x=x, y=y, sample_weight=kwargs.get("sample_weight"))
        return super().evaluate(x, y, batch_size, *args, **kwargs)

    def predict(self, x: Any, batch_size: int | None = None, *args: Any, **kwargs: Any) -> Any:
        """Keras's own."""
        _check_given(x, batch_size, kwargs.get("callbacks"))
        check_equal_rows(x=x)
        return super().predict(x, batch_size, *args, **kwargs)

    def train_on_batch(self, x: Any, y: Any = None, sample_weight: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Keras's own."""
        refuse_to_train(self._distribution.strategy.workers, "train_on_batch")
        check_equal_rows(x=x, y=y, sample_weight=sample_weight)
        return super().train_on_batch(x, y, sample_weight, *args, **kwargs)

    def test_on_batch(self, x: Any, y: Any = None, sample_weight: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Keras's own."""
        check_equal_rows(x=x, y=y, sample_weight=sample_weight)
        return super().test_on_batch(x, y, sample_weight, *args, **kwargs)

    def train_step(self, data: Any) -> dict[str, Any]:
        """One step on a batch of all replicas; returns the metrics. Outside replicas."""
        step, shards = self._step(data, is_training=True)
        strategy = self._distribution.strategy
        self._run(step.train, shards)
        gradients = step.run.merge(strategy, step.variables.trainable)
        if not gradients:
            warnings.warn("the model has no trainable weights", stacklevel=2)
            return self._results(step)
        with torch.no_grad(), strategy.computing_alike():
            self.optimizer.apply(gradients, step.variables.trainable)
        return self._results(step)

    def test_step(self, data: Any) -> dict[str, Any]:
        """The loss and metrics of a batch of all replicas, added to those before. Outside replicas."""
        step, shards = self._step(data, is_training=False)
        self._run(step.evaluate, shards)
        step.run.merge(self._distribution.strategy)
        return self._results(step)

    def predict_step(self, data: Any) -> Any:
        """The outputs for a batch of all replicas, on every worker. Outside replicas."""
        self._refuse_in_replica()
        self._distribution.has_stepped = True
        strategy, (shards, rows) = self._distribution.strategy, self._distribution.divide(data)
        self._build_for(data)
        self._distribution.compare_weights(self)
        step = self._distribution.step(self, rows)
        with torch.no_grad():
            outputs = strategy.run(step.predict, shards)
            step.run.merge(strategy)
            return strategy.gather(outputs, axis=0)

    def _symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        """Keras's own. It is called with the batches of a loop before its callbacks, which cannot see them."""
        if iterator is not None:
            self._distribution.epoch_iterator = weakref.ref(iterator)  # it holds the data
        super()._symbolic_build(iterator=iterator, data_batch=data_batch)

    def make_train_function(self, force: bool = False) -> None:
        """Keras's own, which must come to ``train_step`` of this class."""
        self._distribution.begin_loop()
        if force or self.train_function is None:
            self._refuse_options()
            super().make_train_function(force)
            # Around Keras's function, so that its loop, its callbacks and a train_step of the model's class stay as
            # they are.
            self.train_function = self._step_function(self.train_function, "train_step")

    def make_test_function(self, force: bool = False) -> None:
        """Keras's own, which must come to ``test_step`` of this class."""
        self._distribution.begin_loop()
        if force or self.test_function is None:
            self._refuse_options()
            super().make_test_function(force)
            self.test_function = self._step_function(self.test_function, "test_step")

    def make_predict_function(self, force: bool = False) -> None:
        """Keras's own, which must come to ``predict_step`` of this class."""
        self._distribution.begin_loop()
        if force or self.predict_function is None:
            super().make_predict_function(force)
            self.predict_function = self._step_function(self.predict_function, "predict_step")

    def save(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        """Keras's own, by the chief alone; every worker calls it."""
        self._on_chief("save", lambda: self.save(filepath, *args, **kwargs))

    def save_weights(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        """Keras's own, by the chief alone; every worker calls it."""
        self._on_chief("save_weights", lambda: self.save_weights(filepath, *args, **kwargs))

    def __setattr__(self, name: str, value: Any) -> None:
        """Keras's own. Raises a UsageError for a count in a step, which each replica would count."""
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number and get_replica_context() is not None and vars(self).get(name) != value:
            raise UsageError(
                f"the step sets {name!r} of the model to {value} in each replica; keep it in a variable, made by "
                'add_weight(..., trainable=False, aggregation="only_first_replica"), or set it in a callback'
            )
        super().__setattr__(name, value)

    def __reduce__(self) -> Any:
        with _undistributed(self):
            return self.__reduce__()

    def _step(self, data: Any, *, is_training: bool) -> tuple[Step, Any]:
        """A step for a batch, and the shards that it runs on; some are checked."""
        self._refuse_in_replica()
        distribution, strategy = self._distribution, self._distribution.strategy
        distribution.has_stepped = True
        shards, rows = distribution.divide(data)
        distribution.compare_weights(self)
        if distribution.checks_batch(rows):
            step = distribution.step(self, rows)
            # Function modes see what is drawn, and compiled code does not.
            step = replace(step, compiled=None, needs_modes=True, is_training=is_training)
            self._run(step.check, shards)
            check_batch(step, data, strategy)
        scale = float(self.optimizer.scale_loss(1.0)) if self.optimizer is not None else 1.0
        return distribution.step(self, rows, scale), shards

    def _build_for(self, data: Any) -> None:
        """Makes the variables of a model that is called for the first time, before replicas call it."""
        if not self.built:
            x, _, _ = keras.utils.unpack_x_y_sample_weight(keras.tree.map_structure(_on_host, data))
            build(self, (x,), {})

    def _refuse_in_replica(self) -> None:
        if get_replica_context() is not None:
            raise UsageError(
                f"a step of {_class_before(type(self)).__name__} came to Keras's in a replica; have its body itself "
                "call super().train_step(data), super().test_step(data) or super().predict_step(data)"
            )

    def _run(self, step: Callable[[Any, int], None], shards: Any) -> None:
        with results_of_all(metrics_of(self)) if computes_metrics(self) else nullcontext():
            self._distribution.strategy.run(step, shards)

    def _results(self, step: Step) -> dict[str, Any]:
        """The numbers of a step that has been merged."""
        results: dict[str, Any] | None = step.run.replicas[0].results
        return self.get_metrics_result() if results is None else results

    def _on_chief(self, name: str, act: Callable[[], None]) -> None:
        """Calls ``act`` on the chief, where the model is of the class that it had before."""
        refuse_to_save(self._distribution.strategy.workers, f"{name} of a Keras model")
        with _undistributed(self):
            run_on_chief(self._distribution.strategy.workers, f"{name} of a Keras model", act)

    def _refuse_options(self) -> None:
        if self.jit_compile and self._distribution.sync_batchnorm:
            raise ConfigError(
                "the model was compiled with jit_compile=True and has batch norms of sync_batchnorm=True, in which "
                "replicas meet and compiled code cannot; leave one of the two out"
            )
        if float8 := [variable.path for variable in self.trainable_variables if variable.overwrite_with_gradient]:
            raise ConfigError(
                f"the variable {float8[0]!r} belongs to a float8 layer, whose scales are no sums over the replicas; "
                "train with a policy of float32 or mixed_bfloat16"
            )

    def _should_torch_compile(self) -> bool:
        """Whether Keras puts ``torch.compile`` around a step, which replicas compile by themselves."""
        return False

    def _step_function(self, function: Callable[[Any], Any], name: str) -> Callable[[Any], Any]:
        """Wraps a step function of Keras: its step, of this class or of the model's own, runs on all replicas."""
        if is_user_step(_class_before(type(self)), name):
            if self.jit_compile:
                raise ConfigError(
                    f"{_class_before(type(self)).__name__}.{name} computes a step by itself, and jit_compile=True "
                    f"compiles Keras's steps only; leave jit_compile out, or call super().{name}(data)"
                )
            return partial(self._user_steps, name)

        def step(data: Any) -> Any:
            self._distribution.has_stepped = False
            result = function(data)
            if not self._distribution.has_stepped:
                raise ConfigError(
                    f"{_class_before(type(self)).__name__}.{name} has computed a step by itself, on one device; have "
                    f"it call super().{name}(data), or compute the step without naming {name}"
                )
            return result

        return step

    def _user_steps(self, name: str, data: Sequence[Any]) -> Any:
        """The results of a step that the model's class computes by itself, for each of the batches that Keras gives.

        These are several with ``steps_per_execution`` of Keras 3.16, which returns the last results, and all outputs.
        """
        results = [self._user_step(name, batch) for batch in data]
        if name != "predict_step" or len(results) == 1:
            return results[-1]
        return keras.tree.map_structure(lambda *outputs: torch.cat(outputs), *results)

    def _user_step(self, name: str, data: Any) -> Any:
        """The results of a step that the model's class computes by itself, in each replica on its shard."""
        distribution, replicas = self._distribution, self._distribution.strategy.num_replicas_in_sync
        batch = keras.tree.map_structure(_on_host, data)
        (shards, sizes), rows = distribution.divide(batch)
        if name == "predict_step":  # Keras builds a model for fit and evaluate
            self._build_for(batch)
        distribution.compare_weights(self)
        step = UserStep(
            step=getattr(self, name),
            name=f"{_class_before(type(self)).__name__}.{name}",
            metrics=metrics_of(self),
            rows=rows,
            sizes=sizes.values,
        )
        if name == "train_step" and distribution.checks_batch(rows):
            at = (0, min(rows, replicas * _COMPARED_ROWS))
            some = keras.tree.map_structure(lambda leaf: _rows(leaf, at, copies=False), batch)
            check_user_step(self, step, distribution.strategy, some, distribution.divide(some))
        with nullcontext() if name == "train_step" else torch.no_grad():
            results = step.run(distribution.strategy, shards)
        if name != "predict_step":
            return results[0]
        outputs = [
            keras.tree.map_structure(lambda output, size=size: output[:size], result)
            for result, size in zip(results, sizes, strict=True)
        ]
        return distribution.strategy.gather(merge(outputs), axis=0)


def _check_given(x: Any, batch_size: int | None, callbacks: Any) -> None:
    if batch_size is not None and isinstance(x, (torch.utils.data.DataLoader, keras.utils.PyDataset, Generator)):
        raise ConfigError(
            f"batch_size={batch_size} was given beside a {type(x).__name__}, which makes batches by itself; leave "
            "batch_size out, and have it make global batches, which are divided among the replicas"
        )
    for callback in callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]:
        if isinstance(callback, Callback):
            name = type(callback).__name__
            place = "lockstep.integrations.keras" if name == "BackupAndRestore" else "keras.callbacks"
            counterpart = name if hasattr(keras.callbacks, name) else "Callback"
            raise ConfigError(
                f"callbacks holds {name} of ls.Model; for a Keras model give a callback of Keras, such as "
                f"{place}.{counterpart}"
            )


def _on_host(leaf: Any) -> Any:
    leaf = as_tensor("a leaf of the batch", leaf)
    return leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf


def _digest(variables: Sequence[Any]) -> int:
    digest = 0
    for variable in variables:
        digest = zlib.crc32(variable.numpy().tobytes(), digest)
    return digest


def _rows(leaf: Any, at: tuple[int, int], *, copies: bool) -> Any:
    return take_rows(leaf, *at, copies=copies) if leaf_has_rows(leaf) else leaf


@cache
def _distributed_class(original: Any) -> Any:
    """The subclass of a model's class whose steps run on all replicas, under the same name.

    A new model, which Keras makes of it for a clone or from a configuration, is one of the original class.
    """
    names = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    new = {"__new__": lambda _, *args, **kwargs: original(*args, **kwargs)}
    return type(original.__name__, (original, DistributedModel), names | new)


def _class_before(distributed: type) -> Any:
    return distributed.__mro__[1]


@contextmanager
def _undistributed(model: Any) -> Iterator[None]:
    """A block in which a model is of the class that it had before: Keras writes down the names of classes."""
    distributed = type(model)
    model.__class__ = _class_before(distributed)
    try:
        yield
    finally:
        model.__class__ = distributed
