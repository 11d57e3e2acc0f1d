"""One evaluation: the loss and metrics over all rows, each counted once."""

from __future__ import annotations

from typing import Any

from lockstep.collectives.per_replica import PerReplica
from lockstep.replicas.device.async_scalars import NO_NUMBERS, Arriving
from lockstep.strategies.base import Strategy
from lockstep.train.callbacks.base import Logs
from lockstep.train.callbacks.callback_list import CallbackList
from lockstep.train.feed import Feed
from lockstep.train.job import Job
from lockstep.train.late_logs import batch_logs
from lockstep.train.metrics import ReplicaMetrics
from lockstep.train.mode import module_mode
from lockstep.train.running_loss import RunningLoss
from lockstep.train.step import ReplicaState, evaluate_step
from lockstep.train.timing import StepClock
from lockstep.train.under_way import StepsUnderWay
from lockstep.train.untrained import run_batches


def run_evaluation(
    strategy: Strategy, job: Job, feed: Feed, *, callbacks: CallbackList, clock: StepClock
) -> dict[str, float]:
    """The loss and metrics over the data; nothing is trained. Every worker must call it."""
    metrics = ReplicaMetrics.on(strategy, job.config.metrics)
    states = PerReplica([ReplicaState(own) for own in metrics.per_replica])
    loss, under_way = RunningLoss(), StepsUnderWay()

    def run(batch: Any) -> tuple[int, Logs]:
        outputs = strategy.local_results(strategy.run(evaluate_step, (job, states, batch)))
        metrics.trust_inputs()
        sums = [number for output in outputs for number in (output.total, output.count)]
        numbers = Arriving([*sums, 0.0], strategy.devices[0])
        loss.add(numbers, pairs=len(outputs))
        under_way.add(numbers, epoch=0, step=clock.steps + 1)
        now = loss.now()
        logs = {} if now.arrived and not now.counted else batch_logs(now, (), NO_NUMBERS)
        return sum(output.rows for output in outputs), logs

    with module_mode(job.module, training=False):
        callbacks.call("on_test_begin")
        run_batches("test", feed, run, callbacks=callbacks, clock=clock)
        totals = strategy.workers.exchange("end of an evaluation", [loss.total, loss.count, clock.examples])
        total, count, rows = (sum(column) for column in zip(*totals, strict=True))
        clock.examples = int(rows)
        logs = {"loss": RunningLoss(total, count).final(), **metrics.compute()}
        callbacks.call("on_test_end", logs=logs)
    return logs
