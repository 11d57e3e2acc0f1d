"""Any subclass of transformers' Trainer on the replicas of a strategy: TRL's, sentence-transformers', a user's."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import transformers

from lockstep.integrations.transformers.arguments import signature_with_strategy
from lockstep.integrations.transformers.trainer import Trainer

C = TypeVar("C", bound=transformers.Trainer)


def distribute(trainer_class: type[C]) -> type[C]:
    """The class of Trainers that train as ``trainer_class`` does, on all replicas of a strategy.

    It takes the arguments of ``trainer_class``, by name and by position, and ``strategy=`` as
    ``lockstep.integrations.transformers.Trainer`` does, which is ``distribute(transformers.Trainer)``. The numbers are
    those of ``trainer_class`` on one device with the whole global batch. Methods that compute a loss or a prediction
    run in all replicas, each with its own copies of the models as ``self.model`` and the like.

    Raises:
        TypeError: ``trainer_class`` is no subclass of ``transformers.Trainer``.

    Example:
        >>> import transformers
        >>> from lockstep.integrations.transformers import distribute
        >>> Seq2SeqTrainer = distribute(transformers.Seq2SeqTrainer)
        >>> issubclass(Seq2SeqTrainer, transformers.Seq2SeqTrainer)
        True
    """
    if not isinstance(trainer_class, type) or not issubclass(trainer_class, transformers.Trainer):
        raise TypeError(
            f"distribute takes a subclass of transformers.Trainer, as trl.SFTTrainer is; got {trainer_class!r}"
        )
    distributed: type[C] = _DISTRIBUTED(trainer_class)
    return distributed


def _distributed(trainer_class: Any) -> Any:
    if issubclass(trainer_class, Trainer):
        return trainer_class
    if trainer_class is transformers.Trainer:
        return Trainer
    members = {
        "__module__": __name__,
        "__doc__": f"``{trainer_class.__name__}`` on all replicas of a strategy, made by ``distribute``.",
        "__signature__": signature_with_strategy(trainer_class),
    }
    # Trainer first: its training_step divides the batch, and calls that of trainer_class in each replica.
    return type(trainer_class.__name__, (Trainer, trainer_class), members)


_DISTRIBUTED: Callable[[Any], Any] = cache(_distributed)  # one class for each, as users compare and subclass them
