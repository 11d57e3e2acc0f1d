"""``ls.find_learning_rate``: the learning rate range test.

Smith 2015, "Cyclical Learning Rates for Training Neural Networks" (arXiv 1506.01186):

    all state saved -> an update at each rate, from the lowest to the highest -> losses -> all state restored
                                                                                `-> LearningRateRange

The losses are those of global batches, so they are one device's on any layout.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from lockstep.atomic_files import atomic_file
from lockstep.checkpoint import Checkpoint, CheckpointManager
from lockstep.checkpoint.checkpoint import strategy_of
from lockstep.checks import ABOVE_ZERO, check_number
from lockstep.collectives.communicator import all_gather_object, refuse_to_train, run_on_chief
from lockstep.data.resumable_iteration import DistributedIterable
from lockstep.errors import ClusterError, ConfigError, DataError, NonFiniteLossError
from lockstep.extras import require
from lockstep.mirroring.optim.optimizer import MirroredOptimizer
from lockstep.train.arrays import ArrayOptions, training_data
from lockstep.train.callbacks.base import Callback, Logs
from lockstep.train.epoch_iterator import distribute
from lockstep.train.model import Model

# Weight of the losses before in the running mean that ends a test: four batches of 16 rows had losses of 2.5 to 11.1.
_DECAY = 0.8


@dataclass(frozen=True, kw_only=True)
class LearningRateRange:
    """The result of ``ls.find_learning_rate``: the loss of the update at each rate, as far as the losses were finite.

    Args:
        rates: the learning rates of the first parameter group, ascending by a constant factor.
        losses: the losses of the global batches, before the update at the rate.
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]

    @cached_property
    def smoothed(self) -> tuple[float, ...]:
        """The mean of each loss and its neighbours, 5% of the test to either side; a running mean would lag behind."""
        side = max(1, len(self.losses) // 20)
        windows = (self.losses[max(0, at - side) : at + side + 1] for at in range(len(self.losses)))
        return tuple(math.fsum(window) / len(window) for window in windows)

    @property
    def suggestion(self) -> float | None:
        """The rate at which the smoothed loss falls steepest by the logarithm of the rate; None if it never falls.

        The rates are equally far apart in the logarithm. Rates above that of the lowest smoothed loss do not count.
        """
        curve = self.smoothed
        end = curve.index(min(curve)) if curve else 0
        slopes = [(curve[at + 1] - curve[at - 1], self.rates[at]) for at in range(1, end)]
        return min(slopes)[1] if slopes and min(slopes)[0] < 0 else None

    def plot(self, path: str | os.PathLike[str]) -> Path:
        """Writes the losses, the smoothed ones and the suggestion as a PNG, and returns its path."""
        figure = require("matplotlib.figure", "plots").Figure(figsize=(6, 4), layout="constrained")
        axes = figure.subplots()
        axes.plot(self.rates, self.losses, color="#b8c4d0", label="loss")
        axes.plot(self.rates, self.smoothed, color="#2f5d8a", label="smoothed")
        if self.suggestion is not None:
            label = f"suggestion {self.suggestion:.2g}"
            axes.axvline(self.suggestion, color="#d9822b", linestyle="--", label=label)
        low, first = min(self.smoothed), self.smoothed[0]
        axes.set(xscale="log", xlabel="learning rate", ylabel="loss", ylim=(low - (first - low) / 5, 2 * first - low))
        axes.legend(frameon=False)
        with atomic_file(Path(path)) as partial:
            figure.savefig(partial, format="png", dpi=160)
        return Path(path)


def find_learning_rate(
    model: Model | Callable[[Any], Any],
    x: Any,
    y: Any = None,
    batch_size: int | None = None,
    *,
    state: Sequence[Any] = (),
    lowest: float = 1e-7,
    highest: float = 10.0,
    steps: int = 100,
    diverged: float = 4.0,
) -> LearningRateRange:
    """Trains with learning rates that grow from update to update, and suggests one. Every worker must call it.

    Weights, buffers, optimizer, scheduler, random numbers and the position and generators of the data are then as
    before, bit for bit, also after an exception, unless workers were lost. Meanwhile they are saved in a folder for
    temporary files (TMPDIR), which the hosts of workers that divide a model must share. Nothing is set: use
    ``suggestion`` or read the plot. With several parameter groups the rates are those of the first, and the others keep
    their ratio to it.

    Args:
        model: a compiled ``ls.Model``; its scheduler does not run meanwhile. Or, for a loop of your own, a function
            ``step(batch)`` that makes one update with a distributed batch and returns the loss of the whole global
            batch, the same on all workers.
        x: arrays or an iterable of global batches, as in ``fit``. The data is iterated again when it ends.
        y: the targets, beside arrays.
        batch_size: rows of a global batch of arrays; 32 if None.
        state: with a function, all that it changes: mirrored modules and optimizers, variables, and whatever else
            ``ls.Checkpoint`` takes.
        lowest: the first rate.
        highest: the last rate, if the test gets there.
        steps: the number of updates from ``lowest`` to ``highest``.
        diverged: the test ends when a loss is NaN or infinite, or the running mean of the losses is more than this many
            times its lowest value.

    Raises:
        ConfigError: a number is not valid; a function without an optimizer in ``state``.
        DataError: the data has no batches.

    Example:
        >>> import torch, lockstep as ls
        >>> model = ls.Model(torch.nn.Linear(2, 1))
        >>> model.compile(optimizer=lambda p: torch.optim.SGD(p, 0.1), loss="mse")
        >>> result = ls.find_learning_rate(model, torch.ones(8, 2), torch.ones(8, 1), batch_size=4, steps=20)
        >>> len(result.rates) == len(result.losses) <= 20
        True
    """
    check_number("steps", steps, least=3, whole=True, optional=False)
    check_number("lowest", lowest, least=ABOVE_ZERO, optional=False)
    check_number("highest", highest, least=lowest * (1 + 1e-6), optional=False)
    check_number("diverged", diverged, least=1, optional=False)
    factor = (highest / lowest) ** (1 / (steps - 1))
    if isinstance(model, Model):
        test = RangeTest(_groups([model.optimizer]), [lowest * factor**step for step in range(steps)], diverged)
        refuse_to_train(model.strategy.workers, "find_learning_rate")
        _test_model(model, x, y, ArrayOptions(batch_size=batch_size), test)
    else:
        optimizers = [thing for thing in state if isinstance(thing, MirroredOptimizer)]
        if not optimizers or y is not None or batch_size is not None:
            raise ConfigError(
                "find_learning_rate got a function as step(batch); give its batches as x, and state=[...] with its"
                " mirrored modules and optimizers"
            )
        test = RangeTest(_groups(optimizers), [lowest * factor**step for step in range(steps)], diverged)
        _test_step(model, x, state, test)
    return LearningRateRange(rates=tuple(test.rates[: len(test.losses)]), losses=tuple(test.losses))


def _groups(optimizers: Sequence[MirroredOptimizer | None]) -> list[dict[str, Any]]:
    return [group for optimizer in optimizers if optimizer is not None for group in optimizer.param_groups]


class RangeTest:
    """The rates of a test, one for each update, and the losses so far."""

    def __init__(self, groups: Sequence[dict[str, Any]], rates: Sequence[float], diverged: float) -> None:
        self.rates, self.losses = rates, list[float]()
        self._sum, self._lowest = 0.0, math.inf
        self._groups, self._diverged = groups, diverged
        first = float(groups[0]["lr"]) if groups else 0.0
        self._ratios = [float(group["lr"]) / first if first else 1.0 for group in groups]

    def set_rate(self) -> None:
        """Sets the rate of the next update."""
        rate = self.rates[len(self.losses)]
        for group, ratio in zip(self._groups, self._ratios, strict=True):
            # In place: a captured update reads this tensor, and would not see another one.
            if isinstance(group["lr"], torch.Tensor):  # which a captured update reads
                group["lr"].fill_(rate * ratio)
            else:
                group["lr"] = rate * ratio

    def add(self, loss: float) -> bool:
        """Adds the loss of an update; whether the test has ended."""
        if not math.isfinite(loss):
            return True
        self.losses.append(loss)
        self._sum = _DECAY * self._sum + (1 - _DECAY) * loss
        running = self._sum / (1 - _DECAY ** len(self.losses))
        self._lowest = min(self._lowest, running)
        return len(self.losses) == len(self.rates) or running > self._diverged * self._lowest


class _TestCallback(Callback):
    """Runs a test in a fit whose epochs have one update."""

    def __init__(self, test: RangeTest) -> None:
        super().__init__()
        self._test = test

    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        self._test.set_rate()

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        if self._test.add(logs["loss"]):
            self.model.stop_training = True

    def ends_fit_after(self, error: NonFiniteLossError) -> bool:
        return True


def _test_model(model: Model, x: Any, y: Any, options: ArrayOptions, test: RangeTest) -> None:
    checkpoint, setup = model.checkpoint(), model._trainable("find_learning_rate")
    data, _ = training_data(model.strategy, model.module, x, y, None, options)
    batches = distribute(model.strategy, data)
    before = model.history, model.clock, model.stop_training, model._setup
    try:
        with restoring(checkpoint, batches):
            model._setup = replace(setup, scheduler=None)
            model.fit(
                batches,
                epochs=len(test.rates),
                steps_per_epoch=setup.config.accumulate,
                callbacks=[_TestCallback(test)],
                verbose=0,
            )
    finally:  # a checkpoint that is restored brings another History
        model.history, model.clock, model.stop_training, model._setup = before


def _test_step(step: Callable[[Any], Any], x: Any, state: Sequence[Any], test: RangeTest) -> None:
    things = {f"thing {number}": thing for number, thing in enumerate(state)}
    data = x if isinstance(x, DistributedIterable) else strategy_of(things).distribute_dataset(x)
    with restoring(Checkpoint(**things), data):
        for batch in _endless(data):
            test.set_rate()
            if test.add(float(step(batch))):
                return


def _endless(data: DistributedIterable) -> Iterator[Any]:
    while True:
        count = 0
        for batch in data:
            count += 1
            yield batch
        if not count:
            raise DataError("find_learning_rate got data without batches; give a list or a DataLoader with some")


@contextmanager
def restoring(checkpoint: Checkpoint, data: DistributedIterable) -> Iterator[None]:
    """A block after which all that a checkpoint holds, and the data's generators and attributes, are as before.

    Every worker must enter it. Where workers were lost, nothing is restored: the others could not be asked.
    """
    workers = checkpoint.workers
    random, attributes = data.random_state(), data.attribute_state()
    path = run_on_chief(workers, "folder of the range test", lambda: tempfile.mkdtemp(prefix="lockstep-range-test-"))
    folder = all_gather_object(workers.processes, "folder of the range test", path)[0]
    try:
        saved = CheckpointManager(checkpoint, folder).save(0)
        is_lost = False
        try:
            yield
        except ClusterError:
            is_lost = True
            raise
        finally:
            if not is_lost:
                # From a file and not from memory: the same way back as a resumed training, so nothing can be forgotten,
                # and no second copy of the state is held on a device.
                checkpoint.restore(saved)
                data.load_attributes({"attributes": attributes})
                data.load_random_state(random)
    finally:
        if workers.leads:
            shutil.rmtree(folder, ignore_errors=True)
