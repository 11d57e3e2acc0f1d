"""EMA and SWA: averages of the weights, with which a model is validated, saved and left after fit.

fit begins -> updates --> averaged --> validation, and what callbacks save at the end of the epoch: the averages
                 ^                                         |
                 `--- the trained weights are back --------'--> fit ends: the averages

A whole checkpoint has both: the weights that are trained as the model's, and the averages as this callback's state.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from lockstep._torch_compat import BatchNormBase
from lockstep.checks import check_number
from lockstep.train.callbacks.base import Callback, Logs
from lockstep.train.weight_averages import Average, WeightAverages


class WeightAverage(Callback, ABC):
    """Base of the callbacks that average the weights. Its hooks come before those of other callbacks.

    At the end of an epoch the model has the averages: for the validation, for callbacks that save weights or keep the
    best, and after fit. In training it has the trained weights, with the same bits as without the callback.
    """

    # Before the others: what they save or compare at the end of an epoch has the averages
    # (test_what_is_saved_has_the_average_and_a_whole_checkpoint_both).
    comes_after = -1

    def __init__(self, average: Average) -> None:
        super().__init__()
        self._average = average
        self._averages: WeightAverages | None = None
        self._updates = 0
        self._waits = False  # whether the last batch waits for an update, which the end of the epoch makes
        self._epoch_is_open = False

    @property
    def count(self) -> int:
        """How many times the weights were averaged in this fit, the first copy included."""
        return 0 if self._averages is None else self._averages.count

    @abstractmethod
    def _is_due(self, *, epoch_ended: bool) -> bool:
        """Whether to average the weights now: after an update, or after the updates of an epoch."""

    @final
    def wants_batch_logs(self) -> bool:
        return False

    @final
    def on_train_begin(self, logs: Logs) -> None:
        self._averages, self._updates = WeightAverages(self.model.training_state.module, self._average), 0
        self._waits = self._epoch_is_open = False
        statistics = [name for name, part in self.model.module.named_modules() if isinstance(part, BatchNormBase)]
        if statistics:
            warnings.warn(
                f"{type(self).__name__} averages weights, and the batch-norm statistics, such as those of "
                f"{statistics[0]!r}, stay those of the trained weights; after fit compute them for the averages: "
                "torch.optim.swa_utils.update_bn(inputs, model.module)",
                stacklevel=2,
            )

    @final
    def on_epoch_begin(self, epoch: int, logs: Logs) -> None:
        self._set_averaged(False)
        self._epoch_is_open = True

    @final
    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        self._waits = not self.model.training_state.at_update
        if not self._waits:
            self._count_update()

    @final
    def on_test_begin(self, logs: Logs) -> None:
        # The validation begins before on_epoch_end, so whichever comes first ends the training part of the epoch.
        if self._averages is not None:  # in fit
            self._end_training_part()

    @final
    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        self._end_training_part()

    @final
    def on_train_end(self, logs: Logs) -> None:
        self._set_averaged(True)
        self._averages = None

    @contextmanager
    def exchanging(self, *, averaged: bool) -> Iterator[None]:
        before = self._averages is not None and self._averages.are_exchanged
        self._set_averaged(averaged)
        try:
            yield
        finally:
            self._set_averaged(before)

    @final
    def state_dict(self) -> dict[str, Any]:
        averages = {} if self._averages is None else self._averages.state_dict()
        return {"count": self.count, "averages": averages, "updates": self._updates}

    @final
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._updates = state["updates"]
        if self._averages is not None:
            self._averages.load_state_dict(state["averages"], state["count"])

    @final
    def close(self) -> None:
        self._set_averaged(False)  # after an error, or Ctrl-C
        self._averages = None

    def _end_training_part(self) -> None:
        if self._epoch_is_open:
            self._epoch_is_open = False
            if self._waits:
                self._waits = False
                self._count_update()
            self._average_if_due(epoch_ended=True)
        self._set_averaged(True)

    def _count_update(self) -> None:
        self._updates += 1
        self._average_if_due(epoch_ended=False)

    def _average_if_due(self, *, epoch_ended: bool) -> None:
        if self._averages is not None and self._is_due(epoch_ended=epoch_ended):
            self._averages.update()

    def _set_averaged(self, averaged: bool) -> None:
        if self._averages is not None and self._averages.are_exchanged is not averaged:
            self._averages.exchange()


@final
class EMA(WeightAverage):
    """Keeps an exponential moving average of the weights, as ``torch.optim.swa_utils.AveragedModel`` with its EMA.

    The model is validated and saved with the averages, and has them after fit. Updates are made to the trained weights,
    and a whole checkpoint has both, so that BackupAndRestore resumes with the same bits. It works on every layout; each
    worker averages the parts of the weights that it holds.

    Args:
        decay: average = decay * average + (1 - decay) * weights, after each update. The first update copies the
            weights.
        update_every: average after every so many updates.

    Example:
        >>> callback = EMA(0.999)
    """

    def __init__(self, decay: float = 0.999, *, update_every: int = 1) -> None:
        check_number("EMA(decay)", decay, least=0, most=1, optional=False)
        check_number("EMA(update_every)", update_every, least=1, whole=True, optional=False)
        super().__init__(get_ema_multi_avg_fn(decay))  # type: ignore[no-untyped-call]
        self.decay, self.update_every = decay, update_every

    def _is_due(self, *, epoch_ended: bool) -> bool:
        return not epoch_ended and self._updates % self.update_every == 0


@final
class SWA(WeightAverage):
    """Averages the weights of the ends of the last epochs: stochastic weight averaging (Izmailov et al., 2018).

    The average is that of ``torch.optim.swa_utils.AveragedModel``. As with ``EMA`` the model is validated and saved
    with it, and has it after fit. For the learning rate give ``compile`` torch's ``SWALR`` as scheduler, which counts
    updates here.

    Args:
        start_from_epoch: the first epoch whose weights count, from 0; None is the first of the last quarter.

    Example:
        >>> callback = SWA(start_from_epoch=10)
    """

    def __init__(self, start_from_epoch: int | None = None) -> None:
        check_number("SWA(start_from_epoch)", start_from_epoch, least=0, whole=True)
        super().__init__(get_swa_multi_avg_fn())  # type: ignore[no-untyped-call]
        self.start_from_epoch = start_from_epoch

    def _is_due(self, *, epoch_ended: bool) -> bool:
        epochs, start = self.params.get("epochs", 1), self.start_from_epoch
        first = epochs * 3 // 4 if start is None else start
        return epoch_ended and self.model.training_state.position.epoch > first  # the loop is at the next epoch already
