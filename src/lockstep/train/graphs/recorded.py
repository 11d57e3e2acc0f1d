"""One recorded step: all that belongs to it, and its replay.

batch -> fixed addresses --.
rates -> tensors -----------+-- replay --> outputs, gradients, sums --> copies for the caller
gradients, sums of a cycle -'
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.replicas.device.cuda import DeviceGraph
from lockstep.train.graphs.carried import Carried, Snapshot
from lockstep.train.graphs.inputs import StaticInputs
from lockstep.train.graphs.outputs import own_copies
from lockstep.train.graphs.rates import DeviceRates
from lockstep.train.graphs.standing import Standing
from lockstep.train.step import StepOutput


@dataclass(frozen=True)
class StepResults:
    """What a step of all replicas has left.

    Args:
        outputs: one per replica.
        metrics: per replica what its metrics are to be updated with; None for no rows or no metrics.
    """

    outputs: tuple[StepOutput, ...]
    metrics: Sequence[Any]


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """A step under one signature.

    Args:
        graph: the recording.
        inputs: where it reads its batch.
        rates: where it reads learning rates.
        carried: reads and sets gradients and sums.
        entered: what was carried into the step; those tensors it reads.
        left: what was carried out of it; those tensors it writes.
        results: whose tensors it writes.
        standing: what else it takes for granted.
    """

    graph: DeviceGraph
    inputs: StaticInputs
    rates: DeviceRates
    carried: Carried
    entered: Snapshot
    left: Snapshot
    results: StepResults
    standing: Standing

    def replay(self, batch: Any, entering: Snapshot) -> StepResults:
        """Runs the step on another batch. The tensors in the results are the caller's own.

        Args:
            batch: of the signature of the recorded one.
            entering: what is carried now, of the kind of ``entered``.
        """
        self.entered.take(entering)
        self.inputs.take(batch)
        self.rates.refresh()
        self.graph.replay()
        self.carried.put(self.left, where_not=entering)
        own: StepResults = own_copies(self.results)
        return own
