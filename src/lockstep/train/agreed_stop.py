"""The end of a fit before its last epoch: whichever worker asks for it, all end at the same place.

model.stop_training = True --one worker----> the end of the batch
                           `-several-------> Wish.STOP --the next exchange--> the end of that batch, on all
"""

from __future__ import annotations

from typing import Protocol

from lockstep.collectives.communicator import Wish, Workers


class Stoppable(Protocol):
    """What callbacks set to end a fit: the Model."""

    stop_training: bool


class AgreedStop:
    """Whether a fit ends early. Its answers are the same on every worker, and so is ``model.stop_training`` after them.

    Args:
        workers: of the fit. All of them have met since the fit before this one.
        model: whose ``stop_training`` callbacks set, each on its own worker.
    """

    def __init__(self, workers: Workers, model: Stoppable) -> None:
        self._workers = workers
        self._model = model
        workers.settle(Wish.STOP)  # of a fit that failed before it could end

    def after_batch(self) -> bool:
        """Whether all end here. Nothing is exchanged: one of several workers only wishes it, for the batch after."""
        if self._workers.alone:
            return self._model.stop_training
        if self.heard():
            return True
        self._wish()
        return False

    def heard(self) -> bool:
        """Whether an exchange has told of a worker that would stop. Every worker must call it at the same point."""
        if Wish.STOP not in self._workers.granted:
            return False
        self._workers.settle(Wish.STOP)
        self._model.stop_training = True
        return True

    def agreed(self, place: str) -> bool:
        """Whether all end at ``place``; several workers exchange it. Every worker must call it."""
        if not self._workers.alone:
            self._wish()
            self._workers.exchange(place)
            self.heard()
        return self._model.stop_training

    def _wish(self) -> None:
        if self._model.stop_training:
            self._workers.wish(Wish.STOP)
