"""One prediction: the module's outputs for all rows, in the order of the data."""

from __future__ import annotations

from typing import Any

from lockstep.mirroring.module import MirroredModule
from lockstep.strategies.base import Strategy
from lockstep.train.callbacks.base import Logs
from lockstep.train.callbacks.callback_list import CallbackList
from lockstep.train.feed import Feed
from lockstep.train.mode import module_mode
from lockstep.train.outputs import CollectedOutputs
from lockstep.train.precision import Precision
from lockstep.train.step import predict_step
from lockstep.train.timing import StepClock
from lockstep.train.untrained import run_batches


def run_prediction(
    strategy: Strategy,
    module: MirroredModule,
    precision: Precision,
    feed: Feed,
    *,
    callbacks: CallbackList,
    clock: StepClock,
) -> Any:
    """The outputs for all rows, on the CPU. Every worker must call it."""
    collected = CollectedOutputs()

    def run(batch: Any) -> tuple[int, Logs]:
        shards = strategy.local_results(strategy.run(predict_step, (module, precision, batch)))
        collected.begin_batch()
        for shard in shards:
            if shard.rows:
                collected.add(shard.rows, shard.outputs)
        return sum(shard.rows for shard in shards), {}

    with module_mode(module, training=False):
        callbacks.call("on_predict_begin")
        run_batches("predict", feed, run, callbacks=callbacks, clock=clock)
        callbacks.call("on_predict_end")
        return collected.joined(strategy.workers)
