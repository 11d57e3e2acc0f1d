"""One evaluation: the loop over its batches, outside the replicas."""

from __future__ import annotations

from contextlib import closing

import torch

from lockstep.collectives.per_replica import PerReplica
from lockstep.strategies.base import Strategy
from lockstep.train.callbacks.callback_list import CallbackList
from lockstep.train.feed import Feed
from lockstep.train.job import Job
from lockstep.train.metrics import ReplicaMetrics
from lockstep.train.mode import module_mode
from lockstep.train.running_loss import RunningLoss
from lockstep.train.step import ReplicaState, evaluate_step
from lockstep.train.timing import StepClock


def run_evaluation(
    strategy: Strategy, job: Job, feed: Feed, *, callbacks: CallbackList, clock: StepClock
) -> dict[str, float]:
    """The loss and metrics over the data; nothing is trained. Every worker must call it."""
    metrics = ReplicaMetrics.on(strategy, job.config.metrics)
    states = PerReplica([ReplicaState(own) for own in metrics.per_replica])
    loss = RunningLoss()
    with module_mode(job.module, training=False):
        callbacks.call("on_test_begin")
        clock.start()
        with torch.no_grad(), closing(feed.epoch(0)) as batches:
            for step, batch in enumerate(batches):
                clock.pause()
                callbacks.call("on_test_batch_begin", step)
                clock.start()
                outputs = strategy.local_results(strategy.run(evaluate_step, (job, states, batch)))
                for output in outputs:
                    loss.add(output.total, output.count)
                clock.stop(rows=sum(output.rows for output in outputs))
                callbacks.call("on_test_batch_end", step, logs={"loss": loss.value})
                clock.start()
        totals = strategy.workers.exchange("end of an evaluation", [loss.total, loss.count, clock.examples])
        total, count, rows = (sum(column) for column in zip(*totals, strict=True))
        clock.examples = int(rows)
        logs = {"loss": RunningLoss(total, count).final(), **metrics.compute()}
        callbacks.call("on_test_end", logs=logs)
    return logs
