"""``distribute``: has Keras's own ``fit``, ``evaluate`` and ``predict`` run their steps on all replicas.

    Keras's loop -> batch -> shards -> step in each replica -> sums over the replicas -> Keras's optimizer, once

The model stays the object that it was, with its layers, variables and optimizer; its class becomes a subclass of its
own, in which the steps are ours. A ``train_step`` of the model's class that calls ``super().train_step`` calls ours.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import accumulate
from typing import Any, TypeVar

import keras
import torch

from lockstep.collectives.communicator import run_on_chief
from lockstep.collectives.per_replica import PerReplica
from lockstep.data.readers import batch_digest
from lockstep.data.sharding import as_tensor, batch_rows, local_rows
from lockstep.data.structure import leaf_has_rows, take_rows
from lockstep.errors import ConfigError, DataError, UsageError
from lockstep.integrations.keras.batchnorm import synchronize_batchnorms
from lockstep.integrations.keras.custom_loop import allow_custom_steps, prepare_in_step
from lockstep.integrations.keras.first_batch import check_first_batch
from lockstep.integrations.keras.kernels import fuse_batchnorms, needs_modes
from lockstep.integrations.keras.step import Step
from lockstep.integrations.keras.torch_modules import replicate_torch_modules
from lockstep.integrations.keras.variables import Changes, DefaultGenerators, ModelVariables
from lockstep.replicas.context import get_replica_context
from lockstep.strategies.base import Strategy, get_strategy
from lockstep.strategies.parallel import ParallelStrategy

M = TypeVar("M", bound=keras.Model)
ReplicaStep = Callable[[Any, int], Any]


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
        ConfigError: the strategy divides models.
        TypeError: ``model`` is no Keras model.
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
    strategy = strategy or get_strategy()
    if isinstance(strategy, ParallelStrategy):
        raise ConfigError(
            "a ParallelStrategy divides torch modules and was given for a Keras model; use MirroredStrategy or "
            "MultiWorkerMirroredStrategy"
        )
    if isinstance(model, DistributedModel):
        if model._distribution.strategy is not strategy:
            raise UsageError("this model belongs to another strategy already; build it anew for this one")
        return model
    (synchronize_batchnorms if sync_batchnorm else fuse_batchnorms)(model)
    replicate_torch_modules(model, len(strategy.devices), sync_batchnorm=sync_batchnorm)
    object.__setattr__(model, "_distribution", Distribution(strategy))  # which Keras does not track
    kind: Any = type(model)
    model.__class__ = _distributed_class(kind)
    model.train_function = model.test_function = model.predict_function = None
    allow_custom_steps(model, strategy)
    return model


class Distribution:
    """A strategy, and what has been seen of the model that it trains."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self._default_generators = DefaultGenerators(strategy)
        self.first_batch_is_checked = False  # since the model was compiled
        self.weights_are_compared = False
        self.has_stepped = False  # Keras's loop has come to a step of all replicas
        self.needs_modes: bool | None = None  # None until it is looked at, after the model was compiled

    def step(self, model: Any, rows: int, scale: float = 1.0) -> Step:
        """A step on a batch of ``rows``."""
        if self.needs_modes is None:
            self.needs_modes = needs_modes(model)
        variables = ModelVariables(model, self.strategy, self._default_generators.generators())
        return Step(model=model, variables=variables, rows=rows, scale=scale, needs_modes=self.needs_modes)

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
        rows = batch_rows(data)
        own = local_rows(rows, workers)
        shards = [
            keras.tree.map_structure(lambda leaf, at=at: _rows(leaf, at, copies=workers.any_layout), data)
            for at in (
                (begin, size) if size else (0, 1)
                for begin, size in zip(accumulate(own.sizes, initial=own.start), own.sizes, strict=False)
            )
        ]
        return (PerReplica(shards), PerReplica(own.sizes)), rows

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
        return next((name for name, each in zip(workers.names, digests, strict=True) if each != digests[0]), None)


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
        if context is not None and not self._distribution.weights_are_compared:
            prepare_in_step(self, args, kwargs)
        return super().__call__(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """That of torch; in a replica for the gradients of the replica."""
        if get_replica_context() is None:
            super().zero_grad(set_to_none)
        else:
            for each in self.trainable_variables:
                each.value.grad = None

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Keras's own."""
        super().compile(*args, **kwargs)
        self._distribution.first_batch_is_checked, self._distribution.needs_modes = False, None

    def train_step(self, data: Any) -> dict[str, Any]:
        """One step on a batch of all replicas; returns the metrics. Outside replicas."""
        if not self.trainable_variables:
            warnings.warn("the model has no trainable weights", stacklevel=2)
            return self.test_step(data)
        step, shards = self._step(data)
        gradients = step.variables.apply(self._run(step.train, shards))
        with torch.no_grad(), self._distribution.strategy.computing_alike():
            self.optimizer.apply(gradients, step.variables.trainable)
        return self._ended()

    def test_step(self, data: Any) -> dict[str, Any]:
        """The loss and metrics of a batch of all replicas, added to those before. Outside replicas."""
        step, shards = self._step(data)
        step.variables.apply(self._run(step.evaluate, shards))
        return self._ended()

    def predict_step(self, data: Any) -> Any:
        """The outputs for a batch of all replicas, on every worker. Outside replicas."""
        self._distribution.has_stepped = True
        strategy, (shards, rows) = self._distribution.strategy, self._distribution.divide(data)
        step = self._distribution.step(self, rows)
        with torch.no_grad():
            outputs, changes = strategy.run(step.predict, shards)
            step.variables.apply(strategy.local_results(changes))
            return strategy.gather(outputs, axis=0)

    def make_train_function(self, force: bool = False) -> None:
        """Keras's own, which must come to ``train_step`` of this class."""
        if force or self.train_function is None:
            self._refuse_options()
            super().make_train_function(force)
            self.train_function = self._checked(self.train_function, "train_step")

    def make_test_function(self, force: bool = False) -> None:
        """Keras's own, which must come to ``test_step`` of this class."""
        if force or self.test_function is None:
            self._refuse_options()
            super().make_test_function(force)
            self.test_function = self._checked(self.test_function, "test_step")

    def make_predict_function(self, force: bool = False) -> None:
        """Keras's own, which must come to ``predict_step`` of this class."""
        if force or self.predict_function is None:
            super().make_predict_function(force)
            self.predict_function = self._checked(self.predict_function, "predict_step")

    def save(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        """Keras's own, by the chief alone; every worker calls it."""
        self._on_chief("save", lambda: self.save(filepath, *args, **kwargs))

    def save_weights(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        """Keras's own, by the chief alone; every worker calls it."""
        self._on_chief("save_weights", lambda: self.save_weights(filepath, *args, **kwargs))

    def __reduce__(self) -> Any:
        with _undistributed(self):
            return self.__reduce__()

    @classmethod
    def from_config(cls, config: Any, custom_objects: Any = None) -> Any:
        """A model of the class that this one had before, which is not distributed."""
        return _class_before(cls).from_config(config, custom_objects)

    def _step(self, data: Any) -> tuple[Step, Any]:
        """A step for a batch, and the shards that it runs on; the first one is checked."""
        distribution, strategy = self._distribution, self._distribution.strategy
        distribution.has_stepped = True
        shards, rows = distribution.divide(data)
        distribution.compare_weights(self)
        if not distribution.first_batch_is_checked and rows > 1 and strategy.num_replicas_in_sync > 1:
            check_first_batch(distribution.step(self, rows), data, lambda step: self._run(step, shards))
            distribution.first_batch_is_checked = True
        scale = float(self.optimizer.scale_loss(1.0)) if self.optimizer is not None else 1.0
        return distribution.step(self, rows, scale), shards

    def _run(self, step: ReplicaStep, shards: Any) -> list[Changes]:
        strategy = self._distribution.strategy
        return list(strategy.local_results(strategy.run(step, shards)))

    def _ended(self) -> dict[str, Any]:
        self._clear_losses()
        metrics: dict[str, Any] = self.get_metrics_result()
        return metrics

    def _clear_losses(self) -> None:
        """Keras's own, after a step: in a replica it would clear what other replicas' layers have noted."""
        if get_replica_context() is None:
            super()._clear_losses()

    def _on_chief(self, name: str, act: Callable[[], None]) -> None:
        """Calls ``act`` on the chief, where the model is of the class that it had before."""
        with _undistributed(self):
            run_on_chief(self._distribution.strategy.workers, f"{name} of a Keras model", act)

    def _refuse_options(self) -> None:
        if self.run_eagerly or self.jit_compile:
            option = "run_eagerly" if self.run_eagerly else "jit_compile"
            raise ConfigError(f"the model was compiled with {option}=True, which replicas do not support; leave it out")
        if float8 := [each.path for each in self.trainable_variables if each.overwrite_with_gradient]:
            raise ConfigError(
                f"the variable {float8[0]!r} belongs to a float8 layer, whose scales are no sums over the replicas; "
                "train with a policy of float32 or mixed_bfloat16"
            )

    def _checked(self, function: Callable[[Any], Any], name: str) -> Callable[[Any], Any]:
        """A step function of Keras, which raises a ConfigError if it has not come to a step of all replicas."""

        def step(data: Any) -> Any:
            self._distribution.has_stepped = False
            result = function(data)
            if not self._distribution.has_stepped:
                raise ConfigError(
                    f"{_class_before(type(self)).__name__}.{name} has computed a step by itself, on one device; have "
                    f"it call super().{name}(data), or override compute_loss instead"
                )
            return result

        return step


def _on_host(leaf: Any) -> Any:
    leaf = as_tensor("a leaf of the batch", leaf)
    return leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf


def _digest(variables: Sequence[Any]) -> int:
    digest = 0
    for each in variables:
        digest = zlib.crc32(each.numpy().tobytes(), digest)
    return digest


def _rows(leaf: Any, at: tuple[int, int], *, copies: bool) -> Any:
    return take_rows(leaf, *at, copies=copies) if leaf_has_rows(leaf) else leaf


@cache
def _distributed_class(original: Any) -> Any:
    """The subclass of a model's class whose steps run on all replicas, under the same name."""
    names = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    return type(original.__name__, (original, DistributedModel), names)


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
