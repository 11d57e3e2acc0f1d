"""Records steps: all replicas run one step while their device records, and nothing is computed."""

from __future__ import annotations

from functools import wraps
from typing import Any
from weakref import WeakSet

from lockstep.collectives.per_replica import PerReplica
from lockstep.replicas.device.cuda import DeviceGraph
from lockstep.replicas.device.driver import DeviceDriver
from lockstep.strategies.base import Strategy
from lockstep.train.graphs.carried import Carried
from lockstep.train.graphs.deferred import metrics_apart
from lockstep.train.graphs.inputs import StaticInputs
from lockstep.train.graphs.rates import FREE, DeviceRates
from lockstep.train.graphs.recorded import RecordedStep, StepResults
from lockstep.train.graphs.standing import Standing
from lockstep.train.graphs.unfit import UnfitError
from lockstep.train.job import Job
from lockstep.train.step import ReplicaState, StepOutput, train_step


class Recorder:
    """Records the steps of one job.

    Args:
        strategy: whose replicas, all of one device.
        job: with an optimizer.
        states: one per replica.
        carried: what steps hand to each other.
        driver: of the device.

    Raises:
        UnfitError: the optimizer's step cannot be recorded.
    """

    def __init__(
        self,
        strategy: Strategy,
        job: Job,
        states: PerReplica[ReplicaState],
        carried: Carried,
        driver: DeviceDriver,
    ) -> None:
        if job.optimizer is None:
            raise UnfitError("there is no optimizer")
        self._strategy, self._job, self._states, self._carried = strategy, job, states, carried
        self._driver = driver
        self._device = strategy.devices[0].torch_device
        self._rates = DeviceRates(job.optimizer, self._device)
        self._graphs: WeakSet[DeviceGraph] = WeakSet()
        self._pool: Any = None

    def record(self, batch: Any, due: bool) -> RecordedStep:
        """A recording of the step on such a batch. The step has not been run; replay it.

        Raises:
            UnfitError: the device refused. All is as it was before.
        """
        before = self._carried.now()
        if not self._graphs:  # the last of a pool's graphs takes it along: torch records no other one there
            self._pool = self._driver.graph_pool(self._device)
        try:
            inputs = StaticInputs(batch)  # for which there may be no memory
            self._rates.refresh()
            graph = self._driver.graph(self._device, self._strategy.generators.on_gpu(), self._pool)
            results = self._run(graph, inputs.batch, due)
        except Exception as error:  # an error of the program's own comes again, in the step that is run as it is
            self._carried.put(before)
            raise UnfitError(f"the step could not be recorded: {type(error).__name__}: {_first_line(error)}") from error
        except BaseException:
            self._carried.put(before)
            raise
        self._graphs.add(graph)
        after = self._carried.now()
        self._carried.put(before)
        return RecordedStep(
            graph=graph,
            inputs=inputs,
            rates=self._rates,
            carried=self._carried,
            entered=before,
            left=after,
            results=results,
            standing=Standing(self._job, FREE),
        )

    def _run(self, graph: DeviceGraph, batch: Any, due: bool) -> StepResults:
        strategy = self._strategy
        with metrics_apart(self._states.values) as kept, self._rates.instead(), graph.recording():
            found = strategy.run(_recorded_step, (graph, self._job, self._states, batch, due))
        return StepResults(strategy.local_results(found), [each.arguments for each in kept])


@wraps(train_step)  # what the first run of a step is looked at for has been looked at
def _recorded_step(graph: DeviceGraph, job: Job, state: ReplicaState, item: Any, update: bool) -> StepOutput:
    with graph.in_replica():
        return train_step(job, state, item, update)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
